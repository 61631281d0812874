"""A loop that was told to stop: what it has taken is finished, what still comes is refused."""

from __future__ import annotations

import logging
import signal
import time
from collections.abc import Iterator

import pytest

from gpu_side import request_loop
from gpu_side.replies import Result
from gpu_side.request_loop import MAX_REFUSED_AT_ONCE
from gpu_side.state import ServiceState
from gpu_side.stop_signal import StopSignal
from gpu_side.transport.listener import Incoming
from protocol.messages import HealthRequest, Request
from tests.kit.clock import (
    MS,
    RESULT,
    Accelerator,
    Answer,
    Clock,
    Listener,
    Timed,
    errors_of,
    incoming_request,
    make_loop,
    run_loop,
    stop_signal,
)


@pytest.fixture
def stop() -> Iterator[StopSignal]:
    with stop_signal() as made:
        yield made


def _stopping(stop: StopSignal, number: int, answer: Answer) -> Answer:
    """Answer, and stop the loop while it is at so many a request."""
    count = 0

    def answering(request: Request) -> Result:
        nonlocal count
        count += 1
        if count == number:
            stop.request(signal.SIGTERM, None)
        return answer(request)

    return answering


def _requests(*numbers: int) -> list[Incoming]:
    return [incoming_request(n) for n in numbers]


def test_what_was_picked_up_is_finished_and_what_comes_later_is_refused(
    stop: StopSignal, caplog: pytest.LogCaptureFixture
) -> None:
    listener = Listener(_requests(1, 2, 3, 4))
    count = 0

    def answer(request: Request) -> Result:
        nonlocal count
        count += 1
        if count == 2:
            stop.request(signal.SIGTERM, None)
            listener.incoming.extend(_requests(5, 6))
        return RESULT

    state = ServiceState()
    with caplog.at_level(logging.INFO, "gpu_service"):
        run_loop(listener, answer, state, stop)
    assert sorted(errors_of(listener)) == [
        *((n, None) for n in (1, 2, 3, 4)),
        (5, "SHUTTING_DOWN"),
        (6, "SHUTTING_DOWN"),
    ]
    assert state.status == "draining"
    assert [record.getMessage() for record in caplog.records] == ["draining"]


def test_what_was_not_picked_up_is_refused(
    stop: StopSignal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(request_loop, "_STOPPING_S", 60.0)
    count = 3 * MAX_REFUSED_AT_ONCE
    garbage = Incoming((b"peer",), [memoryview(b"\xc1")], time.perf_counter_ns())
    health = incoming_request(2, request=HealthRequest())
    listener = Listener([*_requests(1), garbage, health, *_requests(*range(3, count))])
    run_loop(listener, _stopping(stop, 1, lambda request: RESULT), None, stop)
    first, wrong, well, *refused = listener.sent
    assert first["status"] == "success"
    assert wrong == {"status": "error", "error": "MALFORMED_MESSAGE"}
    assert well["response"]["status"] == "draining"
    assert {reply["error"] for reply in refused} == {"SHUTTING_DOWN"}
    assert [reply["request_id"] for reply in refused] == list(range(3, count))


def test_what_an_accelerator_works_on_is_finished(
    monkeypatch: pytest.MonkeyPatch, stop: StopSignal
) -> None:
    clock = Clock(monkeypatch)
    listener = Timed(clock, 0, 0, 0, 15 * MS)
    answer = _stopping(stop, 2, Accelerator(clock, 10 * MS))
    run_loop(listener, answer, None, stop)
    assert errors_of(listener) == [
        (1, None),
        (4, "SHUTTING_DOWN"),
        (2, None),
        (3, None),
    ]
    assert listener.sent_ns == [10 * MS, 15 * MS, 20 * MS, 30 * MS]


def test_one_that_takes_too_long_is_refused_when_the_time_is_over(
    monkeypatch: pytest.MonkeyPatch, stop: StopSignal, caplog: pytest.LogCaptureFixture
) -> None:
    clock = Clock(monkeypatch)
    listener = Timed(clock, 0, 0, 0, 0)
    answer = _stopping(stop, 2, Accelerator(clock, 10 * MS))
    with caplog.at_level(logging.INFO, "gpu_service"):
        run_loop(listener, answer, None, stop, drain_timeout_s=0.015)
    assert errors_of(listener) == [(1, None), *((n, "SHUTTING_DOWN") for n in (2, 3, 4))]
    assert listener.sent_ns == [10 * MS, 15 * MS, 15 * MS, 15 * MS]
    assert [(record.getMessage(), record.__dict__["fields"]) for record in caplog.records] == [
        ("draining", {"queued_requests": 2, "underway_requests": 2}),
        ("drain_ended", {"refused_requests": 3}),
    ]


def test_a_second_signal_ends_it(monkeypatch: pytest.MonkeyPatch, stop: StopSignal) -> None:
    clock = Clock(monkeypatch)
    accelerator = Accelerator(clock, 10 * MS)
    listener = Timed(clock, 0, 0, 0)
    # In the second it is told to stop, in the third, while it drains, again.
    answer = _stopping(stop, 3, _stopping(stop, 2, accelerator))
    run_loop(listener, answer, None, stop)
    assert errors_of(listener) == [(1, None), (2, "SHUTTING_DOWN"), (3, "SHUTTING_DOWN")]
    assert listener.sent_ns == [10 * MS] * 3


def test_a_signal_wakes_a_wait_for_messages_again() -> None:
    with stop_signal() as stop:
        stop.writer.send(b"\x0f")
        stop.request(signal.SIGTERM, None)
        stop.rearm()
        assert not stop.requested
        with pytest.raises(BlockingIOError):
            stop.reader.recv(1)
        stop.writer.send(b"\x0f")
        assert stop.reader.recv(10) == b"\x0f"


def test_an_idle_loop_says_nothing_of_draining(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "gpu_service"):
        run_loop(Listener(_requests(1)), lambda request: RESULT)
    assert caplog.records == []


class Flood(Listener):
    """Somebody who goes on sending."""

    def receive(self) -> Incoming | None:
        return incoming_request(1)

    def wait(self, *, wakeup: object = None, timeout_ms: int | None = None) -> bool:
        return True


def test_a_client_that_goes_on_sending_cannot_keep_the_service_from_stopping(
    stop: StopSignal,
) -> None:
    listener, state = Flood([]), ServiceState()
    run_loop(listener, _stopping(stop, 20, lambda request: RESULT), state, stop)
    # What waited was finished in spite of it.
    good = [reply for reply in listener.sent if reply["status"] == "success"]
    assert len(good) == 19 + state.queue.limits.requests


def test_nor_can_one_that_begins_when_a_service_stops_that_was_long_idle(stop: StopSignal) -> None:
    loop = make_loop(lambda request: RESULT)
    loop._began_ns = time.perf_counter_ns() - 10**15
    stop.request(signal.SIGTERM, None)
    listener = Flood([])
    loop.run(listener, stop)
    assert {reply["error"] for reply in listener.sent} == {"SHUTTING_DOWN"}
