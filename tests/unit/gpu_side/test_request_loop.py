"""Tests of the request loop with messages that the test hands it, without sockets or clocks."""

from __future__ import annotations

import logging
import signal
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import msgpack
import pytest
import torch

from gpu_side import request_loop
from gpu_side.answers import Answer
from gpu_side.request_loop import (
    MAX_QUEUED_REQUESTS,
    MAX_UNDERWAY,
    RequestLoop,
    StopSignal,
)
from protocol.channel import Incoming
from protocol.encoding import DEFAULT_MAX_MESSAGE_BYTES, encode_request
from protocol.messages import MatmulRequest, Request, TensorReply
from protocol.tensors import Buffer, WireTensor, from_torch

REQUEST = MatmulRequest(a=from_torch(torch.ones(1, 1)), b=from_torch(torch.ones(1, 1)))
RESULT = Answer(TensorReply(output=from_torch(torch.ones(1, 1))))


class Listener:
    """Stands in for the socket: hands out messages, keeps replies."""

    def __init__(self, incoming: list[Incoming], *, gone: bool = False) -> None:
        self.incoming, self.gone = deque(incoming), gone
        self.sent: list[dict[str, Any]] = []

    def wait(self, *, wakeup: object = None, timeout_ms: int | None = None) -> bool:
        return bool(self.incoming)

    def receive(self) -> Incoming | None:
        return self.incoming.popleft() if self.incoming else None

    def send(self, route: Sequence[bytes], frames: Sequence[Buffer]) -> bool:
        self.sent.append(msgpack.unpackb(frames[0]))
        return not self.gone


class Operators:
    """Stands in for the weights: answers by a function of the test's."""

    def __init__(self, answer: Callable[[Request], Answer]) -> None:
        self.apply = answer


def _incoming(request_id: int, timeout_ms: int = 60_000, age_s: float = 0.0) -> Incoming:
    frames = [memoryview(bytes(f)) for f in encode_request(REQUEST, request_id, timeout_ms)]
    return Incoming((b"peer",), frames, time.perf_counter_ns() - int(age_s * 1e9))


def _run(listener: Listener, answer: Callable[[Request], Answer]) -> None:
    stop = StopSignal()
    try:
        loop: Any = RequestLoop(Operators(answer), DEFAULT_MAX_MESSAGE_BYTES)  # type: ignore[arg-type]
        loop.run(listener, stop)
    finally:
        stop.reader.close()
        stop.writer.close()


def _errors(listener: Listener) -> list[tuple[int, str | None]]:
    return [(reply["request_id"], reply.get("error")) for reply in listener.sent]


def test_good_request_has_a_result_and_its_timing() -> None:
    listener = Listener([_incoming(1, age_s=2.0)])
    _run(listener, lambda request: RESULT)
    (reply,) = listener.sent
    assert (reply["status"], reply["request_id"], reply["method"]) == ("success", 1, "Matmul")
    assert reply["timing"]["queue_us"] >= 2_000_000
    assert reply["timing"]["compute_us"] >= 0


def test_request_that_waited_past_its_deadline_is_not_computed() -> None:
    computed = []
    listener = Listener([_incoming(1, timeout_ms=1000, age_s=1.5), _incoming(2, timeout_ms=60_000)])
    _run(listener, lambda request: computed.append(request) or RESULT)  # type: ignore[func-returns-value]
    assert _errors(listener) == [(1, "DEADLINE_EXCEEDED"), (2, None)]
    assert len(computed) == 1


