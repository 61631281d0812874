"""The request loop without sockets: one request after the other, beside an accelerator, its end."""

from __future__ import annotations

import logging
import math
import select
import signal
import time
from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from gpu_side import request_loop
from gpu_side.handler import RequestHandler
from gpu_side.metrics import StateCollector
from gpu_side.queues import QueueLimits
from gpu_side.replies import Result
from gpu_side.request_loop import MAX_REFUSED_AT_ONCE, MAX_UNDERWAY
from gpu_side.segment_parts import Part
from gpu_side.session_cache import GROWTH_TOKENS, CacheShape, Window
from gpu_side.session_settings import SessionSettings
from gpu_side.sessions import Sessions
from gpu_side.state import ServiceState
from gpu_side.stop_signal import StopSignal
from gpu_side.transport.listener import Incoming
from protocol.errors import EndpointError
from protocol.messages import HealthRequest, Request, TensorReply
from protocol.tensors import WireTensor
from tests.kit.clock import (
    MS,
    RESULT,
    Accelerator,
    Answer,
    Clock,
    Listener,
    Timed,
    incoming_bytes,
    incoming_request,
    make_loop,
    run_loop,
    stop_signal,
)
from tests.kit.rows import each_row

MATMUL = {"a_buffer": bytes(4), "a_shape": [1, 1], "b_buffer": bytes(4), "b_shape": [1, 1]}
INLINE = {"method": "Matmul", "request": MATMUL | {"dtype": "float32"}}
BROKEN = (TensorReply(output=WireTensor("float32", (1,), None)), None)  # type: ignore[arg-type]


def _requests(*numbers: int) -> list[Incoming]:
    return [incoming_request(number) for number in numbers]


def test_everything_that_has_arrived_is_picked_up_between_two_requests() -> None:
    listener = Listener([incoming_request(1, age_s=2.0), *_requests(2, 3)])
    left: list[int] = []
    # The first is answered before others are looked for.
    listener.on_send = lambda reply: left.append(len(listener.incoming))
    run_loop(listener)
    assert left == [2, 0, 0]
    assert listener.outcomes == [(1, None), (2, None), (3, None)]
    reply = listener.sent[0]
    assert (reply["status"], reply["method"]) == ("success", "Matmul")
    assert reply["timing"]["queue_us"] >= 2_000_000
    assert reply["timing"]["compute_us"] >= 0


@each_row("failure", [RuntimeError("canary"), MemoryError(), KeyError("canary"), BROKEN])
def test_a_failure_fails_one_request_only(
    failure: Exception | Result, caplog: pytest.LogCaptureFixture
) -> None:
    """Of an operator, or of a result that cannot be encoded."""
    caplog.clear()
    outcomes = iter([failure, RESULT])

    def answer(request: Request) -> Result:
        if isinstance(outcome := next(outcomes), Exception):
            raise outcome
        return outcome

    listener, state = Listener([incoming_bytes(INLINE), *_requests(2)]), ServiceState()
    run_loop(listener, answer, state)
    assert listener.sent[0] == {"status": "error", "error": "INTERNAL"}
    assert listener.outcomes[1:] == [(2, None)]
    assert caplog.messages == ["failed"]
    outcomes_of = state.counters.methods["Matmul"].outcomes
    assert {code: n for code, n in outcomes_of.items() if n} == {"INTERNAL": 1, "OK": 1}


def test_a_service_whose_listener_fails_does_not_look_ready() -> None:
    listener, state = Listener(), ServiceState()
    said: list[str] = []

    def fail(**_: object) -> bool:
        said.append(state.status)
        raise EndpointError("unix:///s", got="nobody at the door", expected="somebody")

    listener.wait = fail  # type: ignore[method-assign]
    with pytest.raises(EndpointError, match="nobody at the door"):
        run_loop(listener, state=state)
    assert said == ["ready"]
    assert state.status == state.health().status == "draining"


# ------------------------------------------------------------------------------------- sessions


GAUGES = ("tsqp_sessions", "tsqp_session_bytes")


def test_sessions_end_without_another_request() -> None:
    now = 0.0
    settings, shape = SessionSettings(2**20, ttl_s=90.0), CacheShape(1, 1, 2, torch.float32, None)
    sessions, state = Sessions(settings, 0, clock=lambda: now), ServiceState()
    state.sessions = lambda: sessions.totals
    collector, gauges, timeouts = StateCollector(state), [], []

    def answer(request: Request) -> Result:
        with sessions.running(b"a", (0, 0), [Part(b"s" * 16, 0, 1, 1)], shape, Window()):
            return RESULT

    class Idle(Listener):
        def wait(self, *, wakeup: object = None, timeout_ms: int | None = None) -> bool:
            nonlocal now
            gauges.append([m.samples[0].value for m in collector.collect() if m.name in GAUGES])
            timeouts.append(timeout_ms)
            now += (timeout_ms or 0) / 1000
            stop.requested = len(timeouts) == 4
            return super().wait()

    with stop_signal() as stop:
        # It goes on when it is woken without a message.
        stop.forget_wakeup = lambda: None  # type: ignore[method-assign]
        loop = make_loop(answer, state)
        loop._handler.expire_sessions = partial(RequestHandler.expire_sessions, loop._handler)
        loop._handler.sessions = sessions
        loop.run(Idle(_requests(1)), stop)
    assert timeouts[:4] == [None, 60_000, 30_000, None]
    kept = [1, GROWTH_TOKENS * shape.token_bytes]
    assert gauges[:4] == [[0, 0], kept, kept, [0, 0]]


