"""The request loop without sockets: its order, accelerators, too many requests, and its end."""

import logging
import math
import select
import signal
import time
from collections.abc import Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from gpu_side import encoding
from gpu_side.encoding import OpenedRequest, open_request
from gpu_side.handler import FairQueue, QueueLimits, ServiceState
from gpu_side.kernels import Result
from gpu_side.request_loop import MAX_REFUSED_AT_ONCE, MAX_UNDERWAY, StopSignal
from gpu_side.transport.listener import Incoming
from protocol.errors import EndpointError
from protocol.messages import HealthRequest, InitRequest, Request, TensorReply
from protocol.tensors import Buffer, WireTensor
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

INIT, CANARY = ({"method": method, "request": {}} for method in ("Init", "Canary"))
BROKEN = (TensorReply(output=WireTensor("float32", (1,), None)), None)  # type: ignore[arg-type]
HEALTH = {"method": "Health", "request": {}}


def _from(client: str, *numbers: int, key: bytes = b"") -> list[Incoming]:
    return [incoming_request(number, client=client, key=key) for number in numbers]


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

    listener = Listener([incoming_bytes(INIT), *_from("a", 2)])
    run_loop(listener, answer)
    assert listener.outcomes == [(0, "INTERNAL"), (2, None)]
    assert "canary" not in str(listener.sent)
    assert caplog.messages == ["failed"]


def test_a_service_whose_listener_fails_does_not_look_ready() -> None:
    listener, state = Listener(), ServiceState()
    said: list[str] = []

    def fail(**_: object) -> bool:
        said.append(state.status)
        raise EndpointError("unix:///s", got="nobody at the door", expected="somebody")

    listener.wait = fail  # type: ignore[method-assign]
    with pytest.raises(EndpointError, match="nobody at the door"):
        run_loop(listener, state=state)
    assert (said, state.status, state.health().status) == (["ready"], "draining", "draining")


def test_a_stop_that_comes_with_a_new_list_of_clients_is_not_slept_through() -> None:
    listener, state = Listener(), ServiceState()
    waits: list[str] = []
    listener.wait = lambda **_: bool(waits.append(state.status))  # type: ignore[method-assign]
    loop = make_loop(lambda request: RESULT, state)
    loop._sessions = SimpleNamespace(forget_revoked=lambda is_allowed: None)
    with stop_signal() as stop:
        stop.note_list()
        # The signal comes just before what has woken the loop is read away.
        stop.forget_wakeup = lambda: stop.request(signal.SIGTERM, None)  # type: ignore[method-assign]
        loop.run(listener, stop)
    assert "ready" not in waits


def test_sessions_end_without_another_request_and_with_their_keys() -> None:
    timeouts: list[int | None] = []
    told: list[tuple[bool, bool]] = []
    ends = [90.0, 30.0, math.inf]

    class Idle(Listener):
        def wait(self, *, wakeup: Any = None, timeout_ms: int | None = None) -> bool:
            timeouts.append(timeout_ms)
            if len(timeouts) == 3:
                self.revoked.add(b"b")
                stop.note_list()
                assert select.select([wakeup], [], [], 0)[0], "it is not woken"
            stop.requested = len(timeouts) == 4
            return False

    with stop_signal() as stop:
        # It goes on when it is woken without a message.
        stop.forget_wakeup = partial(StopSignal.forget_wakeup, stop)  # type: ignore[method-assign]
        loop = make_loop(lambda request: RESULT)
        loop._sessions = SimpleNamespace(
            look_at_s=0.0,
            expire=lambda: ends.pop(0) if ends else math.inf,
            forget_revoked=lambda is_allowed: told.append((is_allowed(b"a"), is_allowed(b"b"))),
        )
        loop.run(Idle(), stop)
    # No transport waits for more than a minute; without sessions there is no end.
    assert timeouts[:4] == [60_000, 30_000, None, None]
    assert told == [(True, False)]


