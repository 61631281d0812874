"""Prometheus metrics over HTTP, from a thread of their own, read from plain numbers when asked for.

The request loop pays for counting only. What is served: numbers by method and error code, and the
device's name; nothing that a client can choose, no contents and no request ids.
"""

import re
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import accumulate

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)

from gpu_side.handler import BOUNDS_NS, SUCCESS, UNKNOWN_METHOD, ServiceState
from gpu_side.transport.listener import cannot_bind
from protocol.errors import SettingsError, describe

_ADDRESS = re.compile(r"(?:(?P<host>\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9_.-]*):)?(?P<port>\d{1,5}|\*)")
_BOUNDS = (*(f"{ns / 1e9:g}" for ns in BOUNDS_NS), "+Inf")


def parse_address(text: str) -> tuple[str, int]:
    """Read `[HOST:]PORT`: loopback where no host is named, port 0 for `*`. Raises SettingsError."""
    found = _ADDRESS.fullmatch(text)
    port = 0 if found is None or found["port"] == "*" else int(found["port"])
    if found is None or port > 65535:
        raise SettingsError("metrics address", got=describe(text), expected="[HOST:]PORT")
    return (found["host"] or "127.0.0.1").strip("[]"), port


class StateCollector:
    """Turns a service's state into metrics at the moment they are asked for."""

    def __init__(self, state: ServiceState) -> None:
        self._state = state

    def collect(self) -> Iterable[Metric]:
        """Return all metrics."""
        state = self._state
        requests = CounterMetricFamily(
            "tsqp_requests", "Requests answered, by outcome.", labels=("method", "code")
        )
        compute = HistogramMetricFamily(
            "tsqp_compute_seconds", "From starting on a request to its result.", labels=("method",)
        )
        waited = HistogramMetricFamily(
            "tsqp_queue_seconds",
            "From picking a request up to starting on it.",
            labels=("method",),
        )
        # All there is of every method; of those never called, only that.
        for method, counted in state.methods.items():
            for code, total in counted.outcomes.items():
                if total or (code == SUCCESS and method != UNKNOWN_METHOD):
                    requests.add_metric((method, code), total)
            if counted.outcomes[SUCCESS]:
                for family, histogram in ((compute, counted.compute), (waited, counted.queue)):
                    buckets = list(zip(_BOUNDS, accumulate(histogram.buckets), strict=True))
                    family.add_metric((method,), buckets, histogram.sum_ns / 1e9)
        yield from (requests, compute, waited)
        for name, text, total in (
            ("tsqp_received_bytes", "Bytes of requests.", state.received_bytes),
            ("tsqp_sent_bytes", "Bytes of replies.", state.sent_bytes),
            ("tsqp_dropped_replies", "Replies not delivered.", state.dropped_replies),
            ("tsqp_refused_clients", "Clients turned away or cut off.", state.clients_refused()),
        ):
            yield CounterMetricFamily(name, text, total)
        queue, sessions = state.queue, state.sessions()
        for name, text, value in (
            ("tsqp_queued_requests", "Requests that wait.", queue.requests),
            ("tsqp_queued_bytes", "Bytes of requests that wait.", queue.bytes),
            ("tsqp_queued_requests_limit", "Of all clients.", queue.limits.total_requests),
            ("tsqp_queued_bytes_limit", "Of all clients.", queue.limits.total_bytes),
            ("tsqp_underway_requests", "Given to an accelerator and not done.", state.underway),
            ("tsqp_sessions", "KV caches of Segments that are kept.", sessions.sessions),
            ("tsqp_session_bytes", "Their memory.", sessions.bytes),
            ("tsqp_spilled_sessions", "KV caches of Segments on disk.", sessions.spilled),
            ("tsqp_spilled_session_bytes", "Their files.", sessions.spilled_bytes),
            ("tsqp_ready", "1 while new requests are taken.", state.status == "ready"),
            ("tsqp_uptime_seconds", "Since the start.", time.monotonic() - state.started),
        ):
            yield GaugeMetricFamily(name, text, float(value))
        yield InfoMetricFamily("tsqp_device", "What computes.", {"device": state.device})


@contextmanager
def serving_metrics(address: str, state: ServiceState) -> Iterator[str]:
    """Serve a state's metrics; yield their URL. `address`: as `parse_address` reads it.

    Raises EndpointError where it cannot be bound, and SettingsError.
    """
    host, port = parse_address(address)
    registry = CollectorRegistry()
    registry.register(StateCollector(state))
    try:
        server, thread = start_http_server(port, host, registry)
    except OSError as error:
        raise cannot_bind(f"metrics at {address}", error.errno) from None
    try:
        yield f"http://{f'[{host}]' if ':' in host else host}:{server.server_port}/metrics"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
