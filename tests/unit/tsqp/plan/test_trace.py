"""What is noted of a round trip, and where a layer begins."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from protocol.channel import Exchange, Traffic
from protocol.messages import Timing
from protocol.model.checkpoint import Checkpoint
from protocol.model.config import read_config
from tee_side.model.layers import load_tee_model
from tests.kit.model import SavedModel
from tsqp.lab.plan import trace
from tsqp.lab.plan.trace import Marked, Received, Submitted, Tracer


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
    checker: Any = SimpleNamespace(check=lambda request: f"plan of {request}")
    return Tracer(checker)


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


def test_a_layer_begins_with_its_first_norm(saved_model: Callable[..., SavedModel]) -> None:
    directory, noted = saved_model("llama").directory, []
    model = load_tee_model(read_config(directory), Checkpoint(directory), torch.float32)
    marking = trace._marking(model, noted.append)
    h_TD = torch.randn(1, 48)
    for layer, plain in zip(marking.layers, model.layers, strict=True):
        assert torch.equal(layer.input_layernorm(h_TD), plain.input_layernorm(h_TD))
        layer.post_attention_layernorm(h_TD)
    assert torch.equal(marking.norm(h_TD), model.norm(h_TD))
    assert noted == [0, 1, 2, None]


def test_what_a_lane_marks_is_an_event_of_it(saved_model: Callable[..., SavedModel]) -> None:
    kept, tee = tracer(), saved_model("llama").tee("tee-only")
    lane = kept.lane(3, [], lambda _channels: tee.lanes[0])
    events = kept.step(lambda: lane.model.norm(torch.randn(1, 48))).events
    assert [(type(event), event.lane) for event in events] == [(Marked, 3)]
