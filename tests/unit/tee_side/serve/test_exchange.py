"""From the admission of a request to its last byte, or the client's leaving."""

from __future__ import annotations

import asyncio
import json
import math
import socket
from types import SimpleNamespace
from typing import Any

import pytest
import uvicorn

from protocol.errors import EndpointError, LimitError, PromptError
from tee_side.engine.request import Delivery, NewToken, PromptRead
from tee_side.engine.waiting import QueueFullError
from tee_side.serve.app import create_app
from tee_side.serve.exchange import Exchange
from tee_side.serve.serving import Caller
from tests.kit.serve import (
    FakeEngine,
    FakeTicket,
    FakeWatch,
    ask,
    call,
    complete,
    connected,
    connection,
    serving,
    tokenizer,
)

PATH = "/v1/completions"
TOKEN = Delivery((NewToken(0, 300, None, None),), PromptRead())
GONE = EndpointError("ipc:///tmp/gpu", got="nothing", expected="a reply")


def _body(stream: bool, **more: Any) -> dict[str, Any]:
    return {"prompt": [5, 6], "stream": stream} | more


@pytest.mark.parametrize("stream", [False, True])
def test_everything_of_a_request_passes_the_watch(stream: bool) -> None:
    watch, engine = FakeWatch(), FakeEngine(says=[300, 301], reused=1)
    app = create_app(serving(engine, watch=watch, authorise=lambda _: "alice"))
    reply = asyncio.run(
        ask(app, "POST", PATH, _body(stream, prompt=[[5, 6], [7]], n=2, max_tokens=3))
    )
    assert watch.begun == [("alice", 3, 12)]
    assert sum(watch.events) == 8
    assert watch.ended == [("stop", 3, 8)]
    assert reply.headers["x-ratelimit-limit-requests"] == "9"
    assert {request.owner for request in engine.requests} == {"alice"}


def test_the_outcome_is_length_where_a_choice_ended_by_it() -> None:
    watch = FakeWatch()
    app = create_app(serving(FakeEngine(), watch=watch))
    asyncio.run(ask(app, "POST", PATH, _body(False, max_tokens=2)))
    assert [outcome for outcome, *_ in watch.ended] == ["length"]


@pytest.mark.parametrize("stream", [False, True])
def test_an_error_before_the_first_byte_is_an_http_error(stream: bool) -> None:
    watch = FakeWatch()
    app = create_app(serving(FakeEngine(error=GONE), watch=watch))
    reply = asyncio.run(ask(app, "POST", PATH, _body(stream)))
    assert (reply.status, reply.error()["code"]) == (503, "engine_error")
    assert [outcome for outcome, *_ in watch.ended] == [type(GONE).__name__]
    assert "gpu" not in reply.text


def test_an_error_after_the_first_byte_is_an_event_and_ends_the_stream() -> None:
    watch, engine = FakeWatch(), FakeEngine(error=GONE, fail_after=2)
    app = create_app(serving(engine, watch=watch))
    reply = asyncio.run(ask(app, "POST", PATH, _body(True)))
    assert reply.status == 200
    *chunks, last = reply.events()
    assert len(chunks) == 2
    assert last["error"]["code"] == "engine_error"
    assert [outcome for outcome, *_ in watch.ended] == [type(GONE).__name__]


@pytest.mark.parametrize(("n", "param"), [(2, "body.n"), (1, None)])
def test_what_could_never_run_is_refused_before_it_is_accounted_for(
    n: int, param: str | None
) -> None:
    where = "samples" if n > 1 else "prompt"
    engine, watch = FakeEngine(unfit=PromptError(where, got="2", expected="1")), FakeWatch()
    reply = asyncio.run(
        ask(create_app(serving(engine, watch=watch)), "POST", PATH, _body(True, n=n))
    )
    assert (reply.status, reply.error()["param"]) == (400, param)
    assert (watch.begun, engine.requests) == ([], [])


