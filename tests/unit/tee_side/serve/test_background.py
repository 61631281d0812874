"""Requests of many threads get what they would get alone, and each ends once, whatever happens."""

import logging
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from queue import SimpleQueue
from typing import Any

import pytest

from protocol import messages
from protocol.errors import (
    ActivationRangeError,
    DeadlineExceededError,
    EngineError,
    LimitError,
    PadsExhaustedError,
    ReplyError,
    TsqpError,
)
from protocol.model.config import ModelConfig
from tee_side.engine.engine import Engine, EngineSettings
from tee_side.engine.request import Request, SamplingSettings
from tee_side.engine.step import Sampled, Sequence
from tee_side.model.batch import KVCache
from tee_side.serve import background
from tee_side.serve.background import BackgroundEngine, Delivery, QueueFullError, State, Ticket
from tests.kit.model import LoopbackChannel, Models, Tee, finish, stocked, token_ids
from tests.kit.rows import each_row

# A test that waits for what never comes fails.
WAIT_S = 60.0


class Down(LoopbackChannel):
    """A service that is away while it is told to be, which shows in errors of a kind."""

    down: type[TsqpError] | None = None

    def submit(self, request: messages.Request, *arguments: Any, **more: Any) -> int:
        if self.down is not None:
            raise self.down("it", got="nothing", expected="a connection")
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
    deliveries: list[Delivery] = field(default_factory=list)
    ticket: Ticket | None = None

    @property
    def ends(self) -> int:
        return [delivery.ended for delivery in self.deliveries].count(True)

    @property
    def error(self) -> TsqpError | None:
        return self.deliveries[-1].error

    def tokens(self, sample: int) -> list[int]:
        """Return a sample's tokens; the last of them says why it ended, and no other does."""
        new = [n for d in self.deliveries for n in d.tokens if n.sample == sample]
        assert [n.finish_reason is not None for n in new] == [*[False] * (len(new) - 1), True]
        return [n.token_id for n in new]


@dataclass
class Running:
    """A background engine. The test's thread stands for the event loop, and runs what is called."""

    calls: SimpleQueue[Callable[[], None]]
    background: BackgroundEngine

    def ask(self, request: Request) -> Client:
        client = Client()
        client.ticket = self.background.submit(request, client.deliveries.append)
        return client

    def cancel(self, client: Client) -> None:
        assert client.ticket is not None
        self.background.cancel(client.ticket)

    def until(self, done: Callable[[], object]) -> None:
        while not done():
            self.calls.get(timeout=WAIT_S)()

    def finish(self, clients: Iterable[Client]) -> None:
        self.until(lambda: all(client.ends for client in clients))

    def answer(self, request: Request) -> Client:
        client = self.ask(request)
        self.finish([client])
        return client


@contextmanager
def _running(engine: Engine, *, start: bool = True, **settings: Any) -> Iterator[Running]:
    calls: SimpleQueue[Callable[[], None]] = SimpleQueue()
    running = Running(calls, BackgroundEngine(engine, call=calls.put, **settings))
    if start:
        running.background.start()
    try:
        yield running
    finally:
        running.background.close()


def _engine(tee: Tee, **settings: Any) -> Engine:
    return Engine(tee.model, tee.lanes, EngineSettings(step_tokens=16, **settings))


def _request(seed: int, new_tokens: int = 6, **settings: Any) -> Request:
    ids = tuple(token_ids(3 + seed % 7, seed))
    return Request(prompt_ids=ids, max_new_tokens=new_tokens, stop_ids=frozenset(), **settings)


def _assert_same(tee: Tee, request: Request, client: Client) -> None:
    """Hold what every request that ended well was promised: the tokens that it gets alone."""
    engine = _engine(tee)
    sequences = engine.admit(request)
    finish(engine)
    assert client.error is None
    first, *others = client.deliveries
    assert first.prompt is not None
    assert not any(delivery.prompt for delivery in others)
    assert client.ends == client.deliveries[-1].ended
    assert [client.tokens(sequence.sample) for sequence in sequences] == [
        sequence.token_ids for sequence in sequences
    ]


