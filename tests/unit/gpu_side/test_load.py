"""A loop with more clients and requests than it can serve, and those who ask how it is."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

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
    incoming_bytes,
    incoming_request,
    make_loop,
    run_loop,
)
from tests.kit.rows import each_row

HEALTH, INIT = ({"method": method, "request": {}} for method in ("Health", "Init"))


def _from(client: str, *numbers: int, key: bytes = b"") -> list[Incoming]:
    return [incoming_request(number, client=client, key=key) for number in numbers]


def test_clients_are_served_in_turn_and_a_key_has_one_whatever_its_connections() -> None:
    # The first was answered before the loop looked what else has come.
    turns = [1, 101, 2, 102, 3, 4]
    flood = [one for n in range(1, 5) for one in _from(f"c{n}", n, key=b"flood")]
    for messages in (
        [*_from("flood", 1, 2, 3, 4), *_from("modest", 101, 102)],
        [*flood, *_from("modest", 101, 102, key=b"modest")],
    ):
        listener = Listener(messages)
        run_loop(listener)
        assert listener.outcomes == [(number, None) for number in turns]


def test_what_does_not_fit_is_refused_by_its_id_and_the_log_names_the_limit(
    caplog: pytest.LogCaptureFixture,
) -> None:
    inits = [incoming_bytes(INIT, client) for client in "ab"]
    listener = Listener([*_from("a", 1, 2, 3, 4, 5), *_from("b", 11), *inits])
    state = ServiceState(QueueLimits(requests=2))
    run_loop(listener, state=state)
    full = [reply for reply in listener.sent if reply.get("error") == "QUEUE_FULL"]
    code = {"status": "error", "error": "QUEUE_FULL"}
    framed = [{"version": 1, "request_id": n, "method": "Matmul"} | code for n in (4, 5)]
    assert full == [*framed, code]
    assert len(listener.sent) == 8
    record, *_ = caplog.records
    assert record.getMessage() == "queue_full"
    assert vars(record)["fields"] == {
        "peer": b"a".hex(),
        "request_id": 4,
        "code": "QUEUE_FULL",
        "limit": "max_queued_requests",
        "allowed": 2,
        "requested": 1,
        "available": 0,
    }
    refused = {name: counted.outcomes["QUEUE_FULL"] for name, counted in _methods(state)}
    assert {name: count for name, count in refused.items() if count} == {"Matmul": 2, "Init": 1}


def _methods(state: ServiceState) -> Any:
    return state.counters.methods.items()


def _failing(request: Request) -> Result:
    raise RuntimeError("canary")


@each_row("event", ["refused", "client_gone", "failed", "queue_full", "dropped"])
def test_what_others_can_have_logged_is_logged_by_a_name_that_is_limited(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, event: str
) -> None:
    caplog.clear()
    lines, _ = LIMITS[event]
    monkeypatch.setitem(LIMITS, event, (lines, 3600.0))  # on a machine that pauses, too
    flood = _from("a", *range(1, 71))
    if event == "refused":
        flood = [incoming_bytes({"method": "Canary", "request": {}})] * 70
    listener = Listener(flood, gone=event == "client_gone")
    listener.revoked = {b""} if event == "dropped" else set()
    state = ServiceState(QueueLimits(requests=1) if event == "queue_full" else QueueLimits())
    loop = make_loop(_failing if event == "failed" else lambda request: RESULT, state)
    with limited(logging.getLogger("gpu_service")):
        if event == "queue_full":
            while listener.incoming:
                loop._pick_up(listener, listener.receive())
        else:
            for incoming in flood:
                loop._answer(listener, incoming)
    assert caplog.messages == [event] * lines
    assert len(listener.sent) == {"queue_full": 69, "dropped": 0}.get(event, 70)
    assert state.counters.dropped_replies == 70 * (event in ("client_gone", "dropped"))
    assert state.counters.sent_bytes == (0 if event == "client_gone" else listener.sent_bytes)


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
    monkeypatch: pytest.MonkeyPatch,
    body: bytes | dict[str, object],
    most_bytes: int,
    error: str,
    decoded: int,
) -> None:
    opened: list[int] = []

    def noting(frames: Sequence[Buffer], limit: int) -> OpenedRequest:
        opened.append(len(frames[0]))
        return open_request(frames, limit)

    monkeypatch.setattr(encoding, "open_request", noting)
    large = incoming_bytes(body, "a")
    listener = Listener([*_from("b", 1), large])
    run_loop(listener, state=ServiceState(QueueLimits(bytes=most_bytes)))
    assert listener.sent[1] == {"status": "error", "error": error}
    assert opened.count(len(large.frames[0])) == decoded


# -------------------------------------------------------------------------------------- floods


@each_row("product_ns", [MS // 10, 20 * MS])
def test_a_flood_is_got_through_while_the_work_goes_on(
    monkeypatch: pytest.MonkeyPatch, product_ns: int
) -> None:
    """A key with a thousand connections has as many turns in the transport, before another's."""
    clock, refusal_ns = Clock(monkeypatch), 20_000
    flood = [one for n in range(1, 1001) for one in _from(f"c{n}", n, key=b"flood")]
    listener = Listener([*flood, *_from("m", 1001, key=b"modest")])

    def sent(reply: dict[str, Any]) -> None:
        clock.now += refusal_ns if "error" in reply else 0

    def answer(request: Request) -> Result:
        clock.now += product_ns
        return RESULT

    listener.on_send = sent
    run_loop(listener, answer, ServiceState(QueueLimits(requests=3)))
    assert len(listener.sent) == 1001
    runs = "".join("x" if error else "." for _, error in listener.outcomes).split(".")
    refusing_ns = max(REFUSING_NS, product_ns // REFUSING_PART)
    assert max(map(len, runs)) == refusing_ns // refusal_ns
    # All that are ahead of it are refused first, but not four at a time.
    products = [number for number, error in listener.outcomes if error is None]
    assert products.index(1001) <= 1000 * refusal_ns // refusing_ns + 2


@each_row("flood", ["requests", "health"])
def test_a_few_are_answered_between_two_requests_however_long_it_takes(
    monkeypatch: pytest.MonkeyPatch, flood: str
) -> None:
    """Of what is refused, and of those who ask how we are."""
    clock = Clock(monkeypatch)
    messages = _from("flood", *range(1, 101))
    if flood == "health":
        asked = [incoming_request(n, client="f", request=HealthRequest()) for n in range(1, 101)]
        messages = [*_from("modest", 1, 2, 3, 4), *asked]
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
    assert len(computed) == 4
    assert state.counters.dropped_replies == 4
    assert caplog.messages == ["dropped"] * 4
    reasons = {vars(record)["fields"]["reason"] for record in caplog.records}
    assert reasons == {"revoked_key"}


# -------------------------------------------------------------------------------------- health


@each_row("asked", [incoming_request(9, request=HealthRequest()), incoming_bytes(HEALTH)], ids="fi")
def test_health_is_answered_ahead_of_what_waits(
    monkeypatch: pytest.MonkeyPatch, asked: Incoming
) -> None:
    clock = Clock(monkeypatch)
    listener = Timed(clock, 0, 0, 0, 0, (0, asked))
    run_loop(listener, Accelerator(clock, 10 * MS))
    reply = listener.sent[0]
    assert (reply["status"], reply.get("request_id", 9)) == ("success", 9)
    assert listener.sent_ns == [0, 10 * MS, 20 * MS, 30 * MS, 40 * MS]
    health = reply["response"]
    assert health.keys() == {"status", "uptime_s", "queued_requests", "queued_bytes"}
    size = sum(frame.nbytes for frame in incoming_request(1).frames)
    found = health["status"], health["queued_requests"], health["queued_bytes"]
    assert found == ("ready", 3, 3 * size)
    assert health["uptime_s"] >= 0


def test_only_health_is_answered_ahead() -> None:
    wrong = [
        incoming_bytes({"method": "Init", "request": {"Health": 1}}, "a"),
        incoming_bytes(b"Health", "a"),
        incoming_bytes({"method": "Health", "request": {"verbose": True}}, "a"),
    ]
    init = incoming_request(3, client="a", request=InitRequest())
    listener = Listener([*_from("a", 1, 2), init, *wrong[:2], *_from("a", 6), wrong[2]])
    answered: list[str] = []
    run_loop(listener, lambda request: answered.append(request.method) or RESULT)  # type: ignore[func-returns-value]
    assert answered == ["Matmul", "Matmul", "Init", "Matmul"]
    # What asks for its own health and more is refused, ahead as well.
    assert listener.outcomes == [
        (1, None),
        (0, "INVALID_FIELD"),
        *[(2, None), (3, None), (0, "INVALID_FIELD"), (0, "MALFORMED_MESSAGE"), (6, None)],
    ]


def test_everything_is_counted() -> None:
    messages = [
        incoming_request(1, age_s=2.0),
        incoming_request(2, timeout_ms=1, age_s=1.0),
        incoming_bytes(INIT),
        incoming_bytes({"method": "Canary", "request": {}}),
        incoming_bytes(b"\xc1", "a"),
        incoming_request(3, request=HealthRequest()),
    ]
    listener, state = Listener(messages), ServiceState()
    run_loop(listener, state=state)
    counters = state.counters
    found = {
        (method, code): count
        for method, counted in _methods(state)
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
    assert (counters.received_bytes, counters.sent_bytes) == (received, listener.sent_bytes)
    matmul = counters.methods["Matmul"]
    assert (sum(matmul.queue.buckets), sum(matmul.compute.buckets)) == (1, 1)
    assert matmul.queue.sum_ns >= 2e9
    assert matmul.compute.sum_ns > 0
    assert sum(counters.unknown.compute.buckets) == 0
