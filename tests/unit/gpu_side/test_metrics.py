"""What a scrape says, and where it is served."""

from __future__ import annotations

import socket
import urllib.request
from collections.abc import Iterator

import pytest
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from gpu_side.counters import BOUNDS_NS
from gpu_side.metrics import MetricsServer, parse_address
from gpu_side.queues import QueueLimits
from gpu_side.state import ServiceState
from gpu_side.transport.listener import Incoming
from protocol.errors import EndpointError, SettingsError
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
        assert answer.headers["Content-Type"].startswith("text/plain")
        text = answer.read().decode()
    return {family.name: family for family in text_string_to_metric_families(text)}


def _values(family: Metric, *labels: str) -> dict[tuple[str, ...], float]:
    return {
        (sample.name, *(sample.labels[label] for label in labels if label in sample.labels)): (
            sample.value
        )
        for sample in family.samples
    }


def test_a_fresh_service(server: MetricsServer, state: ServiceState) -> None:
    found = _scrape(server)
    assert {name: family.type for name, family in found.items()} == {
        "tsqp_requests": "counter",
        "tsqp_compute_seconds": "histogram",
        "tsqp_queue_seconds": "histogram",
        "tsqp_received_bytes": "counter",
        "tsqp_sent_bytes": "counter",
        "tsqp_dropped_replies": "counter",
        "tsqp_refused_clients": "counter",
        "tsqp_queued_requests": "gauge",
        "tsqp_queued_bytes": "gauge",
        "tsqp_queued_requests_limit": "gauge",
        "tsqp_queued_bytes_limit": "gauge",
        "tsqp_underway_requests": "gauge",
        "tsqp_sessions": "gauge",
        "tsqp_session_bytes": "gauge",
        "tsqp_spilled_sessions": "gauge",
        "tsqp_spilled_session_bytes": "gauge",
        "tsqp_ready": "gauge",
        "tsqp_uptime_seconds": "gauge",
        "tsqp_device_info": "gauge",
    }
    assert set(_values(found["tsqp_requests"], "method", "code").values()) == {0.0}
    assert found["tsqp_device_info"].samples[0].labels == {"device": "model:h100"}
    assert found["tsqp_refused_clients"].samples[0].value == 3
    assert found["tsqp_ready"].samples[0].value == 0
    assert found["tsqp_queued_requests_limit"].samples[0].value == 1024
    assert 0 < found["tsqp_uptime_seconds"].samples[0].value <= state.uptime_s


def test_what_was_counted_is_what_is_served(server: MetricsServer, state: ServiceState) -> None:
    counters = state.counters
    linear = counters.methods["Linear"]
    for ns in (20_000, 30_000, 10**12):
        linear.outcomes["OK"] += 1
        linear.compute.add(ns)
        linear.queue.add(0)
    counters.unknown.outcomes["UNKNOWN_METHOD"] += 2
    counters.received_bytes, counters.sent_bytes, counters.dropped_replies = 11, 12, 13
    state.queue.put(Incoming((b"canary",), [memoryview(b"canary")], 0))
    state.underway, state.status = 2, "ready"
    found = _scrape(server)
    requests = _values(found["tsqp_requests"], "method", "code")
    assert {key[1:]: value for key, value in requests.items() if value} == {
        ("Linear", "OK"): 3,
        ("unknown", "UNKNOWN_METHOD"): 2,
    }
    compute = _values(found["tsqp_compute_seconds"], "method", "le")
    name = "tsqp_compute_seconds"
    buckets = {float(key[2]): value for key, value in compute.items() if key[0] == f"{name}_bucket"}
    assert sorted(buckets) == [*(ns / 1e9 for ns in BOUNDS_NS), float("inf")]
    assert (buckets[2e-05], buckets[5e-05], buckets[100.0], buckets[float("inf")]) == (1, 2, 2, 3)
    assert compute[f"{name}_count", "Linear"] == 3
    assert compute[f"{name}_sum", "Linear"] == pytest.approx(1000.00005)
    queue = _values(found["tsqp_queue_seconds"], "method", "le")
    assert queue["tsqp_queue_seconds_bucket", "Linear", "2e-05"] == 3
    for metric, value in {
        "tsqp_received_bytes": 11,
        "tsqp_sent_bytes": 12,
        "tsqp_dropped_replies": 13,
        "tsqp_queued_requests": 1,
        "tsqp_queued_bytes": 6,
        "tsqp_underway_requests": 2,
        "tsqp_ready": 1,
    }.items():
        assert [sample.value for sample in found[metric].samples] == [value], metric
    state.status = "draining"
    assert _scrape(server)["tsqp_ready"].samples[0].value == 0
    with urllib.request.urlopen(server.url, timeout=30) as answer:
        assert b"canary" not in answer.read()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("9464", ("127.0.0.1", 9464)),
        (":9464", ("127.0.0.1", 9464)),
        ("*", ("127.0.0.1", 0)),
        ("0.0.0.0:1", ("0.0.0.0", 1)),
        ("gpu-host.example:65535", ("gpu-host.example", 65535)),
        ("[::1]:9464", ("::1", 9464)),
    ],
)
def test_an_address(text: str, expected: tuple[str, int]) -> None:
    assert parse_address(text) == expected


@each_row(
    "text", ["", "host", "host:", "host:65536", "host:-1", "::1:9464", "http://host:1", "a b:1"]
)
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(SettingsError, match=r"metrics address: got .*, expected \[HOST:\]PORT"):
        parse_address(text)


def test_a_taken_port_is_refused(state: ServiceState) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(EndpointError, match=f"{address}: got Address already in use"):
            MetricsServer(address, state)


def test_a_port_is_free_again_afterwards(state: ServiceState) -> None:
    with MetricsServer("*", state) as first:
        address = first.url.split("/")[2]
        with pytest.raises(EndpointError):
            MetricsServer(address, state)
    with MetricsServer(address, state) as second:
        assert second.url == first.url


def test_an_address_of_another_machine_is_refused(state: ServiceState) -> None:
    with pytest.raises(EndpointError, match="got Cannot assign requested address"):
        MetricsServer("192.0.2.1:9464", state)