def test_many_requests_of_several_threads_get_their_own_tokens(tee: Tee) -> None:
    warm = SamplingSettings(temperature=1.5, seed=5)
    requests = [
        _request(n, 3 + n % 5, samples=1 + n % 2, owner=str(n % 3), sampling=warm)
        for n in range(16)
    ]
    found: dict[Request, Client] = {}
    with _running(_engine(tee, max_sequences=6)) as running:

        def client(mine: list[Request]) -> None:
            for request in mine:
                found[request] = running.ask(request)

        threads = [threading.Thread(target=client, args=(requests[n::4],)) for n in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        running.finish(found.values())
        assert running.background.state == "ready"
        stats = running.background.stats()
    assert (stats.running, stats.waiting, stats.kv_usage) == (0, 0, 0)
    assert stats.generation_tokens == 2 + sum(r.samples * r.max_new_tokens for r in requests)
    assert stats.prompt_tokens == 1 + sum(len(r.prompt_ids) for r in requests)
    for request, client_ in found.items():
        _assert_same(tee, request, client_)


def test_owners_take_turns_by_the_tokens_that_they_were_given(tee: Tee) -> None:
    ends: list[str] = []

    def ask(name: str, seed: int, new_tokens: int) -> None:
        request = _request(seed, new_tokens, owner=name[0])
        running.background.submit(request, lambda d: ends.extend([name] if d.ended else []))

    with _running(_engine(tee, max_sequences=1), start=False) as running:
        # The first owner has short prompts and long answers.
        for name, seed, new_tokens in (("a0", 7, 40), ("b0", 6, 2), ("a1", 7, 2), ("b1", 6, 2)):
            ask(name, seed, new_tokens)
        running.background.start()
        running.until(lambda: len(ends) == 4)
    assert ends == ["a0", "b0", "b1", "a1"]


def test_one_waits_until_all_its_samples_have_a_row_in_each_step(tee: Tee) -> None:
    engine, ran = Engine(tee.model, tee.lanes, EngineSettings(step_tokens=2)), list[int]()
    requests = [_request(seed, 2, samples=samples) for seed, samples in enumerate((1, 2, 1))]
    step = engine.step

    def counting(only: Iterable[Sequence] | None = None) -> list[Sampled]:
        ran.append(len(engine.running))
        return step(only)

    engine.step = counting  # type: ignore[method-assign]
    with _running(engine, start=False) as running:
        clients = [running.ask(request) for request in requests]
        running.background.start()
        running.finish(clients)
    assert max(ran) == 2
    for request, client in zip(requests, clients, strict=True):
        _assert_same(tee, request, client)


def test_one_that_is_cancelled_gives_its_place_back_or_is_never_run(tee: Tee) -> None:
    engine = _engine(tee, max_sequences=2)
    with _running(engine, start=False) as running:
        cancelled, waiting, last = (
            running.ask(_request(seed, new_tokens, samples=2))
            for seed, new_tokens in ((1, 200), (4, 6), (3, 6))
        )
        running.cancel(waiting)
        running.background.start()
        running.until(lambda: cancelled.deliveries)
        running.cancel(cancelled)
        seen = len(cancelled.deliveries)
        running.finish([last])
        for again in (cancelled, waiting, last):
            running.cancel(again)
        _assert_same(tee, _request(2), running.answer(_request(2)))
    _assert_same(tee, _request(3, samples=2), last)
    assert (len(cancelled.deliveries), cancelled.ends, waiting.deliveries) == (seen, 0, [])
    assert (engine.running, engine.kv_bytes) == ((), 0)
    # Not even one of its samples went on to its end.
    assert engine.counts.generation_tokens < 200


@each_row("new_tokens", [1, 200])
def test_what_was_under_way_to_one_that_is_cancelled_is_not_delivered(
    tee: Tee, new_tokens: int
) -> None:
    """Though it has ended in the engine meanwhile."""
    with _running(_engine(tee)) as running:
        cancelled = running.ask(_request(1, new_tokens))
        # The first one tells the state, the second delivers.
        under_way = [running.calls.get(timeout=WAIT_S) for _ in range(2)]
        running.cancel(cancelled)
        for deliver in under_way:
            deliver()
        assert cancelled.deliveries == []


def test_no_more_wait_than_are_allowed_to_and_no_owner_keeps_others_out(tee: Tee) -> None:
    with _running(_engine(tee, max_waiting=3), start=False) as running:
        ours = [running.ask(replace(_request(n), owner="bob")) for n in range(3)]
        with pytest.raises(QueueFullError, match=r"--max-waiting\): got 3, expected < 3"):
            running.ask(replace(_request(4), owner="bob"))
        other = running.ask(replace(_request(7), owner="carol"))
        running.background.start()
        running.finish([*ours, other])
        _assert_same(tee, _request(2), running.answer(_request(2)))
    assert [type(client.error) for client in ours] == [type(None), type(None), QueueFullError]
    _assert_same(tee, replace(_request(7), owner="carol"), other)


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
    engine, told = _engine(tee), list[State]()
    others = [_request(1, 2, samples=2), _request(2, samples=2)]
    poisoned = _request(3, samples=2)
    error = ActivationRangeError("o_proj", got="much", expected="less")
    _failing_for(engine, poisoned, error)
    with _running(engine, start=False, tell=told.append) as running:
        clients = [running.ask(request) for request in (others[0], poisoned, others[1])]
        running.background.start()
        running.finish(clients)
        # Also where no other runs beside it.
        assert running.answer(poisoned).error is error
        _assert_same(tee, _request(1), running.answer(_request(1)))
    first, ended, last = clients
    assert ended.error is error
    assert [delivery.ended for delivery in ended.deliveries] == [False, True]
    for request, client in zip(others, (first, last), strict=True):
        _assert_same(tee, request, client)
    assert told == ["ready"]


def test_one_for_which_the_machine_has_no_memory_ends_alone(
    tee: Tee, monkeypatch: pytest.MonkeyPatch
) -> None:
    error = LimitError("KV memory", got="much", expected="less")

    def made(config: ModelConfig, capacity: int, *more: Any) -> KVCache:
        if capacity > 100:
            raise error
        return KVCache(config, capacity, *more)

    monkeypatch.setattr("tee_side.engine.engine.KVCache", made)
    with _running(_engine(tee)) as running:
        assert running.answer(_request(3, 200)).error is error
        _assert_same(tee, _request(1), running.answer(_request(1)))


# One row may be the cause of a ReplyError; a service that is asked no more gives it to all. In the
# steps of a prompt only the first of several samples has rows.
@each_row(
    ("kind", "samples"), [(kind, n) for kind in (DeadlineExceededError, ReplyError) for n in (1, 2)]
)
def test_a_service_that_is_away_ends_all_until_a_token_can_be_made(
    tee: Tee, caplog: pytest.LogCaptureFixture, kind: type[TsqpError], samples: int
) -> None:
    channel = tee.channel
    assert isinstance(channel, Down)
    with _running(_engine(tee)) as running, caplog.at_level(logging.CRITICAL):
        clients = [running.ask(_request(n, 200, samples=samples)) for n in (1, 2)]
        running.until(lambda: all(client.deliveries for client in clients))
        channel.down = kind
        running.finish(clients)
        running.until(lambda: running.background.state == "failed")
        clients.append(running.answer(_request(3, samples=samples)))
        channel.down = None
        # What is asked until then may fail.
        while running.answer(_request(3)).error is not None:
            pass
        assert running.background.state == "ready"
        _assert_same(tee, _request(4), running.answer(_request(4)))
        # One alone that is in its prompt, whose other samples have no rows yet.
        channel.down = kind
        clients.append(running.answer(_request(2, samples=samples)))
        running.until(lambda: running.background.state == "failed")
        channel.down = None
    assert [(type(client.error), client.ends) for client in clients] == [(kind, 1)] * 4


def test_a_mistake_of_ours_ends_everything_and_quotes_nothing(
    tee: Tee, caplog: pytest.LogCaptureFixture
) -> None:
    engine, poisoned = _engine(tee), _request(1)
    _failing_for(engine, poisoned, ValueError("what the prompt said"))
    with _running(engine, start=False) as running:
        clients = [running.ask(request) for request in (poisoned, _request(2))]
        running.background.start()
        running.finish(clients)
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
    BackgroundEngine(_engine(tee), call=lambda _: None).close()  # one that was never started
    with _running(_engine(tee, max_sequences=1)) as running:
        clients = [running.ask(_request(seed, 240)) for seed in (1, 2)]
        running.until(lambda: clients[0].deliveries)
        running.background.close()
        assert not any(thread.name == "engine" for thread in threading.enumerate())
        running.finish(clients)
        with pytest.raises(EngineError):
            running.ask(_request(2))
    for client in clients:
        assert isinstance(client.error, EngineError)
        assert client.ends == 1


def test_one_that_gets_no_pads_ends_with_all_its_samples_and_others_go_on(
    saved_model: Models, tee: Tee
) -> None:
    """Of its samples, one had pads and is in the step under way."""
    padded, probe, first_token = saved_model("llama").tee("shielded", when_out="fail"), 1, 1
    stocked(padded, probe + first_token + 1)
    with _running(_engine(padded), start=False) as running:
        short, refused = _request(1, 2), _request(2, 6, samples=2)
        clients = [running.ask(request) for request in (short, refused)]
        running.background.start()
        running.finish(clients)
        assert running.background.state == "ready"
    _assert_same(tee, short, clients[0])
    assert isinstance(clients[1].error, PadsExhaustedError)
    assert clients[1].ends == 1