def test_an_error_of_one_prompt_cancels_the_others() -> None:
    async def run() -> None:
        engine = FakeEngine(hold=True)
        app = create_app(serving(engine))
        async with connected(app, "POST", PATH, _body(False, prompt=[[5], [6]])) as asked:
            await engine.submitted.wait()
            first, second = engine.open
            engine.step(Delivery(error=GONE, ended=True))
            await asked.changed.wait()
            assert asked.reply.status == 503
            assert engine.cancelled == [second]
            assert engine.open == []
            assert first.request.prompt_ids == (5,)

    asyncio.run(run())


class Full(FakeEngine):
    """Has a place for one request at a time; `never`: for a second one never."""

    never = False

    def submit(self, *arguments: Any) -> FakeTicket:
        if self.open:
            if self.never:
                raise PromptError("prompt", got="2", expected="at most 1")
            raise QueueFullError("queue", got="2", expected="at most 1")
        return super().submit(*arguments)


def test_where_the_queue_is_full_a_prompt_waits_for_those_before_it() -> None:
    reply = complete(Full(says=[300]), prompt=[[5], [6], [7]], max_tokens=1)
    assert [choice["index"] for choice in reply.json()["choices"]] == [0, 1, 2]


class Busy(Full):
    """Has a place for nobody else's reasons only at every third attempt."""

    attempts = 0

    def submit(self, *arguments: Any) -> FakeTicket:
        self.attempts += 1
        if self.attempts % 3 != 1:
            raise QueueFullError("queue", got="9", expected="< 9")
        return super().submit(*arguments)


def test_a_request_that_has_begun_waits_for_a_place_that_others_have() -> None:
    engine = Busy(says=[300])
    reply = complete(engine, prompt=[[5], [6], [7]], max_tokens=1)
    assert [choice["index"] for choice in reply.json()["choices"]] == [0, 1, 2]
    assert engine.attempts == 7


@pytest.mark.parametrize("begun", [True, False])
def test_a_prompt_that_lost_its_place_waits_if_others_of_its_request_have_one(begun: bool) -> None:
    async def run() -> None:
        engine, watch = FakeEngine(hold=True), FakeWatch()
        app = create_app(serving(engine, watch=watch))
        prompts = [[5], [6]] if begun else [[6]]
        async with connected(app, "POST", PATH, _body(False, prompt=prompts)) as asked:
            await engine.submitted.wait()
            engine.submitted.clear()
            lost = QueueFullError("queue", got="9", expected="< 9")
            engine.step(Delivery(error=lost, ended=True), ticket=len(prompts) - 1)
            if begun:
                await engine.submitted.wait()
                assert [one.prompt_ids for one in engine.requests] == [(5,), (6,), (6,)]
                for _ in range(2):
                    end = NewToken(0, 300, None, "stop")
                    engine.step(Delivery((end,), PromptRead(), ended=True))
            await asked.changed.wait()
            assert asked.reply.status == (200 if begun else 503)
        assert watch.ended == [("stop", 2, 2) if begun else ("QueueFullError", 0, 0)]

    asyncio.run(run())


def test_what_the_machine_refuses_ends_the_request_and_is_not_asked_for_again() -> None:
    async def run() -> None:
        engine, watch = FakeEngine(hold=True), FakeWatch()
        app = create_app(serving(engine, watch=watch))
        prompts = [[at + 1] * 2 for at in range(20)]
        async with connected(app, "POST", PATH, _body(False, prompt=prompts)) as asked:
            await engine.submitted.wait()
            engine.step(TOKEN)
            refused = LimitError("KV memory", got="much", expected="less")
            engine.step(Delivery(error=refused, ended=True), ticket=1)
            await asked.changed.wait()
            assert (asked.reply.status, len(engine.requests)) == (503, 16)
        # Only what was asked of the engine counts.
        assert watch.ended == [("LimitError", 32, 1)]
        assert engine.open == []

    asyncio.run(run())


