"""What is counted, what a scrape says of it, and where it is served."""

from __future__ import annotations

import socket
import urllib.request
from collections.abc import Iterator

import pytest
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from gpu_side.counters import BOUNDS_NS, OUTCOMES, UNKNOWN_METHOD, Counters, Histogram
from gpu_side.metrics import MetricsServer, parse_address
from gpu_side.queues import QueueLimits
from gpu_side.state import ServiceState
from gpu_side.transport.listener import Incoming
from protocol.errors import EndpointError, ErrorCode, SettingsError
from protocol.messages import REQUEST_TYPES
from tests.kit.rows import each_row


@pytest.fixture
def state() -> ServiceState:
    return ServiceState(QueueLimits(), device="model:h100", clients_refused=lambda: 3)


@pytest.fixture
def server(state: ServiceState) -> Iterator[MetricsServer]:
    with MetricsServer("127.0.0.1:*", state) as made:
        yield made


def _scrape(server: MetricsServer) -> dict[str, Metric]:
    with urllib.request.urlopen(server.url, timeout=30) as answer:
        text = answer.read().decode()
    assert "canary" not in text
    return {family.name: family for family in text_string_to_metric_families(text)}


def _values(family: Metric, *labels: str) -> dict[tuple[str, ...], float]:
    return {
        (one.name, *(one.labels[name] for name in labels if name in one.labels)): one.value
        for one in family.samples
    }


def test_a_bound_belongs_to_its_bucket() -> None:
    assert tuple(sorted(BOUNDS_NS)) == BOUNDS_NS
    assert (BOUNDS_NS[0], BOUNDS_NS[-1]) == (20_000, 100 * 10**9)
    for ns, bucket in ((0, 0), (20_000, 0), (20_001, 1), (10**11, 20), (10**11 + 1, 21)):
        histogram = Histogram()
        histogram.add(ns)
        assert histogram.cumulative() == [0] * bucket + [1] * (22 - bucket), ns
        assert histogram.sum_ns == ns


def test_what_is_no_method_of_ours_is_counted_together() -> None:
    counters = Counters()
    assert set(counters.methods) == {*REQUEST_TYPES, UNKNOWN_METHOD}
    assert set(OUTCOMES) == {"OK", *(code.value for code in ErrorCode)}
    assert counters.unknown is counters.methods[UNKNOWN_METHOD]


def test_what_was_counted_is_what_is_served(server: MetricsServer, state: ServiceState) -> None:
    fresh = _scrape(server)
    assert set(_values(fresh["tsqp_requests"], "method", "code").values()) == {0.0}
    assert fresh["tsqp_device_info"].samples[0].labels == {"device": "model:h100"}
    counters = state.counters
    linear = counters.methods["Linear"]
    for ns in (20_000, 30_000, 10**12):
        linear.outcomes["OK"] += 1
        linear.compute.add(ns)
        linear.queue.add(0)
    counters.unknown.outcomes["UNKNOWN_METHOD"] += 2
    counters.received_bytes, counters.sent_bytes, counters.dropped_replies = 11, 12, 13
    state.queue.put(Incoming((b"canary",), [memoryview(b"canary")], 0))
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
    state.underway = 2
    for state.status, ready in (("loading", 0), ("ready", 1), ("draining", 0)):
        found = _scrape(server)
        plain = {name: found[name].samples[0].value for name in (*expected, "tsqp_ready")}
        assert plain == expected | {"tsqp_ready": ready}, state.status
    assert 0 < found["tsqp_uptime_seconds"].samples[0].value <= state.uptime_s
    requests = _values(found["tsqp_requests"], "method", "code")
    assert {key[1:]: value for key, value in requests.items() if value} == {
        ("Linear", "OK"): 3,
        ("unknown", "UNKNOWN_METHOD"): 2,
    }
    name = "tsqp_compute_seconds"
    compute = _values(found[name], "method", "le")
    buckets = {float(key[2]): value for key, value in compute.items() if key[0] == f"{name}_bucket"}
    assert sorted(buckets) == [*(ns / 1e9 for ns in BOUNDS_NS), float("inf")]
    assert (buckets[2e-05], buckets[5e-05], buckets[100.0], buckets[float("inf")]) == (1, 2, 2, 3)
    assert compute[f"{name}_count", "Linear"] == 3
    assert compute[f"{name}_sum", "Linear"] == pytest.approx(1000.00005)
    queue = _values(found["tsqp_queue_seconds"], "method", "le")
    assert queue["tsqp_queue_seconds_bucket", "Linear", "2e-05"] == 3


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


def test_an_address_that_cannot_be_bound_is_refused(state: ServiceState) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(EndpointError, match=f"{address}: got Address already in use"):
            MetricsServer(address, state)
    # It is free again afterwards, as that of one that was closed is.
    for _ in range(2):
        with MetricsServer(address, state) as server:
            assert server.url == f"http://{address}/metrics"
