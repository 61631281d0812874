"""Tests of the request loop with messages that the test hands it, without sockets or clocks."""

from __future__ import annotations

import logging
import math
import select
import time
from collections.abc import Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import msgpack
import pytest
import torch

from gpu_side import request_loop
from gpu_side.handler import RequestHandler
from gpu_side.metrics import StateCollector
from gpu_side.queues import QueueLimits
from gpu_side.replies import Result
from gpu_side.request_loop import MAX_UNDERWAY
from gpu_side.segment_parts import Part
from gpu_side.session_cache import GROWTH_TOKENS, CacheShape, Window
from gpu_side.session_settings import SessionSettings
from gpu_side.sessions import Sessions
from gpu_side.state import ServiceState
from gpu_side.stop_signal import StopSignal
from gpu_side.transport.listener import Incoming
from protocol.errors import EndpointError
from protocol.messages import Request, TensorReply
from protocol.tensors import Buffer, WireTensor
from tests.kit.clock import (
    MS,
    RESULT,
    Accelerator,
    Asked,
    Clock,
    Listener,
    Timed,
    Work,
    errors_of,
    incoming_request,
    make_loop,
    run_loop,
    stop_signal,
)


def test_good_request_has_a_result_and_its_timing() -> None:
    listener = Listener([incoming_request(1, age_s=2.0)])
    run_loop(listener, lambda request: RESULT)
    (reply,) = listener.sent
    assert (reply["status"], reply["request_id"], reply["method"]) == ("success", 1, "Matmul")
    assert reply["timing"]["queue_us"] >= 2_000_000
    assert reply["timing"]["compute_us"] >= 0


def test_request_that_waited_past_its_deadline_is_not_computed() -> None:
    computed = []
    listener = Listener(
        [incoming_request(1, timeout_ms=1000, age_s=1.5), incoming_request(2, timeout_ms=60_000)]
    )
    run_loop(listener, lambda request: computed.append(request) or RESULT)  # type: ignore[func-returns-value]
    assert errors_of(listener) == [(1, "DEADLINE_EXCEEDED"), (2, None)]
    assert len(computed) == 1