@pytest.mark.parametrize("begun", [True, False])
def test_what_the_end_of_the_server_cuts_off_is_told(begun: bool) -> None:
    async def run() -> None:
        engine, watch = FakeEngine(hold=True), FakeWatch()
        app = create_app(serving(engine, watch=watch))
        made = connection("POST", PATH, _body(True))
        task = asyncio.create_task(app(made.scope, made.receive, made.send))
        await engine.submitted.wait()
        if begun:
            engine.step(TOKEN)
            await made.changed.wait()
        # As uvicorn does with what is still open after its grace.
        task.cancel()
        await task
        error = made.reply.events()[-1]["error"] if begun else made.reply.error()
        assert error["code"] == "failed"
        assert made.reply.status == (200 if begun else 503)
        assert [outcome for outcome, *_ in watch.ended] == ["EngineError"]
        assert engine.open == []

    asyncio.run(run())


def test_a_tick_is_never_the_one_before() -> None:
    async def run() -> None:
        caller = Caller("", FakeWatch().request())
        engine = FakeEngine()
        answer = SimpleNamespace(content_type="text/event-stream")
        exchange: Any = Exchange(serving(engine, tempo_s=0.02), caller, [], answer)  # type: ignore[arg-type]
        exchange._left.set()
        await exchange._tick()
        first, loop = exchange._next_s, asyncio.get_running_loop()
        with pytest.MonkeyPatch.context() as patch:
            # A clock of whole milliseconds, as uvloop's, stands a little before the tick.
            patch.setattr(loop, "time", lambda: math.nextafter(first, 0))
            await exchange._tick()
        assert exchange._next_s == pytest.approx(first + 0.02, rel=0, abs=1e-6)

    asyncio.run(run())


def test_a_prompt_that_could_never_run_cancels_the_one_before_it() -> None:
    engine = Full(hold=True)
    engine.never = True
    assert complete(engine, prompt=[[5], [6]]).status == 400
    assert (len(engine.cancelled), engine.open) == (1, [])


def test_a_few_prompts_of_a_request_are_in_the_queue_at_a_time() -> None:
    most = 0

    class Counting(FakeEngine):
        def submit(self, *arguments: Any) -> FakeTicket:
            nonlocal most
            most = max(most, len(self.open) + 1)
            return super().submit(*arguments)

    reply = complete(Counting(says=[300]), prompt=[[at + 1] for at in range(300)], max_tokens=1)
    assert [choice["index"] for choice in reply.json()["choices"]] == list(range(300))
    assert most == 16


def test_a_model_that_is_not_ready_is_503_and_nothing_is_asked_of_it() -> None:
    for state, retry in (("starting", "5"), ("failed", None)):
        engine, watch = FakeEngine(state=state), FakeWatch()
        reply = asyncio.run(
            ask(create_app(serving(engine, watch=watch)), "POST", PATH, _body(True))
        )
        assert (reply.status, reply.error()["code"]) == (503, state)
        assert reply.headers.get("retry-after") == retry
        assert not engine.requests
        assert not watch.begun


@pytest.mark.parametrize("stream", [False, True])
def test_a_closed_connection_cancels_its_request_in_the_engine_at_once(stream: bool) -> None:
    async def run() -> None:
        engine, watch = FakeEngine(hold=True), FakeWatch()
        app = create_app(serving(engine, watch=watch))
        async with connected(app, "POST", PATH, _body(stream, n=1)) as asked:
            await engine.submitted.wait()
            engine.step(TOKEN)
            if stream:
                await asked.changed.wait()
            [ticket] = engine.open
        assert engine.cancelled == [ticket]
        assert watch.ended == [("cancelled", 2, 1)]
        assert asked.reply.status == (200 if stream else 0)

    asyncio.run(run())


def test_a_client_that_leaves_while_a_write_waits_for_it_is_cancelled_at_once() -> None:
    async def run() -> None:
        engine = FakeEngine(hold=True)
        asked = connection("POST", PATH, _body(True))
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

    asyncio.run(run())


