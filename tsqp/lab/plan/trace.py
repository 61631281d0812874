"""Notes when a step asks a service, when it has the reply, and where its layers begin.

Far less than an observer of every operator, so that what is timed is what runs without it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from gpu_side.tasks import RequestChecker, Task
from protocol.channel import Channel
from protocol.errors import TsqpError
from protocol.messages import HealthRequest, InitRequest, Request
from protocol.model.forward import Norm
from protocol.prepared import Exchange
from tee_side.model.layers import TeeModel
from tee_side.model.operators import MicroBatchOperators


class Submitted(NamedTuple):
    """A request was handed over. From `end_ns` to `resumed_ns` it was only written down here."""

    lane: int
    service: int
    request_id: int
    start_ns: int
    end_ns: int
    resumed_ns: int
    plan: Task


class Received(NamedTuple):
    """A reply is there; the numbers are those of its `Exchange`, which is not kept."""

    lane: int
    service: int
    request_id: int
    start_ns: int
    resumed_ns: int
    sent_ns: int
    elapsed_ns: int
    service_ns: int
    bytes_sent: int
    bytes_received: int


class Marked(NamedTuple):
    """A lane has come to a layer, or past the last one (None)."""

    lane: int
    layer: int | None
    start_ns: int
    resumed_ns: int


Event = Submitted | Received | Marked


@dataclass(slots=True)
class StepTrace:
    """The events of one step, in order."""

    start_ns: int
    end_ns: int
    events: list[Event]


class Tracer:
    """Collects the events of one step after the other."""

    def __init__(self, checker: RequestChecker) -> None:
        self._checker = checker
        self._events: list[Event] = []

    def step(self, work: Callable[[], object]) -> StepTrace:
        """Run a step, and return what happened."""
        self._events = []
        started_ns = time.perf_counter_ns()
        work()
        return StepTrace(started_ns, time.perf_counter_ns(), self._events)

    def note(self, event: Event) -> None:
        """Keep an event."""
        self._events.append(event)

    def plan(self, request: Request) -> Task:
        """Return what a service would make of a request."""
        if isinstance(request, InitRequest | HealthRequest):
            raise TypeError(f"a step asks for {request.method}")
        return self._checker.check(request)

    def lane(
        self, index: int, channels: list[Channel], operators: LaneMaker
    ) -> MicroBatchOperators:
        """Return the operators of a lane, whose events are noted."""
        noted: list[Channel] = [
            _NotedChannel(channel, self, index, service) for service, channel in enumerate(channels)
        ]

        def mark(layer: int | None) -> None:
            now_ns = time.perf_counter_ns()
            self.note(Marked(index, layer, now_ns, now_ns))

        made = operators(noted)
        return replace(made, model=_marking(made.model, mark))


LaneMaker = Callable[[list[Channel]], MicroBatchOperators]


class _NotedChannel(Channel):
    """A `Channel` that says when it was used."""

    def __init__(self, channel: Channel, tracer: Tracer, lane: int, service: int) -> None:
        self.endpoint = channel.endpoint
        self.traffic = channel.traffic
        self._channel = channel
        self._tracer = tracer
        self._lane = lane
        self._service = service

    def submit(self, request: Request, timeout_s: float | None = None) -> int:
        """See `Channel.submit`."""
        start_ns = time.perf_counter_ns()
        request_id = self._channel.submit(request, timeout_s)
        end_ns = time.perf_counter_ns()
        # The request itself is not kept: its memory would not be used again.
        plan = self._tracer.plan(request)
        lane, service = self._lane, self._service
        self._tracer.note(
            Submitted(lane, service, request_id, start_ns, end_ns, time.perf_counter_ns(), plan)
        )
        return request_id

    def wait(self, request_id: int) -> Exchange:
        """See `Channel.wait`."""
        start_ns = time.perf_counter_ns()
        exchange = self._channel.wait(request_id)
        end_ns = time.perf_counter_ns()
        timing = exchange.timing
        self._tracer.note(
            Received(
                self._lane,
                self._service,
                request_id,
                start_ns,
                end_ns,
                exchange.sent_ns,
                exchange.elapsed_ns,
                0 if timing is None else (timing.queue_us + timing.compute_us) * 1000,
                exchange.bytes_sent,
                exchange.bytes_received,
            )
        )
        return exchange

    def abandon(self, request_id: int) -> None:
        """See `Channel.abandon`."""
        self._channel.abandon(request_id)

    def distrust(self, exchange: Exchange, error: TsqpError) -> None:
        """See `Channel.distrust`."""
        self._channel.distrust(exchange, error)

    def close(self) -> None:
        """See `Channel.close`."""
        self._channel.close()


def _marking(model: TeeModel, note: Callable[[int | None], None]) -> TeeModel:
    """Return the model with norms that say where a layer begins, and where the last has ended."""

    def marked(layer: int | None, norm: Norm) -> Norm:
        def call(h: torch.Tensor) -> torch.Tensor:
            note(layer)
            return norm(h)

        return call

    layers = [
        replace(layer, input_layernorm=marked(layer.index, layer.input_layernorm))
        for layer in model.layers
    ]
    marking = replace(model)
    marking.layers, marking.norm = tuple(layers), marked(None, model.norm)
    return marking
