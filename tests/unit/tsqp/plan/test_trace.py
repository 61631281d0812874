"""What is noted of a round trip, and where a layer begins."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from protocol.channel import Exchange, Traffic
from protocol.messages import Timing
from tsqp.plan import trace
from tsqp.plan.trace import Marked, Received, Submitted, Tracer


class Channel:
    """Answers at once, and claims a time."""

    endpoint = "nowhere"

    def __init__(self, timing: Timing | None) -> None:
        self.traffic = Traffic()
        self._timing = timing

    def submit(self, request: Any, timeout_s: float | None = None) -> int:
        return 5

    def wait(self, request_id: int) -> Exchange:
        reply: Any = None
        return Exchange(reply, 111, 222, 1, 40_000, 3, self._timing, 1_500, self.endpoint)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each look at the clock is a microsecond after the one before."""
    times = iter(range(1_000, 10**6, 1_000))
    monkeypatch.setattr(trace, "time", SimpleNamespace(perf_counter_ns=lambda: next(times)))


def tracer() -> Tracer:
    planner: Any = SimpleNamespace(plan=lambda request: f"plan of {request}")
    return Tracer(planner)


@pytest.mark.parametrize(
    ("timing", "service_ns"), [(Timing(queue_us=3, compute_us=20), 23_000), (None, 0)]
)
def test_a_round_trip_is_noted_with_the_services_whole_claim(
    clock: None, timing: Timing | None, service_ns: int
) -> None:
    kept, inner = tracer(), Channel(timing)
    channel: Any = trace._NotedChannel(inner, kept, 2, 1)  # type: ignore[arg-type]
    found = kept.step(lambda: channel.call("request"))
    assert (found.start_ns, found.end_ns) == (1_000, 7_000)
    assert found.events == [
        Submitted(2, 1, 5, 2_000, 3_000, 4_000, "plan of request"),  # type: ignore[arg-type]
        Received(2, 1, 5, 5_000, 6_000, 1_500, 40_000, service_ns, 111, 222),
    ]
    assert kept.step(lambda: None).events == []
    assert channel.traffic is inner.traffic


def test_a_layer_begins_with_its_first_norm(clock: None) -> None:
    kept = tracer()
    light = trace._MarkingLight(1e-5, kept, 3)
    h_TD, weight_D = torch.ones(1, 4), torch.ones(4)

    def norms() -> None:
        for layer in (0, 0, 1, 1, None):
            light.rms_norm(layer, h_TD, weight_D)

    events = kept.step(norms).events
    assert all(isinstance(event, Marked) and event.lane == 3 for event in events)
    assert [event.layer for event in events if isinstance(event, Marked)] == [0, 1, None]