def test_after_200_cancelled_requests_nothing_is_left() -> None:
    async def run() -> None:
        engine, watch = FakeEngine(hold=True), FakeWatch()
        app = create_app(serving(engine, watch=watch))
        before = len(asyncio.all_tasks())
        for at in range(200):
            engine.submitted.clear()
            async with connected(app, "POST", PATH, _body(at % 2 == 0)):
                await engine.submitted.wait()
                if at % 3 == 0:
                    engine.step(TOKEN)
        assert (len(watch.begun), watch.running, engine.open) == (200, 0, [])
        assert len(engine.cancelled) == 200
        assert {outcome for outcome, *_ in watch.ended} == {"cancelled"}
        assert len(asyncio.all_tasks()) == before

    asyncio.run(run())


def test_nothing_waits_for_a_client_that_has_its_answer() -> None:
    async def run() -> None:
        app, before = create_app(serving()), asyncio.all_tasks()
        for stream in (False, True):
            assert (await ask(app, "POST", PATH, _body(stream))).status == 200
        await asyncio.sleep(0)  # the turn in which a cancelled task ends
        assert asyncio.all_tasks() == before

    asyncio.run(run())


@pytest.mark.parametrize("stream", [False, True])
def test_a_closed_socket_cancels_its_request(stream: bool) -> None:
    async def run() -> None:
        engine, watch = FakeEngine(hold=True), FakeWatch()
        app = create_app(serving(engine, watch=watch))
        listening = socket.create_server(("127.0.0.1", 0))
        server = uvicorn.Server(uvicorn.Config(app, log_level="critical", lifespan="off"))
        task = asyncio.create_task(server.serve(sockets=[listening]))
        reader, writer = await asyncio.open_connection(*listening.getsockname())
        body = b'{"prompt": [5, 6], "stream": %s}' % str(stream).lower().encode()
        writer.write(
            b"POST %s HTTP/1.1\r\nHost: tee\r\nContent-Type: application/json\r\n"
            b"Content-Length: %d\r\n\r\n%s" % (PATH.encode(), len(body), body)
        )
        await engine.submitted.wait()
        if stream:
            engine.step(TOKEN)
            assert await reader.readuntil(b"\r\n") == b"HTTP/1.1 200 OK\r\n"
        writer.close()
        await watch.over.wait()
        assert len(engine.cancelled) == 1
        server.should_exit = True
        await task

    asyncio.run(run())


def test_a_slow_reader_gets_what_piled_up_in_one_write_a_chunk_for_each_token() -> None:
    async def run() -> None:
        engine = FakeEngine(hold=True)
        app = create_app(serving(engine))
        async with connected(app, "POST", PATH, _body(True)) as asked:
            await engine.submitted.wait()
            for _ in range(5):
                engine.step(TOKEN)
            last = NewToken(0, tokenizer().encode("a")[-1], None, "stop")
            engine.step(Delivery((last,), ended=True))
            while not asked.reply.text.endswith("[DONE]\n\n"):
                asked.changed.clear()
                await asked.changed.wait()
        assert len(asked.reply.writes) == 2
        assert len(asked.reply.events()) == 7

    asyncio.run(run())


def test_on_a_clock_of_its_own_every_token_is_written_apart() -> None:
    says = [300, 301, 302, 303]
    together = serving(FakeEngine(says=says, at_once=True))
    apart = serving(FakeEngine(says=says, at_once=True), tempo_s=0.001)
    body = _body(True, max_tokens=4)
    whole, paced = (call(served, "POST", PATH, body) for served in (together, apart))
    assert (len(whole.writes), len(paced.writes)) == (2, 5)
    texts = [
        [event["choices"][0]["text"] for event in reply.events()[:-1]] for reply in (whole, paced)
    ]
    assert texts[0] == texts[1]