@each_row("asked", [False, True])
def test_requests_are_received_while_an_accelerator_works(
    monkeypatch: pytest.MonkeyPatch, asked: bool
) -> None:
    clock, arrivals = Clock(monkeypatch), (0, 3 * MS, 9_900_000, 30 * MS)
    listener = Timed(clock, *arrivals)
    run_loop(listener, Accelerator(clock, 10 * MS, asked=asked, failing=4))
    # 9.9 ms is within the last two milliseconds of the first: seen a moment later.
    late_ns = [got - sent for got, sent in zip(listener.received_ns, arrivals, strict=True)]
    assert all(0 <= late <= 200_000 for late in late_ns), late_ns
    # Each reply goes out when its own time has come, one after the other, none with another's.
    late_ns = [sent - number * 10 * MS for number, sent in enumerate(listener.sent_ns, 1)]
    assert all(0 <= late <= (70_000 if asked else 0) for late in late_ns), late_ns
    timings = [reply.get("timing") for reply in listener.sent]
    assert [timing and timing["compute_us"] for timing in timings] == [10_000] * 3 + [None]
    assert timings[0]["queue_us"] == 0
    assert 6_800 <= timings[1]["queue_us"] <= 7_000
    # One that fails fails its own request.
    assert listener.outcomes == [(1, None), (2, None), (3, None), (4, "INTERNAL")]


def test_an_accelerator_has_two_requests_and_the_queue_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock, state, room = Clock(monkeypatch), ServiceState(QueueLimits(requests=4)), 1 + 4
    listener = Timed(clock, *[0] * (room + 3), timeout_ms=25)
    given_ns, accelerator, kept = list[int](), Accelerator(clock, 10 * MS), []

    def answer(request: Request) -> Result:
        given_ns.append(clock.now - 10**9)
        kept.extend([*incoming.frames, *opened.frames] for incoming, opened, *_ in loop._underway)
        return accelerator(request)

    loop = make_loop(answer, state)
    with stop_signal() as stop:
        loop.run(listener, stop)
    # The first, and as many as may wait behind it; the others are told so at once.
    assert listener.received_ns == [0] * (room + 3)
    assert listener.outcomes[:3] == [(number, "QUEUE_FULL") for number in (6, 7, 8)]
    # Deadlines are checked before it gets a request, and what was received is free then.
    assert given_ns == [max(0, n + 1 - MAX_UNDERWAY) * 10 * MS for n in range(room - 1)]
    assert listener.outcomes[3:] == [
        (1, None),
        (2, None),
        (3, None),
        (5, "DEADLINE_EXCEEDED"),
        (4, None),
    ]
    assert kept == [[]] * 3
    assert state.underway == 0


@each_row(
    ("body", "most_bytes", "error", "decoded"),
    [
        # Not decoded to be refused, nor to see whether it asks for our health.
        (bytes(100_000), 99_999, "QUEUE_FULL", 0),
        ({"method": "Canary", "request": {"a": bytes(100_000)}}, 2**20, "UNKNOWN_METHOD", 1),
        # What is no message is called so, whether it fits or not.
        (b"\xc1" * 5000, 4999, "MALFORMED_MESSAGE", 1),
    ],
)
def test_a_large_message_is_decoded_once_at_most(
    body: bytes | dict[str, object], most_bytes: int, error: str, decoded: int
) -> None:
    opened: list[int] = []

    def noting(frames: Sequence[Buffer], limit: int) -> OpenedRequest:
        opened.append(len(frames[0]))
        return open_request(frames, limit)

    large = incoming_bytes(body, "a")
    listener = Listener([*_from("b", 1), large])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(encoding, "open_request", noting)
        run_loop(listener, state=ServiceState(QueueLimits(bytes=most_bytes)))
    assert listener.outcomes[1:] == [(0, error)]
    assert opened.count(len(large.frames[0])) == decoded


@each_row("asks", [False, True])
def test_a_few_are_answered_between_two_requests_however_long_it_takes(
    monkeypatch: pytest.MonkeyPatch, asks: bool
) -> None:
    """Of what is refused, and of those who ask how we are."""
    clock, messages = Clock(monkeypatch), _from("flood", *range(1, 101))
    if asks:
        health = [incoming_request(n, client="f", request=HealthRequest()) for n in range(1, 101)]
        messages = [*_from("modest", 1, 2, 3, 4), *health]
    listener = Listener(messages)

    def sent(_reply: object) -> None:
        clock.now += 10 * MS

    listener.on_send = sent
    run_loop(listener, state=ServiceState(QueueLimits(requests=3)))
    is_product = [reply["method"] == "Matmul" and "error" not in reply for reply in listener.sent]
    runs = "".join("." if product else "x" for product in is_product).split(".")
    assert (len(is_product), max(map(len, runs[:-1]))) == (len(messages), MAX_REFUSED_AT_ONCE)