@pytest.mark.parametrize("error", [RuntimeError("canary"), MemoryError(), KeyError("canary")])
def test_failure_in_an_operator_fails_one_request_only(
    error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    failures = iter([error])

    def answer(request: Request) -> Result:
        for failure in failures:
            raise failure
        return RESULT

    listener = Listener([incoming_request(1), incoming_request(2)])
    with caplog.at_level(logging.WARNING):
        run_loop(listener, answer)
    assert errors_of(listener) == [(1, "INTERNAL"), (2, None)]
    assert "canary" not in str(listener.sent)
    assert [record.getMessage() for record in caplog.records] == ["failed"]


def test_result_that_cannot_be_encoded_fails_one_request_only() -> None:
    broken = (TensorReply(output=WireTensor("float32", (1,), None)), None)  # type: ignore[arg-type]
    answers = iter([broken, RESULT])
    listener = Listener(
        [
            Incoming((b"peer", b""), [memoryview(_inline_matmul())], time.perf_counter_ns()),
            incoming_request(2),
        ]
    )
    run_loop(listener, lambda request: next(answers))
    assert listener.sent[0] == {"status": "error", "error": "INTERNAL"}
    assert listener.sent[1]["status"] == "success"


def _inline_matmul() -> bytes:
    one = {"a_buffer": bytes(4), "a_shape": [1, 1], "b_buffer": bytes(4), "b_shape": [1, 1]}
    return bytes(msgpack.packb({"method": "Matmul", "request": one | {"dtype": "float32"}}))


def test_a_request_is_answered_before_others_are_looked_for() -> None:
    events: list[str] = []

    class Noting(Listener):
        def wait(self, *, wakeup: object = None, timeout_ms: int | None = None) -> bool:
            events.append("wait")
            return super().wait()

        def receive(self) -> Incoming | None:
            incoming = super().receive()
            events.append("nothing" if incoming is None else "message")
            return incoming

        def send(self, route: Sequence[bytes], frames: Sequence[Buffer]) -> bool:
            events.append("send")
            return super().send(route, frames)

    run_loop(Noting([incoming_request(1)]), lambda request: RESULT)
    assert events[:5] == ["wait", "message", "send", "nothing", "wait"]


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
            timeouts.append(timeout_ms)
            gauges.append([m.samples[0].value for m in collector.collect() if m.name in GAUGES])
            now += (timeout_ms or 0) / 1000
            stop.requested = len(timeouts) == 4
            return super().wait()

    with stop_signal() as stop:
        # It goes on when it is woken without a message.
        stop.forget_wakeup = lambda: None  # type: ignore[method-assign]
        loop = make_loop(answer, state)
        loop._handler.expire_sessions = partial(RequestHandler.expire_sessions, loop._handler)
        loop._handler.sessions = sessions
        loop.run(Idle([incoming_request(1)]), stop)
    assert timeouts[:4] == [None, 60_000, 30_000, None]
    kept = [1, GROWTH_TOKENS * shape.token_bytes]
    assert gauges[:4] == [[0, 0], kept, kept, [0, 0]]


def test_sessions_of_a_client_whose_key_is_revoked_end_though_nothing_comes() -> None:
    told: list[tuple[bool, bool]] = []

    class Idle(Listener):
        def wait(self, *, wakeup: Any = None, timeout_ms: int | None = None) -> bool:
            if not self.revoked:
                self.revoked.add(b"b")
                stop.note_list()
                # It is woken.
                assert select.select([wakeup], [], [], 0)[0]
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
        loop.run(Idle([]), stop)
    assert told == [(True, False)]


def test_sessions_end_while_there_is_always_a_request() -> None:
    looks = 0

    def expires() -> None:
        nonlocal looks
        looks += 1

    with stop_signal() as stop:
        loop = make_loop(lambda request: RESULT)
        loop._handler.expire_sessions = expires
        loop.run(Listener([incoming_request(n) for n in range(5)]), stop)
    assert looks >= 5


def test_everything_that_has_arrived_is_picked_up_between_two_requests() -> None:
    listener = Listener([incoming_request(n) for n in (1, 2, 3)])
    left: list[int] = []

    def answer(request: Request) -> Result:
        left.append(len(listener.incoming))
        return RESULT

    run_loop(listener, answer)
    assert left == [2, 0, 0]
    assert [request_id for request_id, _ in errors_of(listener)] == [1, 2, 3]


def test_client_that_has_gone_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        run_loop(Listener([incoming_request(1)], gone=True), lambda request: RESULT)
    assert [record.getMessage() for record in caplog.records] == ["client_gone"]


@pytest.mark.parametrize("kind", [Work, Asked])
def test_requests_are_received_while_an_accelerator_works(
    monkeypatch: pytest.MonkeyPatch, kind: type[Work]
) -> None:
    clock = Clock(monkeypatch)
    listener = Timed(clock, 0, 3 * MS, 9_900_000, 30 * MS)
    run_loop(listener, Accelerator(clock, 10 * MS, kind=kind))
    # 9.9 ms is within the last two milliseconds of the first: seen a moment later.
    late_ns = [
        received - sent
        for received, sent in zip(
            listener.received_ns, [0, 3 * MS, 9_900_000, 30 * MS], strict=True
        )
    ]
    assert all(0 <= late <= 200_000 for late in late_ns)
    # Each reply goes out when its own time has come, one after the other, none with another's.
    late_ns = [sent - number * 10 * MS for number, sent in enumerate(listener.sent_ns, 1)]
    assert all(0 <= late <= (70_000 if kind is Asked else 0) for late in late_ns)
    timings = [reply["timing"] for reply in listener.sent]
    assert [timing["compute_us"] for timing in timings] == [10_000] * 4
    assert timings[0]["queue_us"] == 0
    assert 6_800 <= timings[1]["queue_us"] <= 7_000


def test_an_accelerator_that_fails_fails_one_request_only(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    clock = Clock(monkeypatch)
    listener = Timed(clock, 0, 1 * MS, 2 * MS)
    with caplog.at_level(logging.WARNING):
        run_loop(listener, Accelerator(clock, 10 * MS, failing=2))
    assert errors_of(listener) == [(1, None), (2, "INTERNAL"), (3, None)]
    assert "canary" not in str(listener.sent)
    assert [record.getMessage() for record in caplog.records] == ["failed"]


def test_an_accelerator_has_two_requests_and_the_queue_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Clock(monkeypatch)
    state = ServiceState(QueueLimits(requests=4))
    room = 1 + 4
    listener = Timed(clock, *([0] * (room + 3)))
    given_ns: list[int] = []
    accelerator = Accelerator(clock, 10 * MS)

    def answer(request: Request) -> Result:
        given_ns.append(clock.now - 10**9)
        return accelerator(request)

    run_loop(listener, answer, state)
    assert given_ns == [max(0, n + 1 - MAX_UNDERWAY) * 10 * MS for n in range(room)]
    # The first, and as many as may wait behind it; the rest is told so at once.
    assert listener.received_ns == [0] * (room + 3)
    refused = {n for n, error in errors_of(listener) if error == "QUEUE_FULL"}
    assert len(refused) == 3
    assert listener.sent_ns == [0] * 3 + [n * 10 * MS for n in range(1, room + 1)]
    assert state.underway == 0


def test_deadlines_are_checked_before_an_accelerator_gets_a_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Clock(monkeypatch)
    listener = Timed(clock, 0, 0, 0, 0, timeout_ms=25)
    accelerator, computed = Accelerator(clock, 30 * MS), []
    run_loop(listener, lambda request: computed.append(request) or accelerator(request))  # type: ignore[func-returns-value]
    assert sorted(errors_of(listener)) == [
        (1, None),
        (2, None),
        (3, "DEADLINE_EXCEEDED"),
        (4, "DEADLINE_EXCEEDED"),
    ]
    assert len(computed) == 2


def test_a_request_s_memory_is_free_while_an_accelerator_works(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Clock(monkeypatch)
    listener = Timed(clock, 0)
    alive: list[bool] = []
    accelerator = Accelerator(clock, 10 * MS)
    loop = make_loop(accelerator)
    wait_until = clock.wait_until

    def waiting(ns: int) -> None:
        alive.extend(bool([*one.incoming.frames, *one.opened.frames]) for one in loop._underway)
        wait_until(ns)

    monkeypatch.setattr(request_loop, "wait_until", waiting)
    with stop_signal() as stop:
        loop.run(listener, stop)
    assert alive == [False]
    assert errors_of(listener) == [(1, None)]


def test_a_service_whose_listener_fails_does_not_look_ready(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    listener, state = Listener([]), ServiceState()
    said: list[str] = []

    def fail(**_: object) -> bool:
        said.append(state.status)
        raise EndpointError("unix:///s", got="nobody at the door", expected="somebody")

    monkeypatch.setattr(listener, "wait", fail)
    with pytest.raises(EndpointError, match="nobody at the door"):
        run_loop(listener, lambda request: RESULT, state)
    assert said == ["ready"]
    assert state.status == state.health().status == "draining"