def test_sessions_end_while_there_is_always_a_request() -> None:
    looks: list[None] = []
    with stop_signal() as stop:
        loop = make_loop(lambda request: RESULT)
        loop._handler.expire_sessions = lambda: looks.append(None)
        loop.run(Listener(_requests(*range(5))), stop)
    assert len(looks) >= 5


def test_sessions_of_a_client_whose_key_is_revoked_end_though_nothing_comes() -> None:
    told: list[tuple[bool, bool]] = []

    class Idle(Listener):
        def wait(self, *, wakeup: Any = None, timeout_ms: int | None = None) -> bool:
            if not self.revoked:
                self.revoked.add(b"b")
                stop.note_list()
                assert select.select([wakeup], [], [], 0)[0], "it is not woken"
            else:
                stop.requested = True
            return False

    with stop_signal() as stop:
        stop.forget_wakeup = partial(StopSignal.forget_wakeup, stop)  # type: ignore[method-assign]
        loop = make_loop(lambda request: RESULT)
        loop._handler.sessions = SimpleNamespace(
            look_at_s=math.inf,
            forget_revoked=lambda is_allowed: told.append((is_allowed(b"a"), is_allowed(b"b"))),
        )
        loop.run(Idle(), stop)
    assert told == [(True, False)]


# --------------------------------------------------------------------------------- accelerators


@each_row("asked", [False, True])
def test_requests_are_received_while_an_accelerator_works(
    monkeypatch: pytest.MonkeyPatch, asked: bool
) -> None:
    clock, arrivals = Clock(monkeypatch), (0, 3 * MS, 9_900_000, 30 * MS)
    listener = Timed(clock, *arrivals)
    run_loop(listener, Accelerator(clock, 10 * MS, asked=asked))
    # 9.9 ms is within the last two milliseconds of the first: seen a moment later.
    late_ns = [got - sent for got, sent in zip(listener.received_ns, arrivals, strict=True)]
    assert all(0 <= late <= 200_000 for late in late_ns), late_ns
    # Each reply goes out when its own time has come, one after the other, none with another's.
    late_ns = [sent - number * 10 * MS for number, sent in enumerate(listener.sent_ns, 1)]
    assert all(0 <= late <= (70_000 if asked else 0) for late in late_ns), late_ns
    timings = [reply["timing"] for reply in listener.sent]
    assert [timing["compute_us"] for timing in timings] == [10_000] * 4
    assert timings[0]["queue_us"] == 0
    assert 6_800 <= timings[1]["queue_us"] <= 7_000