def test_on_that_clock_each_choice_has_a_token_a_tick() -> None:
    engine = FakeEngine(says=[300, 301, 302], at_once=True)
    body = _body(True, max_tokens=3, n=2, prompt=[[5], [6]])
    reply = call(serving(engine, tempo_s=0.001), "POST", PATH, body)
    assert len(reply.writes) == 4
    for write in reply.writes[:3]:
        assert sorted(
            json.loads(line.removeprefix("data: "))["choices"][0]["index"]
            for line in write.decode().split("\n\n")[:-1]
        ) == [0, 1, 2, 3]


def test_a_choice_that_lags_behind_on_that_clock_is_written_to_its_end() -> None:
    """Two tokens of one choice; the other's only one, with which the request ended, is behind."""

    async def run() -> None:
        engine = FakeEngine(hold=True)
        app = create_app(serving(engine, tempo_s=0.001))
        async with connected(app, "POST", PATH, _body(True, n=2, max_tokens=2)) as asked:
            await engine.submitted.wait()
            first = (NewToken(0, 300, None, None), NewToken(0, 301, None, "stop"))
            engine.step(Delivery(first, PromptRead()))
            engine.step(Delivery((NewToken(1, 302, None, "stop"),), ended=True))
            while b"[DONE]" not in b"".join(asked.reply.writes):
                asked.changed.clear()
                await asked.changed.wait()
        choices = [event["choices"][0] for event in asked.reply.events()[:-1]]
        assert len(asked.reply.writes) == 3
        assert [choice["index"] for choice in choices] == [0, 0, 1]
        assert [choice["finish_reason"] for choice in choices] == [None, "stop", "stop"]

    asyncio.run(run())


def test_an_answer_that_comes_whole_waits_for_no_clock() -> None:
    served = serving(FakeEngine(says=[300, 301]), tempo_s=3600.0)
    assert call(served, "POST", PATH, _body(False, max_tokens=2)).status == 200


def test_tokens_of_one_step_are_apart_on_that_clock_too() -> None:
    async def run() -> None:
        engine = FakeEngine(hold=True)
        app = create_app(serving(engine, tempo_s=0.001))
        async with connected(app, "POST", PATH, _body(True, max_tokens=2)) as asked:
            await engine.submitted.wait()
            tokens = (NewToken(0, 300, None, None), NewToken(0, 301, None, "length"))
            engine.step(Delivery(tokens, PromptRead(reused_tokens=1), ended=True))
            while b"[DONE]" not in b"".join(asked.reply.writes):
                asked.changed.clear()
                await asked.changed.wait()
        assert len(asked.reply.writes) == 3
        assert [event["choices"][0]["finish_reason"] for event in asked.reply.events()[:-1]] == [
            None,
            "length",
        ]

    asyncio.run(run())


def test_a_client_that_leaves_between_two_ticks_is_cancelled_at_once() -> None:
    async def run() -> None:
        engine, watch = FakeEngine(hold=True), FakeWatch()
        app = create_app(serving(engine, watch=watch, tempo_s=3600.0))
        async with connected(app, "POST", PATH, _body(True)) as asked:
            await engine.submitted.wait()
            engine.step(TOKEN)
        assert engine.cancelled
        assert not asked.reply.writes
        assert [outcome for outcome, *_ in watch.ended] == ["cancelled"]

    asyncio.run(run())


def test_usage_is_told_as_a_multiple_and_accounted_for_as_it_is() -> None:
    watch = FakeWatch()
    served = serving(FakeEngine(says=[300, 301, 302], reused=1), watch=watch, round_usage=16)
    reply = call(served, "POST", PATH, _body(False, max_tokens=3))
    assert reply.json()["usage"] == {
        "prompt_tokens": 16,
        "completion_tokens": 16,
        "total_tokens": 32,
        "prompt_tokens_details": {"cached_tokens": 16},
    }
    assert watch.ended == [("stop", 2, 3)]