@pytest.mark.parametrize("error", [RuntimeError("canary"), MemoryError(), KeyError("canary")])
def test_failure_in_an_operator_fails_one_request_only(
    error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    failures = iter([error])

    def answer(request: Request) -> Answer:
        for failure in failures:
            raise failure
        return RESULT

    listener = Listener([_incoming(1), _incoming(2)])
    with caplog.at_level(logging.WARNING):
        _run(listener, answer)
    assert _errors(listener) == [(1, "INTERNAL"), (2, None)]
    assert "canary" not in str(listener.sent)
    assert [record.getMessage() for record in caplog.records] == ["failed"]


def test_result_that_cannot_be_encoded_fails_one_request_only() -> None:
    broken = Answer(TensorReply(output=WireTensor("float32", (1,), None)))  # type: ignore[arg-type]
    answers = iter([broken, RESULT])
    listener = Listener(
        [
            Incoming((b"peer", b""), [memoryview(_inline_matmul())], time.perf_counter_ns()),
            _incoming(2),
        ]
    )
    _run(listener, lambda request: next(answers))
    assert listener.sent[0] == {"status": "error", "error": "INTERNAL"}
    assert listener.sent[1]["status"] == "success"


def _inline_matmul() -> bytes:
    one = {"a_buffer": bytes(4), "a_shape": [1, 1], "b_buffer": bytes(4), "b_shape": [1, 1]}
    return bytes(msgpack.packb({"method": "Matmul", "request": one | {"dtype": "float32"}}))


def test_stop_finishes_one_request_and_refuses_the_others() -> None:
    stop = StopSignal()
    count = MAX_QUEUED_REQUESTS + 5
    garbage = Incoming((b"peer",), [memoryview(b"\xc1")], time.perf_counter_ns())
    listener = Listener([_incoming(1), garbage, *(_incoming(n) for n in range(3, count + 1))])

    def answer(request: Request) -> Answer:
        stop.request(signal.SIGTERM, None)
        return RESULT

    loop: Any = RequestLoop(Operators(answer), DEFAULT_MAX_MESSAGE_BYTES)  # type: ignore[arg-type]
    loop.run(listener, stop)
    stop.reader.close()
    stop.writer.close()
    refused = [(n, "SHUTTING_DOWN") for n in range(3, count + 1)]
    assert _errors(listener) == [(1, None), *refused]


def test_a_client_that_goes_on_sending_cannot_keep_the_service_from_stopping() -> None:
    stop = StopSignal()

    class Flood(Listener):
        def receive(self) -> Incoming | None:
            return _incoming(1)

        def wait(self, *, wakeup: object = None, timeout_ms: int | None = None) -> bool:
            return True

    def answer(request: Request) -> Answer:
        stop.request(signal.SIGTERM, None)
        return RESULT

    loop: Any = RequestLoop(Operators(answer), DEFAULT_MAX_MESSAGE_BYTES)  # type: ignore[arg-type]
    loop.run(Flood([]), stop)
    stop.reader.close()
    stop.writer.close()


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

    _run(Noting([_incoming(1)]), lambda request: RESULT)
    assert events[:5] == ["wait", "message", "send", "nothing", "wait"]


def test_everything_that_has_arrived_is_picked_up_between_two_requests() -> None:
    listener = Listener([_incoming(n) for n in (1, 2, 3)])
    left: list[int] = []

    def answer(request: Request) -> Answer:
        left.append(len(listener.incoming))
        return RESULT

    _run(listener, answer)
    assert left == [2, 0, 0]
    assert [request_id for request_id, _ in _errors(listener)] == [1, 2, 3]


def test_client_that_has_gone_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        _run(Listener([_incoming(1)], gone=True), lambda request: RESULT)
    assert [record.getMessage() for record in caplog.records] == ["client_gone"]


class Work:
    """Takes from one time of the clock to another, or fails then."""

    def __init__(self, clock: Clock, end_ns: int, fails: bool) -> None:
        self._clock, self._end_ns, self._fails = clock, end_ns, fails

    def ends_ns(self) -> int:
        if self._fails and self._clock.now >= self._end_ns:
            raise RuntimeError("canary")
        return self._end_ns


class Asked(Work):
    """Does not say when it ends."""

    def ends_ns(self) -> int:
        if self._clock.now < self._end_ns:
            return self._clock.now + 70_000
        return self._end_ns


class Accelerator:
    """Works on each request for so long, one after the other, on a clock of its own."""

    def __init__(
        self,
        clock: Clock,
        duration_ns: int,
        *,
        kind: type[Work] = Work,
        failing: int = 0,
    ) -> None:
        self._clock, self._duration_ns = clock, duration_ns
        self._kind, self._failing = kind, failing
        self._free_ns = self._count = 0

    def __call__(self, request: Request) -> Answer:
        self._count += 1
        self._free_ns = max(self._clock.now, self._free_ns) + self._duration_ns
        fails = self._count == self._failing
        work = self._kind(self._clock, self._free_ns, fails)
        return Answer(RESULT.response, work)


class Clock:
    """Stands still but for who waits."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 10**9
        monkeypatch.setattr(request_loop.time, "perf_counter_ns", lambda: self.now)
        monkeypatch.setattr(request_loop, "wait_until", self.wait_until)
        monkeypatch.setattr(request_loop.time, "sleep", self.sleep)

    def wait_until(self, ns: int) -> None:
        self.now = max(self.now, ns)

    def sleep(self, seconds: float) -> None:
        self.now += round(seconds * 1e9)


class Timed(Listener):
    """Requests that come at their times, in ns behind the beginning, and when replies go."""

    def __init__(self, clock: Clock, *arrivals_ns: int, timeout_ms: int = 60_000) -> None:
        super().__init__([])
        self._clock, self._began, self._timeout_ms = clock, clock.now, timeout_ms
        self._coming = deque(enumerate(arrivals_ns, 1))
        self.sent_ns: list[int] = []
        self.received_ns: list[int] = []

    def _here(self) -> bool:
        return bool(self._coming) and self._began + self._coming[0][1] <= self._clock.now

    def wait(self, *, wakeup: object = None, timeout_ms: int | None = None) -> bool:
        limit = self._clock.now + (10**12 if timeout_ms is None else timeout_ms * 10**6)
        if self._coming:
            self._clock.now = max(self._clock.now, min(limit, self._began + self._coming[0][1]))
        elif timeout_ms is not None:
            self._clock.now = limit
        return self._here()

    def receive(self) -> Incoming | None:
        if not self._here():
            return None
        number, _ = self._coming.popleft()
        self.received_ns.append(self._clock.now - self._began)
        incoming = _incoming(number, self._timeout_ms)
        return incoming._replace(received_ns=self._clock.now)

    def send(self, route: Sequence[bytes], frames: Sequence[Buffer]) -> bool:
        self.sent_ns.append(self._clock.now - self._began)
        return super().send(route, frames)


MS = 1_000_000


@pytest.mark.parametrize("kind", [Work, Asked])
def test_requests_are_received_while_an_accelerator_works(
    monkeypatch: pytest.MonkeyPatch, kind: type[Work]
) -> None:
    clock = Clock(monkeypatch)
    listener = Timed(clock, 0, 3 * MS, 9_900_000, 30 * MS)
    _run(listener, Accelerator(clock, 10 * MS, kind=kind))
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
        _run(listener, Accelerator(clock, 10 * MS, failing=2))
    assert _errors(listener) == [(1, None), (2, "INTERNAL"), (3, None)]
    assert "canary" not in str(listener.sent)
    assert [record.getMessage() for record in caplog.records] == ["failed"]


def test_an_accelerator_has_two_requests_and_the_queue_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Clock(monkeypatch)
    count = MAX_QUEUED_REQUESTS + 6
    listener = Timed(clock, *([0] * count))
    given_ns: list[int] = []
    accelerator = Accelerator(clock, 10 * MS)

    def answer(request: Request) -> Answer:
        given_ns.append(clock.now - 10**9)
        return accelerator(request)

    _run(listener, answer)
    assert given_ns == [max(0, n - 1) * 10 * MS for n in range(count)]
    assert listener.sent_ns == [n * 10 * MS for n in range(1, count + 1)]
    # Two, and as many as wait; the rest stay in the transport until there is room.
    room = MAX_QUEUED_REQUESTS + MAX_UNDERWAY
    assert listener.received_ns[:room] == [0] * room
    assert listener.received_ns[room:] == [n * 10 * MS for n in range(1, count - room + 1)]


def test_deadlines_are_checked_before_an_accelerator_gets_a_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Clock(monkeypatch)
    listener = Timed(clock, 0, 0, 0, 0, timeout_ms=25)
    accelerator, computed = Accelerator(clock, 30 * MS), []
    _run(listener, lambda request: computed.append(request) or accelerator(request))  # type: ignore[func-returns-value]
    assert sorted(_errors(listener)) == [
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
    loop: Any = RequestLoop(Operators(accelerator), DEFAULT_MAX_MESSAGE_BYTES)  # type: ignore[arg-type]
    wait_until = clock.wait_until

    def waiting(ns: int) -> None:
        alive.extend(bool(one.origin.incoming.frames) for one in loop._underway)
        wait_until(ns)

    monkeypatch.setattr(request_loop, "wait_until", waiting)
    stop = StopSignal()
    loop.run(listener, stop)
    stop.reader.close()
    stop.writer.close()
    assert alive == [False]
    assert _errors(listener) == [(1, None)]


def test_stop_refuses_what_an_accelerator_still_works_on(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    stop = StopSignal()

    class Stopping(Timed):
        def wait(self, *, wakeup: object = None, timeout_ms: int | None = None) -> bool:
            if wakeup is not None and timeout_ms is not None:
                stop.request(signal.SIGTERM, None)
                return False
            return super().wait(wakeup=wakeup, timeout_ms=timeout_ms)

    listener = Stopping(clock, 0)
    operators: Any = Operators(Accelerator(clock, 10 * MS))
    RequestLoop(operators, DEFAULT_MAX_MESSAGE_BYTES).run(listener, stop)  # type: ignore[arg-type]
    stop.reader.close()
    stop.writer.close()
    assert _errors(listener) == [(1, "SHUTTING_DOWN")]
    assert listener.sent_ns == [0]