def test_what_was_taken_from_a_key_that_is_revoked_is_not_answered(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Whether it waits, or an accelerator works on it; and it is not computed in vain."""
    clock, keys = Clock(monkeypatch), (b"revoked", b"other")
    messages = [(0, incoming_request(n, key=keys[(n - 1) % 2])) for n in range(1, 8)]
    listener, accelerator, computed = Timed(clock, *messages), Accelerator(clock, 10 * MS), []

    def answer(request: Request) -> Result:
        computed.append(request)
        if len(computed) == 2:
            listener.revoked.add(b"revoked")
        return accelerator(request)

    state = ServiceState()
    run_loop(listener, answer, state)
    assert listener.outcomes == [(2, None), (4, None), (6, None)]
    assert (len(computed), state.dropped_replies) == (4, 4)
    assert caplog.messages == ["dropped"] * 4


def test_health_alone_is_answered_ahead_of_what_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    ahead = [
        incoming_request(9, request=HealthRequest()),
        incoming_bytes(HEALTH),
        # What asks for its own health and more is refused.
        incoming_bytes(HEALTH | {"request": {"verbose": True}}),
    ]
    behind = [
        incoming_request(5, request=InitRequest()),
        incoming_bytes({"method": "Init", "request": {"Health": 1}}),
        incoming_bytes(b"Health"),
    ]
    messages = [(0, message) for message in (*behind, *ahead)]
    listener = Timed(clock, 0, 0, *messages)
    run_loop(listener, Accelerator(clock, 10 * MS))
    assert listener.outcomes[:3] == [(9, None), (0, None), (0, "INVALID_FIELD")]
    assert listener.sent_ns[:4] == [0, 0, 0, 10 * MS]
    assert sorted(listener.outcomes[3:], key=str) == [
        *[(0, "INVALID_FIELD"), (0, "MALFORMED_MESSAGE"), (1, None), (2, None), (5, None)]
    ]
    health = listener.sent[0]["response"]
    assert health.keys() == {"status", "uptime_s", "queued_requests", "queued_bytes"}
    # Of five one is with the accelerator.
    assert (health["status"], health["queued_requests"]) == ("ready", 4)
    waiting = [incoming_request(2), *behind]
    assert health["queued_bytes"] == sum(len(f) for one in waiting for f in one.frames)
    assert health["uptime_s"] >= 0


@each_row("gone", [False, True])
def test_everything_is_counted_and_logged_by_a_name_that_is_limited(
    gone: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.clear()
    messages = [
        incoming_request(1, age_s=2.0),
        incoming_request(2, timeout_ms=1, age_s=1.0),
        incoming_bytes(INIT),
        incoming_bytes(CANARY),
        incoming_bytes(b"\xc1", "a"),
        incoming_request(3, request=HealthRequest()),
    ]
    listener, state = Listener(messages, gone=gone), ServiceState()
    run_loop(listener, state=state)
    found = {
        (method, code): count
        for method, counted in state.methods.items()
        for code, count in counted.outcomes.items()
        if count
    }
    assert found == {
        ("Matmul", "OK"): 1,
        ("Matmul", "DEADLINE_EXCEEDED"): 1,
        ("Init", "OK"): 1,
        ("unknown", "UNKNOWN_METHOD"): 1,
        ("unknown", "MALFORMED_MESSAGE"): 1,
        ("Health", "OK"): 1,
    }
    received = sum(frame.nbytes for one in messages for frame in one.frames)
    assert state.received_bytes == received
    assert state.sent_bytes == (0 if gone else listener.sent_bytes)
    assert state.dropped_replies == len(messages) * gone
    matmul = state.methods["Matmul"]
    assert (sum(matmul.queue.buckets), sum(matmul.compute.buckets)) == (1, 1)
    assert matmul.queue.sum_ns >= 2e9
    assert matmul.compute.sum_ns > 0
    assert set(caplog.messages) == {"refused"} | ({"client_gone"} if gone else set())


def _stopping(stop: StopSignal, at: int, answer: Answer = lambda request: RESULT) -> Answer:
    """Answer, and stop the loop while it is at so many a request."""
    numbers = iter(range(1, 10**6))

    def answering(request: Request) -> Result:
        if next(numbers) == at:
            stop.request(signal.SIGTERM, None)
        return answer(request)

    return answering


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
def test_a_drain_finishes_what_was_picked_up_and_has_an_end(
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
    went: dict[str | None, list[int]] = {None: [], "SHUTTING_DOWN": []}
    for (_, error), sent_ns in zip(listener.outcomes, listener.sent_ns, strict=True):
        went[error].append(sent_ns // MS)
    assert went == {None: finished_ns, "SHUTTING_DOWN": refused_ns}
    said = [(one.message, vars(one)["fields"]) for one in caplog.records]
    assert said[0] == ("draining", {"queued_requests": 1, "underway_requests": 2})
    rest = [] if ended is None else [("drain_ended", {"refused_requests": ended})]
    assert said[1:] == rest


def _flood() -> Listener:
    listener: Any = Listener()
    listener.receive = lambda: incoming_request(1)
    listener.wait = lambda **_: True
    return listener


def test_a_client_that_goes_on_sending_cannot_keep_the_service_from_stopping() -> None:
    listener, state = _flood(), ServiceState()
    with stop_signal() as stop:
        run_loop(listener, _stopping(stop, 20), state, stop)
    # What waited was finished in spite of it.
    finished = [error for _, error in listener.outcomes if error is None]
    assert len(finished) == 19 + state.queue.limits.requests
    # Nor one that begins when a service stops that was idle for long.
    loop, listener = make_loop(lambda request: RESULT), _flood()
    loop._began_ns = time.perf_counter_ns() - 10**15
    with stop_signal() as stop:
        stop.request(signal.SIGTERM, None)
        loop.run(listener, stop)
    assert {error for _, error in listener.outcomes} == {"SHUTTING_DOWN"}


MANY = QueueLimits(requests=1000, bytes=10**9, total_requests=10**6, total_bytes=10**12)


def _message(client: str, number: int = 0, size: int = 4) -> Incoming:
    frames = [memoryview(bytes(3)), memoryview(bytes(size - 3))]
    return Incoming((client.encode(), b""), frames, number)


def _taken(queue: FairQueue) -> list[tuple[str, int]]:
    messages = [queue.take() for _ in range(queue.requests)]
    return [(taken.route[0].decode(), taken.received_ns) for taken in messages]


def test_a_client_that_had_its_turn_without_waiting_goes_to_the_end() -> None:
    queue = FairQueue(MANY)
    for client, number in (("a", 1), ("a", 2), ("b", 0)):
        queue.put(_message(client, number))
    queue.served = b"a"
    assert _taken(queue) == [("b", 0), ("a", 1), ("a", 2)]
    # But alone it need not wait for others.
    queue.put(_message("b"))
    queue.served = b"b"
    assert queue.take().route[0] == b"b"


def test_all_connections_of_a_key_are_one_client() -> None:
    queue = FairQueue(QueueLimits(requests=3))
    of_one = [_message(name, number)._replace(key=b"one") for number, name in enumerate("abcd")]
    queue.served = of_one[0].client
    assert [bool(queue.put(one)) for one in of_one] == [False] * 3 + [True]
    queue.put(_message("e", 4)._replace(key=b"other"))
    # The replies still go to the connections.
    assert _taken(queue) == [("e", 4), ("a", 0), ("b", 1), ("c", 2)]


def test_an_answer_without_waiting_is_a_turn_of_the_client_whatever_its_connection() -> None:
    came = [_from("a", 0, key=b"one"), _from("b", 1, key=b"one"), _from("c", 2, key=b"other")]
    listener = Listener([message for (message,) in came])
    run_loop(listener, lambda request: RESULT)
    assert [number for number, _ in listener.outcomes] == [0, 2, 1]


def test_what_was_taken_makes_room_for_its_client() -> None:
    queue = FairQueue(QueueLimits(bytes=100))
    queue.put(_message("a", 1, 60))
    queue.put(_message("a", 2, 40))
    assert queue.take().received_ns == 1
    assert queue.put(_message("a", 3, 60)) == ()


NUMBER = QueueLimits(requests=5, total_requests=6)
FEW = QueueLimits(bytes=100, total_bytes=400)
FEWER = QueueLimits(bytes=100, total_bytes=300)
LITTLE = QueueLimits(bytes=100, total_bytes=150)
LEAST = QueueLimits(total_bytes=100)
BOTH = QueueLimits(total_requests=5, total_bytes=100)


@each_row(
    # `a60`: 60 bytes of the client a. Refused are clients with the number of their message.
    ("limits", "waiting", "comes", "refused", "why"),
    [
        # A client has its own number of requests, and of bytes.
        (QueueLimits(requests=2), "a4 a4 b4", "a4", "a99", ("requests", 1, 0)),
        (QueueLimits(requests=2), "a4 a4 b4", "b4", "", None),
        (FEW, "a60 b100", "a41", "a99", ("bytes", 41, 40)),
        (FEW, "a60 b100", "a40", "", None),
        (QueueLimits(bytes=100, total_bytes=100), "", "a100", "", None),
        # Where all are too many, the client with the most gives up its newest.
        (NUMBER, "a4 a4 a4 a4 b4 b4", "c4", "a3", ("total_requests", 1, 0)),
        # A client that would have more than the others, or as many, is refused itself.
        (NUMBER, "a4 a4 a4 a4 b4 b4", "a4", "a99", ("total_requests", 1, 0)),
        (NUMBER, "a4 a4 a4 b4 b4 c4", "b4", "b99", ("total_requests", 1, 0)),
        (QueueLimits(total_requests=3), "a4 b4 c4", "d4", "d99", ("total_requests", 1, 0)),
        # As many as it takes in bytes, and none where that is not enough.
        (LITTLE, f"{'a10 ' * 10} b45", "c25", "a9 a8", ("total_bytes", 10, 0)),
        (LITTLE, f"{'a10 ' * 10} b45", "c96", "c99", ("total_bytes", 96, 5)),
        (FEWER, "a80 a20 b80 b20 c80 c20", "d90", "d99", ("total_bytes", 90, 0)),
        (FEWER, "a80 a20 b80 b20 c80 c20", "d60", "a1 b3 c5", ("total_bytes", 20, 0)),
        # A client with nothing waiting finds room for its fair share, no other and no larger one.
        (FEW, "a100 b100 c100 d100", "e80", "a0", ("total_bytes", 100, 0)),
        (FEW, "a100 b100 c100 d100", "e81", "e99", ("total_bytes", 81, 0)),
        (FEW, "a96 b100 c100 d100 e4", "e4", "e99", ("total_bytes", 4, 0)),
        # Room in bytes is room in number, too.
        (BOTH, "a5 a5 a5 b40 b40", "c40", "b4", ("total_bytes", 40, 0)),
        # Of two with as many bytes none gives up any, or they would push each other out in turn.
        (LEAST, "a30 a30 b30", "b30", "b99", ("total_bytes", 30, 10)),
        (LEAST, "a30 a30 b30", "b29", "a1", ("total_bytes", 30, 0)),
    ],
)
def test_what_does_not_fit(
    limits: QueueLimits, waiting: str, comes: str, refused: str, why: tuple[str, int, int] | None
) -> None:
    queue = FairQueue(limits)
    sizes = {n: (word[0], int(word[1:])) for n, word in enumerate(waiting.split())}
    for number, (client, size) in sizes.items():
        assert queue.put(_message(client, number, size)) == ()
    sizes[99] = client, size = comes[0], int(comes[1:])
    found = {
        f"{one.route[0].decode()}{one.received_ns}": tuple(limit)
        for one, *limit in queue.put(_message(client, 99, size))
    }
    assert found == dict.fromkeys(refused.split(), why)
    left = sizes.keys() - {int(name[1:]) for name in found}
    assert (queue.requests, queue.bytes) == (len(left), sum(sizes[number][1] for number in left))
    assert sorted(number for _, number in _taken(queue)) == sorted(left)
    # With nothing waiting all of them have their limits for themselves again.
    for name, _ in sizes.values():
        assert queue.put(_message(name, 0, min(100, limits.bytes))) == ()
        assert _taken(queue) == [(name, 0)]
