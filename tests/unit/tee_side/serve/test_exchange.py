"""From the admission of a request to its last byte, or the client's leaving."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest

from protocol.errors import EndpointError, LimitError, PromptError
from tee_side.engine.request import Delivery, NewToken, PromptRead
from tee_side.engine.waiting import QueueFullError
from tee_side.serve.app import create_app
from tee_side.serve.exchange import Exchange
from tee_side.serve.limits import RateLimitError
from tee_side.serve.serving import Caller
from tests.kit.rows import each_row
from tests.kit.serve import (
    Connection,
    FakeEngine,
    FakeTicket,
    FakeWatch,
    Reply,
    call,
    complete,
    connected,
    connection,
    in_a_loop,
    serving,
)

PATH = "/v1/completions"
TOKEN = Delivery((NewToken(0, 300, None, None),), PromptRead())
GONE = EndpointError("ipc:///tmp/gpu", got="nothing", expected="a reply")


def _body(stream: bool, **more: Any) -> dict[str, Any]:
    return {"prompt": [5, 6], "stream": stream} | more


def _ask(engine: FakeEngine, body: dict[str, Any], **more: Any) -> tuple[Reply, FakeWatch]:
    watch = FakeWatch()
    return call(serving(engine, watch=watch, **more), "POST", PATH, body), watch


def _outcomes(watch: FakeWatch) -> list[str]:
    return [outcome for outcome, *_ in watch.ended]


@dataclass
class Held:
    """A request whose deliveries the test makes."""

    engine: FakeEngine
    watch: FakeWatch
    asked: Connection

    async def status(self) -> int:
        """Wait for the first byte of the answer."""
        await self.asked.changed.wait()
        return self.asked.reply.status

    async def to_the_end(self) -> None:
        while not self.asked.reply.text.endswith("[DONE]\n\n"):
            self.asked.changed.clear()
            await self.asked.changed.wait()


@asynccontextmanager
async def _held(body: dict[str, Any], **more: Any) -> AsyncIterator[Held]:
    """Ask, and go on when the engine is asked; at the end the client leaves."""
    engine, watch = FakeEngine(hold=True), FakeWatch()
    app = create_app(serving(engine, watch=watch, **more))
    async with connected(app, "POST", PATH, body) as asked:
        await engine.submitted.wait()
        engine.submitted.clear()
        yield Held(engine, watch, asked)


@each_row("stream", [False, True])
def test_everything_of_a_request_passes_the_watch(stream: bool) -> None:
    engine, body = FakeEngine(says=[300, 301], reused=1), {"prompt": [[5, 6], [7]], "n": 2}
    reply, watch = _ask(engine, _body(stream, max_tokens=3, **body), authorise=lambda _: "alice")
    assert watch.begun == [("alice", 3, 12)]
    assert sum(watch.events) == 8
    assert watch.ended == [("stop", 3, 8)]
    assert reply.headers["x-ratelimit-limit-requests"] == "9"
    assert {request.owner for request in engine.requests} == {"alice"}
    # The outcome is length where a choice ended by it.
    assert _outcomes(_ask(FakeEngine(), _body(stream, max_tokens=2))[1]) == ["length"]


def test_usage_is_told_as_a_multiple_and_accounted_for_as_it_is() -> None:
    engine = FakeEngine(says=[300, 301, 302], reused=1)
    reply, watch = _ask(engine, _body(False, max_tokens=3), round_usage=16)
    told = {"prompt_tokens": 16, "completion_tokens": 16, "total_tokens": 32}
    assert reply.json()["usage"] == told | {"prompt_tokens_details": {"cached_tokens": 16}}
    assert watch.ended == [("stop", 2, 3)]


@each_row("stream", [False, True])
def test_an_error_is_an_http_error_before_the_first_byte_and_an_event_behind_it(
    stream: bool,
) -> None:
    reply, watch = _ask(FakeEngine(error=GONE), _body(stream))
    assert (reply.status, reply.error()["code"]) == (503, "engine_error")
    assert _outcomes(watch) == ["EndpointError"]
    assert "gpu" not in reply.text
    reply, watch = _ask(FakeEngine(error=GONE, fail_after=2), _body(stream))
    assert reply.status == (200 if stream else 503)
    if stream:
        *chunks, last = reply.events()
        assert (len(chunks), last["error"]["code"]) == (2, "engine_error")
    assert _outcomes(watch) == ["EndpointError"]


def test_what_could_never_run_is_refused_before_it_is_accounted_for() -> None:
    headers = {"x-ratelimit-limit-requests": "60"}
    limit = RateLimitError("API key", got="61", expected="60", after_s=17, headers=headers)
    limited = serving(watch=FakeWatch(refusal=limit))
    reply = call(limited, "POST", PATH, _body(True))
    assert (reply.status, reply.headers["retry-after"]) == (429, "17")
    assert headers.items() <= reply.headers.items()
    for n, where, param in ((2, "samples", "body.n"), (1, "prompt", None)):
        engine = FakeEngine(unfit=PromptError(where, got="2", expected="1"))
        reply, watch = _ask(engine, _body(True, n=n))
        assert (reply.status, reply.error()["param"]) == (400, param)
        assert (watch.begun, engine.requests) == ([], [])
    for state, retry in (("starting", "5"), ("failed", None)):
        engine = FakeEngine(state=state)  # type: ignore[arg-type]
        reply, watch = _ask(engine, _body(True))
        assert (reply.status, reply.error()["code"]) == (503, state)
        assert reply.headers.get("retry-after") == retry
        assert (watch.begun, engine.requests) == ([], [])


@in_a_loop
async def test_an_error_of_one_prompt_cancels_the_others() -> None:
    async with _held(_body(False, prompt=[[5], [6]])) as held:
        first, second = held.engine.open
        held.engine.step(Delivery(error=GONE, ended=True))
        assert await held.status() == 503
        assert (held.engine.cancelled, held.engine.open) == ([second], [])
        assert first.request.prompt_ids == (5,)


@in_a_loop
async def test_what_the_end_of_the_server_cuts_off_is_told() -> None:
    for begun in (True, False):
        engine, watch = FakeEngine(hold=True), FakeWatch()
        made = connection("POST", PATH, _body(True))
        app = create_app(serving(engine, watch=watch))
        task = asyncio.create_task(app(made.scope, made.receive, made.send))
        await engine.submitted.wait()
        if begun:
            engine.step(TOKEN)
            await made.changed.wait()
        # As uvicorn does with what is still open after its grace.
        task.cancel()
        await task
        error = made.reply.events()[-1]["error"] if begun else made.reply.error()
        assert (made.reply.status, error["code"]) == (200 if begun else 503, "failed")
        assert _outcomes(watch) == ["EngineError"]
        assert engine.open == []


class Full(FakeEngine):
    """Has `places`, each at every so many attempts; `never`: a request too many could never run."""

    places, every, attempts, most, never = 1, 1, 0, 0, False

    def submit(self, *arguments: Any) -> FakeTicket:
        self.attempts += 1
        full = len(self.open) >= self.places
        if full and self.never:
            raise PromptError("prompt", got="2", expected="at most 1")
        if full or (self.attempts - 1) % self.every:
            raise QueueFullError("queue", got="2", expected="at most 1")
        self.most = max(self.most, len(self.open) + 1)
        return super().submit(*arguments)


@each_row(
    ("places", "every", "count", "most"),
    # The last waits for a place that others have; the one before for a few of its own at a time.
    [(1, 1, 3, 1), (300, 1, 300, 16), (1, 3, 3, 1)],
)
def test_prompts_of_a_request_wait_for_places(
    places: int, every: int, count: int, most: int
) -> None:
    engine = Full(says=[300])
    engine.places, engine.every = places, every
    reply = complete(engine, prompt=[[at + 1] for at in range(count)], max_tokens=1)
    assert [choice["index"] for choice in reply.json()["choices"]] == list(range(count))
    assert engine.most == most
    # What could never run cancels the one before it.
    never = Full(hold=True)
    never.never = True
    assert complete(never, prompt=[[5], [6]]).status == 400
    assert (len(never.cancelled), never.open) == (1, [])


@in_a_loop
async def test_a_prompt_that_lost_its_place_waits_if_others_of_its_request_have_one() -> None:
    for begun in (True, False):
        prompts = [[5], [6]] if begun else [[6]]
        async with _held(_body(False, prompt=prompts)) as held:
            lost = QueueFullError("queue", got="9", expected="< 9")
            held.engine.step(Delivery(error=lost, ended=True), ticket=len(prompts) - 1)
            if begun:
                await held.engine.submitted.wait()
                assert [one.prompt_ids for one in held.engine.requests] == [(5,), (6,), (6,)]
                for _ in range(2):
                    end = NewToken(0, 300, None, "stop")
                    held.engine.step(Delivery((end,), PromptRead(), ended=True))
            assert await held.status() == (200 if begun else 503)
        assert held.watch.ended == [("stop", 2, 2) if begun else ("QueueFullError", 0, 0)]


@in_a_loop
async def test_what_the_machine_refuses_ends_the_request_and_is_not_asked_for_again() -> None:
    async with _held(_body(False, prompt=[[at + 1] * 2 for at in range(20)])) as held:
        held.engine.step(TOKEN)
        refused = LimitError("KV memory", got="much", expected="less")
        held.engine.step(Delivery(error=refused, ended=True), ticket=1)
        assert await held.status() == 503
        assert len(held.engine.requests) == 16
    # Only what was asked of the engine counts.
    assert held.watch.ended == [("LimitError", 32, 1)]
    assert held.engine.open == []


@in_a_loop
async def test_a_closed_connection_cancels_its_request_in_the_engine_at_once() -> None:
    for stream in (False, True):
        async with _held(_body(stream)) as held:
            held.engine.step(TOKEN)
            if stream:
                await held.asked.changed.wait()
            [ticket] = held.engine.open
        assert held.engine.cancelled == [ticket]
        assert held.watch.ended == [("cancelled", 2, 1)]
        assert held.asked.reply.status == (200 if stream else 0)
    # Between two ticks of the answer's own clock as well.
    async with _held(_body(True), tempo_s=3600.0) as held:
        held.engine.step(TOKEN)
    assert held.engine.cancelled
    assert (held.asked.reply.writes, _outcomes(held.watch)) == ([], ["cancelled"])


@in_a_loop
async def test_a_client_that_leaves_while_a_write_waits_for_it_is_cancelled_at_once() -> None:
    engine, asked = FakeEngine(hold=True), connection("POST", PATH, _body(True))
    writing, resume = asyncio.Event(), asyncio.Event()

    async def send(_message: Any) -> None:
        writing.set()
        await resume.wait()

    app = create_app(serving(engine))
    task = asyncio.create_task(app(asked.scope, asked.receive, send))
    await engine.submitted.wait()
    engine.step(TOKEN)
    await writing.wait()
    asked.leave()
    await engine.was_cancelled.wait()
    assert not task.done()
    resume.set()
    await task


@in_a_loop
async def test_nothing_is_left_of_a_request_that_was_cancelled_or_answered() -> None:
    engine, watch = FakeEngine(hold=True), FakeWatch()
    app = create_app(serving(engine, watch=watch))
    before = asyncio.all_tasks()
    for at in range(60):
        engine.submitted.clear()
        async with connected(app, "POST", PATH, _body(at % 2 == 0)):
            await engine.submitted.wait()
            if at % 3 == 0:
                engine.step(TOKEN)
    assert (len(watch.begun), watch.running, engine.open) == (60, 0, [])
    assert (len(engine.cancelled), {*_outcomes(watch)}) == (60, {"cancelled"})
    engine.hold = False
    for stream in (False, True):
        made = connection("POST", PATH, _body(stream))
        await app(made.scope, made.receive, made.send)
        assert made.reply.status == 200
    await asyncio.sleep(0)  # the turn in which a cancelled task ends
    assert asyncio.all_tasks() == before


def test_on_a_clock_of_its_own_each_choice_has_a_token_a_tick() -> None:
    says, body = [300, 301, 302], _body(True, max_tokens=3, n=2, prompt=[[5], [6]])
    whole, paced = (
        _ask(FakeEngine(says=says, at_once=True), body, tempo_s=tempo_s)[0]
        for tempo_s in (0.0, 0.001)
    )
    assert (len(whole.writes), len(paced.writes)) == (2, 4)
    for write in paced.writes[:3]:
        events = Reply(writes=[write]).events()
        assert sorted(event["choices"][0]["index"] for event in events) == [0, 1, 2, 3]
    texts = [
        [(one["choices"][0]["index"], one["choices"][0]["text"]) for one in reply.events()[:-1]]
        for reply in (whole, paced)
    ]
    assert sorted(texts[0]) == sorted(texts[1])
    # An answer that comes whole waits for no clock.
    assert _ask(FakeEngine(says=says), _body(False, max_tokens=3), tempo_s=3600.0)[0].status == 200


@in_a_loop
async def test_tokens_of_one_step_and_of_a_choice_that_lags_behind_are_apart_on_that_clock() -> (
    None
):
    first, last = NewToken(0, 300, None, None), NewToken(0, 301, None, "stop")
    both = [Delivery((first, last), PromptRead(reused_tokens=1), ended=True)]
    # The other choice's only token, with which the request ends, is behind.
    lagging = [Delivery((first, last), PromptRead())]
    lagging += [Delivery((NewToken(1, 302, None, "stop"),), ended=True)]
    for n, script in ((1, both), (2, lagging)):
        async with _held(_body(True, n=n, max_tokens=2), tempo_s=0.001) as held:
            for delivery in script:
                held.engine.step(delivery)
            await held.to_the_end()
        assert len(held.asked.reply.writes) == 3
        choices = [event["choices"][0] for event in held.asked.reply.events()[:-1]]
        found = [(choice["index"], choice["finish_reason"]) for choice in choices]
        assert found == [(0, None), (0, "stop"), (1, "stop")][: 1 + n]


@in_a_loop
async def test_ticks_are_where_they_would_be_whatever_comes_between_and_never_the_one_before() -> (
    None
):
    answer: Any = SimpleNamespace(content_type="text/event-stream")
    caller = Caller("", FakeWatch().request())
    exchange: Any = Exchange(serving(FakeEngine(), tempo_s=0.02), caller, [], answer)
    exchange._left.set()
    await exchange._tick()
    first, loop = exchange._next_s, asyncio.get_running_loop()
    # A clock of whole milliseconds, as uvloop's, stands a little before the tick.
    for now_s, next_s in ((math.nextafter(first, 0), first + 0.02), (first + 0.05, first + 0.06)):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(loop, "time", lambda of=now_s: of)
            await exchange._tick()
        assert exchange._next_s == pytest.approx(next_s, rel=0, abs=1e-6)
