"""A loop with more clients and requests than it can serve, and those who ask how it is."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

import msgpack
import pytest

from gpu_side import encoding
from gpu_side.encoding import OpenedRequest, open_request
from gpu_side.log_limit import LIMITS, limited
from gpu_side.queues import QueueLimits
from gpu_side.replies import Result
from gpu_side.request_loop import MAX_REFUSED_AT_ONCE, REFUSING_NS, REFUSING_PART
from gpu_side.state import ServiceState
from gpu_side.transport.listener import Incoming
from protocol.messages import HealthRequest, InitRequest, Request
from protocol.tensors import Buffer
from tests.kit.clock import (
    MS,
    RESULT,
    Accelerator,
    Clock,
    Listener,
    Timed,
    errors_of,
    incoming_request,
    make_loop,
    run_loop,
)


def _from(client: str, *numbers: int) -> list[Incoming]:
    return [incoming_request(n, client=client.encode()) for n in numbers]


def _inline(method: str, client: str = "peer") -> Incoming:
    body = memoryview(msgpack.packb({"method": method, "request": {}}))
    return Incoming((client.encode(), b""), [body], time.perf_counter_ns())


def test_clients_are_served_in_turn() -> None:
    listener = Listener([*_from("flood", *range(1, 7)), *_from("modest", 101, 102)])
    run_loop(listener, lambda request: RESULT)
    # The first was answered before anybody looked what else has come.
    assert [n for n, _ in errors_of(listener)] == [1, 101, 2, 102, 3, 4, 5, 6]


def test_a_key_has_one_turn_whatever_its_connections() -> None:
    flood = [one._replace(key=b"flood") for n in range(1, 5) for one in _from(f"c{n}", n)]
    modest = [one._replace(key=b"modest") for one in _from("m", 101, 102)]
    listener = Listener([*flood, *modest])
    run_loop(listener, lambda request: RESULT)
    assert [n for n, _ in errors_of(listener)] == [1, 101, 2, 102, 3, 4]


def test_what_does_not_fit_is_refused_by_its_id_and_the_log_names_the_limit(
    caplog: pytest.LogCaptureFixture,
) -> None:
    listener = Listener(
        [*_from("a", 1, 2, 3, 4, 5), *_from("b", 11), _inline("Init", "a"), _inline("Init", "b")]
    )
    state = ServiceState(QueueLimits(requests=2))
    with caplog.at_level(logging.WARNING):
        run_loop(listener, lambda request: RESULT, state)
    full = [reply for reply in listener.sent if reply.get("error") == "QUEUE_FULL"]
    assert full == [
        {
            "version": 1,
            "request_id": n,
            "method": "Matmul",
            "status": "error",
            "error": "QUEUE_FULL",
        }
        for n in (4, 5)
    ] + [{"status": "error", "error": "QUEUE_FULL"}]
    assert len(listener.sent) == 8
    record, *_ = caplog.records
    assert record.getMessage() == "queue_full"
    assert record.__dict__["fields"] == {
        "peer": b"a".hex(),
        "request_id": 4,
        "code": "QUEUE_FULL",
        "limit": "max_queued_requests",
        "allowed": 2,
        "requested": 1,
        "available": 0,
    }
    assert state.counters.methods["Matmul"].outcomes["QUEUE_FULL"] == 2
    assert state.counters.methods["Init"].outcomes["QUEUE_FULL"] == 1


def _failing(request: Request) -> Result:
    raise RuntimeError("canary")


@pytest.mark.parametrize("event", ["refused", "client_gone", "failed", "queue_full", "dropped"])
def test_what_others_can_have_logged_is_logged_by_a_name_that_is_limited(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, event: str
) -> None:
    # What has room in an hour.
    monkeypatch.setitem(LIMITS, event, (LIMITS[event][0], 3600.0))
    flood = [_inline("Canary")] * 70 if event == "refused" else _from("a", *range(1, 71))
    listener = Listener(flood, gone=event == "client_gone")
    listener.revoked = {b""} if event == "dropped" else set()
    state = ServiceState(QueueLimits(requests=1) if event == "queue_full" else QueueLimits())
    loop = make_loop(_failing if event == "failed" else lambda request: RESULT, state)
    with caplog.at_level(logging.WARNING), limited(logging.getLogger("gpu_service")):
        if event == "queue_full":
            while listener.incoming:
                loop._pick_up(listener, listener.receive())
        else:
            for incoming in flood:
                loop._answer(listener, incoming)
    lines, _ = LIMITS[event]
    assert [record.getMessage() for record in caplog.records] == [event] * lines
    assert len(listener.sent) == {"queue_full": 69, "dropped": 0}.get(event, 70)


def test_a_large_message_that_does_not_fit_is_not_decoded_to_be_refused() -> None:
    large = Incoming((b"a", b""), [memoryview(bytes(100_000))], time.perf_counter_ns())
    listener = Listener([*_from("b", 1), large])
    run_loop(listener, lambda request: RESULT, ServiceState(QueueLimits(bytes=99_999)))
    assert listener.sent[1] == {"status": "error", "error": "QUEUE_FULL"}


def test_a_large_message_is_decoded_once_and_not_to_see_whether_it_asks_for_health(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    opened: list[int] = []

    def noting(frames: Sequence[Buffer], limit: int) -> OpenedRequest:
        opened.append(memoryview(frames[0]).nbytes)
        return open_request(frames, limit)

    monkeypatch.setattr(encoding, "open_request", noting)
    body = msgpack.packb({"method": "Canary", "request": {"a": bytes(100_000)}})
    large = Incoming((b"a", b""), [memoryview(body)], time.perf_counter_ns())
    listener = Listener([*_from("b", 1), large])
    run_loop(listener, lambda request: RESULT)
    assert listener.sent[1] == {"status": "error", "error": "UNKNOWN_METHOD"}
    assert opened.count(len(body)) == 1


def test_nonsense_that_does_not_fit_is_called_nonsense() -> None:
    nonsense = Incoming((b"a", b""), [memoryview(b"\xc1" * 5000)], time.perf_counter_ns())
    listener = Listener([*_from("b", 1), nonsense])
    run_loop(listener, lambda request: RESULT, ServiceState(QueueLimits(bytes=4999)))
    assert listener.sent[1] == {"status": "error", "error": "MALFORMED_MESSAGE"}


@pytest.mark.parametrize("product_ns", [MS // 10, 20 * MS])
def test_who_refuses_a_flood_goes_on_with_the_work_and_gets_through_the_flood(
    monkeypatch: pytest.MonkeyPatch, product_ns: int
) -> None:
    """A key with a thousand connections has as many turns in the transport, before another's."""
    clock, refusal_ns = Clock(monkeypatch), 20_000
    flood = [one._replace(key=b"flood") for n in range(1, 1001) for one in _from(f"c{n}", n)]
    modest = [one._replace(key=b"modest") for one in _from("m", 1001)]
    listener = Listener([*flood, *modest])
    events: list[tuple[int, str]] = []
    send = listener.send

    def noting(route: Sequence[bytes], frames: Sequence[Buffer]) -> bool:
        sent = send(route, frames)
        reply = listener.sent[-1]
        clock.now += refusal_ns if "error" in reply else 0
        events.append((reply["request_id"], reply.get("error", "OK")))
        return sent

    def answer(request: Request) -> Result:
        clock.now += product_ns
        return RESULT

    listener.send = noting  # type: ignore[method-assign]
    run_loop(listener, answer, ServiceState(QueueLimits(requests=3)))
    assert len(events) == 1001
    runs = "".join("." if code == "OK" else "x" for _, code in events).split(".")
    refusing_ns = max(REFUSING_NS, product_ns // REFUSING_PART)
    assert max(map(len, runs)) == refusing_ns // refusal_ns
    # All that are ahead of it are refused first, but not four at a time.
    products = [n for n, code in events if code == "OK"]
    assert products.index(1001) <= 1000 * refusal_ns // refusing_ns + 2


def test_a_few_are_refused_between_two_requests_however_long_it_takes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Clock(monkeypatch)
    listener = Listener(_from("flood", *range(1, 101)))
    send = listener.send
    codes = ""

    def slowly(route: Sequence[bytes], frames: Sequence[Buffer]) -> bool:
        nonlocal codes
        sent = send(route, frames)
        clock.now += 10 * MS
        codes += "x" if "error" in listener.sent[-1] else "."
        return sent

    listener.send = slowly  # type: ignore[method-assign]
    run_loop(listener, lambda request: RESULT, ServiceState(QueueLimits(requests=3)))
    assert max(map(len, codes.split("."))) == MAX_REFUSED_AT_ONCE


def test_a_flood_of_those_who_ask_how_we_are_does_not_keep_us_from_the_work(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Clock(monkeypatch)
    asking = [incoming_request(n, client=b"f", request=HealthRequest()) for n in range(1, 101)]
    listener = Listener([*_from("modest", 1, 2, 3, 4), *asking])
    send = listener.send
    methods = ""

    def slowly(route: Sequence[bytes], frames: Sequence[Buffer]) -> bool:
        nonlocal methods
        sent = send(route, frames)
        clock.now += 10 * MS
        methods += listener.sent[-1]["method"][0]
        return sent

    listener.send = slowly  # type: ignore[method-assign]
    run_loop(listener, lambda request: RESULT)
    runs = methods.split("M")
    assert (len(methods), len(runs)) == (104, 5)
    assert runs[:4] == ["", *["H" * MAX_REFUSED_AT_ONCE] * 3]


def test_what_was_taken_from_a_key_that_is_revoked_is_not_answered(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Whether it waits, or an accelerator works on it; and it is not computed in vain."""
    clock = Clock(monkeypatch)
    listener = Timed(clock, *[0] * 7)
    keys = iter([b"revoked", b"other"] * 4)
    received = listener.receive

    def receive() -> Incoming | None:
        incoming = received()
        return incoming and incoming._replace(key=next(keys))

    listener.receive = receive  # type: ignore[method-assign]
    accelerator, computed = Accelerator(clock, 10 * MS), []

    def answer(request: Request) -> Result:
        computed.append(request)
        if len(computed) == 2:
            listener.revoked.add(b"revoked")
        return accelerator(request)

    state = ServiceState()
    with caplog.at_level(logging.WARNING):
        run_loop(listener, answer, state)
    assert errors_of(listener) == [(2, None), (4, None), (6, None)]
    assert len(computed) == 4
    assert state.counters.dropped_replies == 4
    assert caplog.messages == ["dropped"] * 4
    details = {record.__dict__["fields"]["detail"] for record in caplog.records}
    assert details == {"the key has been revoked"}


@pytest.mark.parametrize("inline", [False, True])
def test_health_is_answered_ahead_of_what_waits(
    monkeypatch: pytest.MonkeyPatch, inline: bool
) -> None:
    clock = Clock(monkeypatch)
    listener = Timed(clock, 0, 0, 0, 0)
    received = listener.receive
    asked = False

    def receive() -> Incoming | None:
        nonlocal asked
        incoming = received()
        if incoming is None and not asked:
            asked = True
            return _inline("Health") if inline else incoming_request(9, request=HealthRequest())
        return incoming

    listener.receive = receive  # type: ignore[method-assign]
    state = ServiceState()
    run_loop(listener, Accelerator(clock, 10 * MS), state)
    reply = listener.sent[0]
    assert reply["status"] == "success"
    assert listener.sent_ns == [0, 10 * MS, 20 * MS, 30 * MS, 40 * MS]
    health = reply["response"]
    assert health.keys() == {"status", "uptime_s", "queued_requests", "queued_bytes"}
    assert health["status"] == "ready"
    size = sum(frame.nbytes for frame in incoming_request(1).frames)
    assert (health["queued_requests"], health["queued_bytes"]) == (3, 3 * size)
    assert health["uptime_s"] >= 0
    if not inline:
        assert (reply["request_id"], reply["method"]) == (9, "Health")


def test_only_health_is_answered_ahead() -> None:
    named_like_it = Incoming(
        (b"a", b""),
        [memoryview(msgpack.packb({"method": "Init", "request": {"Health": 1}}))],
        time.perf_counter_ns(),
    )
    listener = Listener(
        [
            *_from("a", 1, 2),
            incoming_request(3, client=b"a", request=InitRequest()),
            named_like_it,
            Incoming((b"a", b""), [memoryview(b"Health")], time.perf_counter_ns()),
            *_from("a", 6),
        ]
    )
    answered: list[str] = []

    def answer(request: Request) -> Result:
        answered.append(request.method)
        return RESULT

    run_loop(listener, answer)
    assert answered == ["Matmul", "Matmul", "Init", "Matmul"]
    assert [reply.get("error") for reply in listener.sent] == [
        None,
        None,
        None,
        "INVALID_FIELD",
        "MALFORMED_MESSAGE",
        None,
    ]


def test_health_that_asks_for_more_is_refused() -> None:
    request = msgpack.packb({"method": "Health", "request": {"verbose": True}})
    listener = Listener(
        [*_from("a", 1), Incoming((b"a", b""), [memoryview(request)], time.perf_counter_ns())]
    )
    run_loop(listener, lambda request: RESULT)
    assert listener.sent[1] == {"status": "error", "error": "INVALID_FIELD"}


def test_everything_is_counted() -> None:
    good = incoming_request(1, age_s=2.0)
    listener = Listener(
        [
            good,
            incoming_request(2, timeout_ms=1, age_s=1.0),
            _inline("Init"),
            _inline("Canary"),
            Incoming((b"a", b""), [memoryview(b"\xc1")], time.perf_counter_ns()),
            incoming_request(3, request=HealthRequest()),
        ]
    )
    received = sum(frame.nbytes for one in listener.incoming for frame in one.frames)
    sizes: list[int] = []
    send = listener.send

    def noting(route: object, frames: list[bytes | memoryview]) -> bool:
        sizes.append(sum(f.nbytes if isinstance(f, memoryview) else len(f) for f in frames))
        return send(route, frames)  # type: ignore[arg-type]

    listener.send = noting  # type: ignore[method-assign, assignment]
    state = ServiceState()
    run_loop(listener, lambda request: RESULT, state)
    counters = state.counters
    found = {
        (method, code): count
        for method, counted in counters.methods.items()
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
    assert counters.received_bytes == received
    assert counters.sent_bytes == sum(sizes)
    matmul = counters.methods["Matmul"]
    assert (sum(matmul.queue.buckets), sum(matmul.compute.buckets)) == (1, 1)
    assert matmul.queue.sum_ns >= 2e9
    assert matmul.compute.sum_ns > 0
    assert sum(counters.methods["unknown"].compute.buckets) == 0


def test_a_reply_that_nobody_takes_is_counted_as_lost() -> None:
    state = ServiceState()
    run_loop(Listener(_from("a", 1), gone=True), lambda request: RESULT, state)
    assert (state.counters.dropped_replies, state.counters.sent_bytes) == (1, 0)


def test_a_failure_is_counted_as_one() -> None:
    def failing(request: Request) -> Result:
        raise RuntimeError("canary")

    state = ServiceState()
    run_loop(Listener(_from("a", 1)), failing, state)
    outcomes = state.counters.methods["Matmul"].outcomes
    assert {code for code, count in outcomes.items() if count} == {"INTERNAL"}
