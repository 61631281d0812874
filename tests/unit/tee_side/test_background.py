"""Requests of many threads get what they would get alone, and each ends once, whatever happens."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from queue import SimpleQueue
from typing import Any, NoReturn

import pytest

from protocol import messages
from protocol.channel import Traffic
from protocol.errors import (
    ActivationRangeError,
    DeadlineExceededError,
    EngineError,
    LimitError,
    PadsExhaustedError,
    PromptError,
    ReplyError,
    TsqpError,
)
from tee_side.engine import background
from tee_side.engine.background import BackgroundEngine, State, Ticket
from tee_side.engine.engine import Engine, EngineSettings
from tee_side.engine.generation import PadTotals
from tee_side.engine.request import Delivery, PromptRead, Request
from tee_side.engine.sampling import SamplingSettings
from tee_side.engine.sequence import Sampled, Sequence
from tee_side.engine.stats import Totals
from tee_side.engine.waiting import QueueFullError
from tee_side.protect.pads.background_maker import Load
from tests.kit.model import LoopbackChannel, SavedModel, Tee, token_ids

Models = Callable[..., SavedModel]

# A test that waits for what never comes fails.
WAIT_S = 60.0


class Down(LoopbackChannel):
    """A service that is away while it is told to be, which shows in errors of a kind."""

    down = False
    kind: type[TsqpError] = DeadlineExceededError

    def submit(self, request: messages.Request, *arguments: Any, **more: Any) -> int:
        if self.down:
            raise self.kind("it", got="nothing", expected="a connection")
        return super().submit(request, *arguments, **more)


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background, "_PROBE_S", 0.001)


@pytest.fixture(scope="module")
def tee(saved_model: Models) -> Tee:
    model = saved_model("llama")
    return model.tee("quantized-clear", channels=[Down(model.directory)])


@dataclass
class Client:
    """What came of one request."""

    deliveries: list[Delivery] = field(default_factory=list)

    @property
    def ended(self) -> bool:
        return any(delivery.ended for delivery in self.deliveries)

    @property
    def error(self) -> TsqpError | None:
        return self.deliveries[-1].error

    @property
    def prompt(self) -> PromptRead | None:
        return self.deliveries[0].prompt

    def tokens(self, sample: int = 0) -> list[int]:
        return [
            new.token_id
            for delivery in self.deliveries
            for new in delivery.tokens
            if new.sample == sample
        ]

    def check(self, samples: int = 1) -> None:
        """Hold what every request that ended well was promised."""
        assert self.error is None
        assert [d.prompt is not None for d in self.deliveries] == [
            at == 0 for at in range(len(self.deliveries))
        ]
        assert [d.ended for d in self.deliveries] == [
            at == len(self.deliveries) - 1 for at in range(len(self.deliveries))
        ]
        for sample in range(samples):
            reasons = [
                n.finish_reason for d in self.deliveries for n in d.tokens if n.sample == sample
            ]
            assert [reason is not None for reason in reasons] == [
                at == len(reasons) - 1 for at in range(len(reasons))
            ]


class Loop:
    """Stands for an event loop: the test's thread runs what is called."""

    def __init__(self) -> None:
        self.calls: SimpleQueue[Callable[[], None]] = SimpleQueue()

    def until(self, done: Callable[[], bool]) -> None:
        while not done():
            self.calls.get(timeout=WAIT_S)()

    def finish(self, clients: Iterable[Client]) -> None:
        self.until(lambda: all(client.ended for client in clients))


@dataclass
class Running:
    """A background engine, and the loop that it hands its deliveries to."""

    loop: Loop
    background: BackgroundEngine

    def ask(self, request: Request) -> tuple[Client, Ticket]:
        client = Client()
        return client, self.background.submit(request, client.deliveries.append)

    def answer(self, request: Request) -> Client:
        client, _ = self.ask(request)
        self.loop.finish([client])
        return client

    def start(self) -> None:
        self.background.start()


@contextmanager
def _running(engine: Engine, *, start: bool = True, **settings: Any) -> Iterator[Running]:
    loop = Loop()
    running = Running(loop, BackgroundEngine(engine, call=loop.calls.put, **settings))
    if start:
        running.start()
    try:
        yield running
    finally:
        running.background.close()


