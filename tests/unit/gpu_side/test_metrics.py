"""What is counted, what a scrape says of it and where, and how many lines the log gets."""

from __future__ import annotations

import logging
import urllib.request

import pytest
from prometheus_client.parser import text_string_to_metric_families

from gpu_side.log_limit import MAX_REASONS, REASONS, LineFilter, limited
from gpu_side.metrics import MetricsServer, parse_address
from gpu_side.queues import QueueLimits
from gpu_side.state import ServiceState
from gpu_side.transport.listener import Incoming
from protocol.errors import SettingsError
from tests.kit.rows import each_row

log = logging.getLogger("gpu_service")


def test_what_was_counted_is_what_is_served() -> None:
    state = ServiceState(QueueLimits(), device="model:h100", clients_refused=lambda: 3)
    counters = state.counters
    linear = counters.methods["Linear"]
    for ns in (20_000, 30_000, 10**12):
        linear.outcomes["OK"] += 1
        linear.compute.add(ns)
        linear.queue.add(0)
    counters.unknown.outcomes["UNKNOWN_METHOD"] += 2
    counters.received_bytes, counters.sent_bytes, counters.dropped_replies = 11, 12, 13
    state.queue.put(Incoming((b"canary",), [memoryview(b"canary")], 0))
    state.underway = 2
    expected = {
        "tsqp_refused_clients": 3,
        "tsqp_received_bytes": 11,
        "tsqp_sent_bytes": 12,
        "tsqp_dropped_replies": 13,
        "tsqp_queued_requests": 1,
        "tsqp_queued_bytes": 6,
        "tsqp_queued_requests_limit": 1024,
        "tsqp_queued_bytes_limit": QueueLimits().total_bytes,
        "tsqp_underway_requests": 2,
        "tsqp_sessions": 0,
        "tsqp_session_bytes": 0,
        "tsqp_spilled_sessions": 0,
        "tsqp_spilled_session_bytes": 0,
    }
    with MetricsServer("127.0.0.1:*", state) as server:
        for state.status, ready in (("loading", 0), ("ready", 1), ("draining", 0)):
            with urllib.request.urlopen(server.url, timeout=30) as answer:
                text = answer.read().decode()
            assert "canary" not in text
            found = {family.name: family for family in text_string_to_metric_families(text)}
            plain = {name: found[name].samples[0].value for name in (*expected, "tsqp_ready")}
            assert plain == expected | {"tsqp_ready": ready}, state.status
    assert found["tsqp_device_info"].samples[0].labels == {"device": "model:h100"}
    samples = found["tsqp_requests"].samples
    requests = {(one.labels["method"], one.labels["code"]): one.value for one in samples}
    assert {labels: value for labels, value in requests.items() if value} == {
        ("Linear", "OK"): 3,
        ("unknown", "UNKNOWN_METHOD"): 2,
    }
    compute, queue = (
        {sample.labels.get("le", sample.name[-5:]): sample.value for sample in found[name].samples}
        for name in ("tsqp_compute_seconds", "tsqp_queue_seconds")
    )
    assert [compute[le] for le in ("2e-05", "5e-05", "100", "+Inf", "count")] == [1, 2, 2, 3, 3]
    assert queue["2e-05"] == 3


@each_row(
    ("text", "expected"),
    [
        ("9464", ("127.0.0.1", 9464)),
        (":9464", ("127.0.0.1", 9464)),
        ("*", ("127.0.0.1", 0)),
        ("0.0.0.0:1", ("0.0.0.0", 1)),
        ("gpu-host.example:65535", ("gpu-host.example", 65535)),
        ("[::1]:9464", ("::1", 9464)),
        *((text, None) for text in ("", "host", "host:", "host:65536", "host:-1", "::1:9464")),
        *((text, None) for text in ("http://host:1", "a b:1")),
    ],
)
def test_an_address(text: str, expected: tuple[str, int] | None) -> None:
    if expected is not None:
        assert parse_address(text) == expected
        return
    with pytest.raises(SettingsError, match=r"metrics address: got .*, expected \[HOST:\]PORT"):
        parse_address(text)


def test_each_event_and_reason_is_limited_for_itself(caplog: pytest.LogCaptureFixture) -> None:
    now = 100.0
    lines = LineFilter({"refused": (2, 10.0)}, lambda: now)

    def written(event: str, **fields: object) -> bool:
        caplog.clear()
        log.warning(event, extra={"fields": fields})
        return bool(caplog.records)

    log.addFilter(lines)
    try:
        for field in REASONS:
            flood = [written("refused", **{field: "a"}, number=n) for n in range(5)]
            assert flood == [True, True, False, False, False], field
            assert written("refused", **{field: "b"}), field
        assert all(written("other") for _ in range(5))
        now = 110.0
        assert written("refused", reason="a", number=5)
        (record,) = caplog.records
        assert vars(record)["fields"] == {"reason": "a", "number": 5, "left_out": 3}
        # Reasons that are kept apart are bounded.
        count = MAX_REASONS + 50
        assert sum(written("refused", reason=str(number)) for number in range(count)) < count
        assert len(lines._lines) <= MAX_REASONS + 1
    finally:
        log.removeFilter(lines)
    # So are failures of two kinds.
    caplog.clear()
    with limited(log):
        for error in [ValueError] * 60 + [KeyError]:
            try:
                raise error
            except (LookupError, ValueError):
                log.exception("failed")
    failures = [record.exc_info[0] for record in caplog.records if record.exc_info]
    assert failures == [ValueError] * 50 + [KeyError]