def test_an_accelerator_that_fails_fails_one_request_only(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    clock = Clock(monkeypatch)
    listener = Timed(clock, 0, 1 * MS, 2 * MS)
    run_loop(listener, Accelerator(clock, 10 * MS, failing=2))
    assert listener.outcomes == [(1, None), (2, "INTERNAL"), (3, None)]
    assert "canary" not in str(listener.sent)
    assert caplog.messages == ["failed"]


def test_an_accelerator_has_two_requests_and_the_queue_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock, state, room = Clock(monkeypatch), ServiceState(QueueLimits(requests=4)), 1 + 4
    listener = Timed(clock, *[0] * (room + 3))
    given_ns: list[int] = []
    accelerator, kept = Accelerator(clock, 10 * MS), []

    def answer(request: Request) -> Result:
        given_ns.append(clock.now - 10**9)
        kept.extend([*one.incoming.frames, *one.opened.frames] for one in loop._underway)
        return accelerator(request)

    loop = make_loop(answer, state)
    with stop_signal() as stop:
        loop.run(listener, stop)
    # What was received of them is free while it works.
    assert kept == [[]] * (room - 1)
    assert given_ns == [max(0, n + 1 - MAX_UNDERWAY) * 10 * MS for n in range(room)]
    # The first, and as many as may wait behind it; the others are told so at once.
    assert listener.received_ns == [0] * (room + 3)
    assert [error for _, error in listener.outcomes] == ["QUEUE_FULL"] * 3 + [None] * room
    assert listener.sent_ns == [0] * 3 + [n * 10 * MS for n in range(1, room + 1)]
    assert state.underway == 0


def test_deadlines_are_checked_before_an_accelerator_gets_a_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock, computed = Clock(monkeypatch), []
    listener, accelerator = Timed(clock, 0, 0, 0, 0, timeout_ms=25), Accelerator(clock, 30 * MS)
    run_loop(listener, lambda request: computed.append(request) or accelerator(request))  # type: ignore[func-returns-value]
    late = [(number, "DEADLINE_EXCEEDED") for number in (3, 4)]
    assert sorted(listener.outcomes) == [(1, None), (2, None), *late]
    assert len(computed) == 2


# -------------------------------------------------------------------------------------- its end


@pytest.fixture
def stop() -> Iterator[StopSignal]:
    with stop_signal() as made:
        yield made


def _stopping(stop: StopSignal, at: int, answer: Answer = lambda request: RESULT) -> Answer:
    """Answer, and stop the loop while it is at so many a request."""
    numbers = iter(range(1, 10**6))

    def answering(request: Request) -> Result:
        if next(numbers) == at:
            stop.request(signal.SIGTERM, None)
        return answer(request)

    return answering


def test_what_was_picked_up_is_finished_and_what_comes_later_is_refused(
    stop: StopSignal, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "gpu_service")
    run_loop(Listener(_requests(1)))
    assert caplog.messages == []  # where nothing waited, nothing is said
    listener, state = Listener(_requests(1, 2, 3, 4)), ServiceState()

    def later(reply: dict[str, object]) -> None:
        if stop.requested:
            listener.incoming.extend(_requests(5, 6))
            listener.on_send = lambda reply: None

    listener.on_send = later
    run_loop(listener, _stopping(stop, 2), state, stop)
    finished = [(number, None) for number in (1, 2, 3, 4)]
    refused = [(number, "SHUTTING_DOWN") for number in (5, 6)]
    assert sorted(listener.outcomes) == finished + refused
    assert state.status == "draining"
    assert caplog.messages == ["draining"]


def test_what_was_not_picked_up_is_refused(
    stop: StopSignal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(request_loop, "_STOPPING_S", 60.0)
    count = 3 * MAX_REFUSED_AT_ONCE
    health = incoming_request(2, request=HealthRequest())
    others = [incoming_bytes(b"\xc1"), health, *_requests(*range(3, count))]
    listener = Listener([*_requests(1), *others])
    run_loop(listener, _stopping(stop, 1), stop=stop)
    refused = [(number, "SHUTTING_DOWN") for number in range(3, count)]
    assert listener.outcomes == [(1, None), (0, "MALFORMED_MESSAGE"), (2, None), *refused]
    assert listener.sent[2]["response"]["status"] == "draining"


@each_row(
    ("stops_at", "timeout_s", "finished_ns", "refused_ns", "ended"),
    [
        # What an accelerator works on is finished, and what waits behind it.
        ([2], 30.0, [10, 20, 30], [15], None),
        # As long as that may take; or until a second signal.
        ([2], 0.014, [10], [14, 14, 15], 2),
        ([2, 3], 30.0, [10], [10, 10, 15], 2),
    ],
)
def test_a_drain_has_an_end(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    stops_at: list[int],
    timeout_s: float,
    finished_ns: list[int],
    refused_ns: list[int],
    ended: int | None,
) -> None:
    caplog.clear()
    caplog.set_level(logging.INFO, "gpu_service")
    clock = Clock(monkeypatch)
    listener = Timed(clock, 0, 0, 0, 15 * MS)
    with stop_signal() as stop:
        answer: Answer = Accelerator(clock, 10 * MS)
        for at in stops_at:
            answer = _stopping(stop, at, answer)
        run_loop(listener, answer, stop=stop, drain_timeout_s=timeout_s)
    went = {None: [], "SHUTTING_DOWN": []}
    for (_, error), sent_ns in zip(listener.outcomes, listener.sent_ns, strict=True):
        went[error].append(sent_ns // MS)
    assert went == {None: finished_ns, "SHUTTING_DOWN": refused_ns}
    said = [(one.message, vars(one)["fields"]) for one in caplog.records]
    assert said[0] == ("draining", {"queued_requests": 1, "underway_requests": 2})
    rest = [] if ended is None else [("drain_ended", {"refused_requests": ended})]
    assert said[1:] == rest


class Flood(Listener):
    """A client that goes on sending."""

    def receive(self) -> Incoming | None:
        return incoming_request(1)

    def wait(self, *, wakeup: object = None, timeout_ms: int | None = None) -> bool:
        return True


def test_a_client_that_goes_on_sending_cannot_keep_the_service_from_stopping(
    stop: StopSignal,
) -> None:
    listener, state = Flood(), ServiceState()
    run_loop(listener, _stopping(stop, 20), state, stop)
    # What waited was finished in spite of it.
    finished = [error for _, error in listener.outcomes if error is None]
    assert len(finished) == 19 + state.queue.limits.requests
    # Nor one that begins when a service stops that was idle for long.
    loop, listener = make_loop(lambda request: RESULT), Flood()
    loop._began_ns = time.perf_counter_ns() - 10**15
    stop.request(signal.SIGTERM, None)
    loop.run(listener, stop)
    assert {error for _, error in listener.outcomes} == {"SHUTTING_DOWN"}