def _engine(tee: Tee, **settings: Any) -> Engine:
    return Engine(tee.model, tee.lanes, EngineSettings(step_tokens=16, **settings))


def _request(seed: int, new_tokens: int = 6, **settings: Any) -> Request:
    ids = tuple(token_ids(3 + seed % 7, seed))
    return Request(prompt_ids=ids, max_new_tokens=new_tokens, stop_ids=frozenset(), **settings)


def _alone(tee: Tee, request: Request) -> list[list[int]]:
    engine = _engine(tee)
    sequences = engine.admit(request)
    while engine.running:
        engine.step()
    return [sequence.token_ids for sequence in sequences]


def _assert_same(tee: Tee, request: Request, client: Client) -> None:
    client.check(request.samples)
    assert [client.tokens(n) for n in range(request.samples)] == _alone(tee, request)


def test_many_requests_of_several_threads_get_their_own_tokens(tee: Tee) -> None:
    warm = SamplingSettings(temperature=1.5, seed=5)
    requests = [
        _request(n, 3 + n % 5, samples=1 + n % 2, owner=str(n % 3), sampling=warm)
        for n in range(20)
    ]
    found: dict[Request, Client] = {}
    with _running(_engine(tee, max_sequences=6)) as running:

        def client(mine: list[Request]) -> None:
            for request in mine:
                found[request] = running.ask(request)[0]

        threads = [threading.Thread(target=client, args=(requests[n::4],)) for n in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        running.loop.finish(found.values())
        assert running.background.state == "ready"
        stats = running.background.stats()
    assert (stats.running, stats.waiting, stats.kv_usage) == (0, 0, 0)
    assert stats.generation_tokens == 2 + sum(r.samples * r.max_new_tokens for r in requests)
    assert stats.prompt_tokens == 1 + sum(len(r.prompt_ids) for r in requests)
    for request, client_ in found.items():
        _assert_same(tee, request, client_)


def test_what_is_read_of_a_prompt_comes_first_and_may_be_all(tee: Tee) -> None:
    with _running(_engine(tee)) as running:
        pooled = running.answer(replace(_request(40, 0), pooling="last"))
        read = running.answer(replace(_request(40, 2), prompt_logprobs=0))
    assert (len(pooled.deliveries), pooled.tokens()) == (1, [])
    pooled.check(samples=0)
    read.check()
    assert pooled.prompt is not None
    assert pooled.prompt.pooled_D is not None
    assert read.prompt is not None
    assert len(read.prompt.logprobs) == len(_request(40).prompt_ids) - 1


# ----------------------------------------------------------------------------------- cancelling


def test_one_that_is_cancelled_while_it_waits_is_never_run(tee: Tee) -> None:
    engine = _engine(tee, max_sequences=1)
    with _running(engine, start=False) as running:
        first, _ = running.ask(_request(1))
        cancelled, ticket = running.ask(_request(2))
        last, _ = running.ask(_request(3))
        running.background.cancel(ticket)
        running.start()
        running.loop.finish([first, last])
    assert cancelled.deliveries == []
    assert engine.counts.generated == 2 + 6 + 6
    for seed, client in ((1, first), (3, last)):
        _assert_same(tee, _request(seed), client)


def test_one_that_is_cancelled_while_it_runs_gives_its_place_back(tee: Tee) -> None:
    engine = _engine(tee, max_sequences=2)
    with _running(engine) as running:
        cancelled, ticket = running.ask(_request(1, 200, samples=2))
        running.loop.until(lambda: bool(cancelled.deliveries))
        running.background.cancel(ticket)
        seen = len(cancelled.deliveries)
        _assert_same(tee, _request(2), running.answer(_request(2)))
        running.background.cancel(ticket)  # again
    assert len(cancelled.deliveries) == seen
    assert not cancelled.ended
    assert (engine.running, engine.kv_bytes) == ((), 0)


@pytest.mark.parametrize("new_tokens", [1, 200])
def test_what_was_under_way_to_one_that_is_cancelled_is_not_delivered(
    tee: Tee, new_tokens: int
) -> None:
    """Though it has ended in the engine meanwhile."""
    with _running(_engine(tee)) as running:
        cancelled, ticket = running.ask(_request(1, new_tokens))
        # The first one tells the state, the second delivers.
        under_way = [running.loop.calls.get(timeout=WAIT_S) for _ in range(2)]
        running.background.cancel(ticket)
        for deliver in under_way:
            deliver()
        assert cancelled.deliveries == []


def test_cancelling_what_has_ended_changes_nothing(tee: Tee) -> None:
    with _running(_engine(tee)) as running:
        client, ticket = running.ask(_request(1))
        running.loop.finish([client])
        running.background.cancel(ticket)
        running.answer(_request(2))
    _assert_same(tee, _request(1), client)


# ------------------------------------------------------------------------------------- refusing


def test_no_more_wait_than_are_allowed_to(tee: Tee) -> None:
    with _running(_engine(tee, max_waiting=1), start=False) as running:
        first, _ = running.ask(_request(1))
        with pytest.raises(LimitError, match=r"--max-waiting\): got 1, expected < 1") as caught:
            running.ask(_request(2))
        assert caught.value.retryable
        running.start()
        running.loop.finish([first])
        _assert_same(tee, _request(2), running.answer(_request(2)))


def test_one_owner_does_not_keep_others_out_of_the_queue(tee: Tee) -> None:
    with _running(_engine(tee, max_waiting=3), start=False) as running:
        ours = [running.ask(replace(_request(n), owner="bob"))[0] for n in range(3)]
        other, _ = running.ask(replace(_request(7), owner="carol"))
        running.start()
        running.loop.finish([*ours, other])
    assert [type(client.error) for client in ours] == [type(None), type(None), QueueFullError]
    _assert_same(tee, replace(_request(7), owner="carol"), other)


def test_what_could_never_run_is_refused_and_ends_nothing_else(tee: Tee) -> None:
    clients = []
    with _running(_engine(tee), start=False) as running:
        before, _ = running.ask(_request(1))
        wrongs = ({"prompt_ids": ()}, {"stop": ("x",)}, {"samples": 0}, {"samples": 65})
        for changed in wrongs:
            wrong = replace(_request(1), **changed)  # type: ignore[arg-type]
            with pytest.raises(PromptError):
                running.background.check(wrong)
            client, _ = running.ask(wrong)  # by somebody who did not look
            clients.append(client)
        after, _ = running.ask(_request(3))
        running.start()
        running.loop.finish([*clients, before, after])
        for n, right in ((1, before), (3, after)):
            _assert_same(tee, _request(n), right)
        assert all(isinstance(client.error, PromptError) for client in clients)
        _assert_same(tee, _request(2), running.answer(_request(2)))


def test_one_for_which_the_machine_has_no_memory_is_told_so(
    tee: Tee, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tee_side.model.kv_cache import KVCache

    def made(config: Any, capacity: int, *more: Any) -> KVCache:
        if capacity > 100:
            raise LimitError("KV memory", got="much", expected="less")
        return KVCache(config, capacity, *more)

    monkeypatch.setattr("tee_side.engine.engine.KVCache", made)
    with _running(_engine(tee)) as running:
        assert isinstance(running.answer(_request(1, 150)).error, LimitError)
        _assert_same(tee, _request(2), running.answer(_request(2)))


# --------------------------------------------------------------------------------------- errors


def _failing_for(engine: Engine, poisoned: Request, error: Exception) -> None:
    """Have every step that holds rows of a request fail, from its first token on."""
    step = engine.step

    def failing(only: Iterable[Sequence] | None = None) -> list[Sampled]:
        held = engine.running if only is None else tuple(only)
        if any(s.request is poisoned and s.token_ids for s in held):
            raise error
        return step(only)

    engine.step = failing  # type: ignore[method-assign]


def test_one_whose_activation_is_out_of_range_ends_alone(tee: Tee) -> None:
    engine = _engine(tee)
    others = [_request(n, samples=2) for n in (1, 2)]
    poisoned = _request(3, samples=2)
    error = ActivationRangeError("o_proj", got="much", expected="less")
    _failing_for(engine, poisoned, error)
    with _running(engine, start=False) as running:
        requests = [others[0], poisoned, others[1]]
        clients = [running.ask(request)[0] for request in requests]
        running.start()
        running.loop.finish(clients)
        assert running.background.state == "ready"
    first, ended, last = clients
    assert ended.error is error
    assert [delivery.ended for delivery in ended.deliveries] == [False, True]
    for request, client in zip(others, (first, last), strict=True):
        _assert_same(tee, request, client)


def test_one_that_fails_alone_does_not_make_the_engine_fail(tee: Tee) -> None:
    engine, told, poisoned = _engine(tee), list[State](), _request(3)
    _failing_for(engine, poisoned, ActivationRangeError("o_proj", got="much", expected="less"))
    with _running(engine, tell=told.append) as running:
        assert isinstance(running.answer(poisoned).error, ActivationRangeError)
        _assert_same(tee, _request(1), running.answer(_request(1)))
    assert told == ["ready"]


# One row may be the cause of a ReplyError; a service that is asked no more gives it to all.
@pytest.mark.parametrize("samples", [1, 2])
@pytest.mark.parametrize("kind", [DeadlineExceededError, ReplyError])
def test_a_service_that_is_away_ends_all_until_a_token_can_be_made(
    tee: Tee,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    kind: type[TsqpError],
    samples: int,
) -> None:
    channel = tee.channel
    assert isinstance(channel, Down)
    monkeypatch.setattr(channel, "kind", kind)
    with _running(_engine(tee)) as running:
        # In a prompt's steps, only the first of several samples has rows.
        clients = [running.ask(_request(n, 200, samples=samples))[0] for n in (1, 2)]
        running.loop.until(lambda: all(client.deliveries for client in clients))
        assert running.background.state == "ready"
        with caplog.at_level(logging.CRITICAL):
            channel.down = True
            running.loop.finish(clients)
            assert running.background.state == "failed"
            assert isinstance(running.answer(_request(3, samples=samples)).error, kind)
            channel.down = False
        # What is asked until then may fail.
        while running.answer(_request(3)).error is not None:
            pass
        assert running.background.state == "ready"
        _assert_same(tee, _request(4), running.answer(_request(4)))
    for client in clients:
        assert isinstance(client.error, kind)
        assert [delivery.ended for delivery in client.deliveries].count(True) == 1


def test_several_samples_do_not_hide_that_no_token_can_be_made(
    tee: Tee, monkeypatch: pytest.MonkeyPatch
) -> None:
    channel = tee.channel
    assert isinstance(channel, Down)
    monkeypatch.setattr(channel, "kind", ReplyError)
    with _running(_engine(tee)) as running:
        _assert_same(tee, _request(1), running.answer(_request(1)))
        channel.down = True
        # In the steps of a prompt the first sample alone has rows.
        assert isinstance(running.answer(_request(2, samples=2)).error, ReplyError)
        running.loop.until(lambda: running.background.state == "failed")
        channel.down = False


def test_a_mistake_of_ours_ends_everything_and_quotes_nothing(
    tee: Tee, caplog: pytest.LogCaptureFixture
) -> None:
    engine, poisoned = _engine(tee), _request(1)
    _failing_for(engine, poisoned, ValueError("what the prompt said"))
    with _running(engine, start=False) as running:
        clients = [running.ask(request)[0] for request in (poisoned, _request(2))]
        running.start()
        running.loop.finish(clients)
        assert running.background.state == "failed"
        with pytest.raises(EngineError, match="one that has ended"):
            running.ask(_request(3))
    for client in clients:
        assert isinstance(client.error, EngineError)
        assert "prompt" not in str(client.error)
    (record,) = caplog.records
    fields = record.fields  # type: ignore[attr-defined]
    assert (record.message, fields["error"]) == ("engine_died", "ValueError")
    assert fields["at"].startswith("test_background.py:")
    assert "what the prompt said" not in caplog.text + str(fields)
    assert record.exc_info is None


def test_closing_ends_the_thread_and_every_request(tee: Tee) -> None:
    with _running(_engine(tee, max_sequences=1)) as running:
        clients = [running.ask(_request(seed, 240))[0] for seed in (1, 2)]
        running.loop.until(lambda: bool(clients[0].deliveries))
        running.background.close()
        assert not any(thread.name == "engine" for thread in threading.enumerate())
        running.loop.finish(clients)
        for client in clients:
            assert isinstance(client.error, EngineError)
            assert [delivery.ended for delivery in client.deliveries].count(True) == 1
        with pytest.raises(EngineError):
            running.ask(_request(2))


def test_one_that_was_never_started_can_be_closed(tee: Tee) -> None:
    BackgroundEngine(_engine(tee), call=lambda _: None).close()


# ----------------------------------------------------------------------------------------- pads


def _padded(saved_model: Models, tokens: int) -> Tee:
    """Return a trusted side with pads for so many tokens, which makes no more."""
    tee = saved_model("llama").tee("shielded", when_out="fail")
    (pads,) = tee.assembly.pads.values()
    assert pads._maker is not None
    if tokens:
        pads._maker.fill(pads._store, tokens)
    return tee


def test_one_that_gets_no_pads_ends_with_all_its_samples_and_others_go_on(
    saved_model: Models, tee: Tee
) -> None:
    """Of its samples, one had pads and is in the step under way."""
    probe, first_token = 1, 1
    padded = _padded(saved_model, probe + first_token + 1)
    with _running(_engine(padded), start=False) as running:
        short, refused = _request(1, 2), _request(2, 6, samples=2)
        clients = [running.ask(request)[0] for request in (short, refused)]
        running.start()
        running.loop.finish(clients)
        assert running.background.state == "ready"
        # A single token needs none.
        last = running.answer(_request(3, 1))
    _assert_same(tee, short, clients[0])
    _assert_same(tee, _request(3, 1), last)
    assert isinstance(clients[1].error, PadsExhaustedError)
    assert [d.ended for d in clients[1].deliveries].count(True) == 1


def test_without_pads_it_is_not_ready_and_can_be_closed(saved_model: Models) -> None:
    with _running(_engine(_padded(saved_model, 0))) as running:
        assert isinstance(running.answer(_request(1)).error, PadsExhaustedError)
        assert running.background.state == "starting"


def test_pads_are_made_while_it_is_not_ready(saved_model: Models, tee: Tee) -> None:
    padded = _padded(saved_model, 0)
    (pads,) = padded.assembly.pads.values()
    with _running(_engine(padded), filling=pads.filling) as running:
        while running.answer(_request(1)).error is not None:
            pass
        assert running.background.state == "ready"
        _assert_same(tee, _request(2), running.answer(_request(2)))


def test_pads_are_made_as_the_load_allows(tee: Tee) -> None:
    loads: list[Load] = []
    idle = threading.Semaphore(0)

    def tell_load(load: Load) -> None:
        if loads[-1:] != [load]:
            loads.append(load)
        if load == "idle":
            idle.release()

    engine = _engine(tee, max_sequences=1)
    with _running(engine, filling=lambda: nullcontext(tell_load)) as running:
        assert idle.acquire(timeout=WAIT_S)
        assert loads == ["idle"]  # a token was made before, which belongs to nobody
        with running.background._changed:  # both are there before it looks
            both = [running.ask(_request(1, 4))[0], running.ask(_request(2, 4))[0]]
        running.loop.finish(both)
        assert idle.acquire(timeout=WAIT_S)
        assert loads == ["idle", "steps", "idle"]


def test_what_it_says_of_itself_is_what_was_done(tee: Tee) -> None:
    pads = PadTotals(available=5, waited=6, in_tee=7)
    totals = Totals(Traffic(round_trips=3), pads, pads_made=8, pads_used=9)
    engine = _engine(tee)
    running = BackgroundEngine(engine, call=lambda _: None, totals=lambda: totals)
    engine.admit(_request(1, 4))
    engine.step()
    running.submit(_request(2), _never)
    stats = running.stats()
    assert (stats.pads_ready, stats.pads_waited, stats.pads_in_tee) == (5, 6, 7)
    assert (stats.pads_made, stats.pads_used) == (8, 9)
    assert (stats.running, stats.waiting, stats.steps) == (1, 1, 1)
    assert stats.kv_usage == engine.kv_bytes / engine.max_kv_bytes > 0


def test_it_can_step_while_it_is_ready_and_no_service_is_waited_for(tee: Tee) -> None:
    waits = False
    with _running(_engine(tee), start=False, waits=lambda: waits) as running:
        assert not running.background.can_step
        running.start()
        running.loop.until(lambda: running.background.state == "ready")
        assert running.background.can_step
        waits = True
        assert not running.background.can_step


def _never(_: Delivery) -> NoReturn:
    raise AssertionError
