"""Notes what a step asks of services and where its layers begin, and what each section cost.

Far less than an observer of every operator, so that what is timed is what runs without it. One
thread does all of the TEE's work, so the time between two events belongs to one lane: to the one
that was resumed, or after a request to the one whose turn is next.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, TypeVar

import torch

from gpu_side.tasks import RequestChecker, Task
from protocol.channel import Channel
from protocol.errors import TsqpError
from protocol.messages import HealthRequest, InitRequest, Request
from protocol.model.forward import Norm
from protocol.prepared import Exchange
from tee_side.model.layers import TeeModel
from tee_side.model.operators import MicroBatchOperators
from tsqp.lab.plan.costs import RPC_TIMES, Asked, Lane, Rpc, Section, Segment

T = TypeVar("T")

_US = 1e-3  # microseconds in a nanosecond
# Of the measured values of a section, on either side: a hiccup is no cost of it.
_TRIMMED = 0.1


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


# ----------------------------------------------------------------------------------- sections


@dataclass(slots=True)
class _Segment:
    work_ns: int
    asked: dict[tuple[int, int], Submitted] = field(default_factory=dict)
    rpcs: list[Rpc] = field(default_factory=list)


@dataclass(slots=True)
class _Section:
    """`name`: "head", "tail" or a layer."""

    name: str | int
    segments: list[_Segment] = field(default_factory=list)
    # Work since the last reply.
    work_ns: int = 0

    def made(self) -> Section:
        return Section(
            segments=tuple(
                Segment(work_us=one.work_ns * _US, rpcs=tuple(one.rpcs)) for one in self.segments
            ),
            after_us=self.work_ns * _US,
        )


def lanes_of(trace: StepTrace) -> list[dict[str | int, Section]]:
    """Return the sections of each lane of a step, by name; a lane may lack "tail"."""
    found: dict[int, list[_Section]] = {}
    several = len({event.lane for event in trace.events}) > 1

    def current(lane: int) -> _Section:
        return found.setdefault(lane, [_Section("head")])[-1]

    owner: int | None = None
    resumed_ns = trace.start_ns
    lane = 0
    for event in trace.events:
        lane = event.lane if owner is None else owner
        section = current(lane)
        waiting = section.segments[-1].asked if section.segments else {}
        gap_ns = event.start_ns - resumed_ns
        if waiting and isinstance(event, Submitted) and event.lane == lane:
            # The next of several requests that are sent side by side.
            section.segments[-1].work_ns += gap_ns
        else:
            section.work_ns += gap_ns
        resumed_ns = event.resumed_ns
        section = current(event.lane)
        if isinstance(event, Submitted):
            if not (section.segments and section.segments[-1].asked):
                section.segments.append(_Segment(section.work_ns))
                section.work_ns = 0
            section.segments[-1].asked[event.service, event.request_id] = event
            owner = None
        elif isinstance(event, Received):
            segment = section.segments[-1]
            submitted = segment.asked.pop((event.service, event.request_id))
            segment.rpcs.append(_rpc(submitted, event, several=several))
            owner = event.lane
        else:
            found[event.lane].append(_Section("tail" if event.layer is None else event.layer))
            owner = event.lane
    current(lane if owner is None else owner).work_ns += trace.end_ns - resumed_ns
    return [
        {section.name: section.made() for section in sections}
        for _, sections in sorted(found.items())
    ]


def _rpc(submitted: Submitted, received: Received, *, several: bool) -> Rpc:
    """Return a round trip. With several lanes its arrival is not known."""
    plan = submitted.plan
    arrived_ns = received.sent_ns + received.elapsed_ns
    send_ns = submitted.end_ns - received.sent_ns
    receive_ns = arrived_ns - received.start_ns if several else 0
    wire_ns = received.elapsed_ns - received.service_ns - send_ns
    return Rpc(
        service=submitted.service,
        asked=Asked(
            shape=plan.shape, dtype=plan.dtype, work=plan.work, input_bytes=plan.input_bytes
        ),
        bytes_sent=received.bytes_sent,
        bytes_received=received.bytes_received,
        encode_us=(received.sent_ns - submitted.start_ns) * _US,
        send_us=max(0, send_ns) * _US,
        wire_us=max(0, wire_ns) * _US,
        service_us=received.service_ns * _US,
        receive_us=max(0, receive_ns) * _US,
        decode_us=(received.resumed_ns - arrived_ns) * _US,
    )


def typical_lanes(traces: Sequence[StepTrace]) -> list[Lane]:
    """Return what is typical of several runs of the same step, lane by lane.

    A lane's layers are put together: they are all of one kind.
    """
    runs = [lanes_of(trace) for trace in traces]
    return [
        Lane(
            head=typical([run[index]["head"] for run in runs]),
            layers=(
                typical(
                    [s for run in runs for name, s in run[index].items() if isinstance(name, int)]
                ),
            ),
            tail=typical([run[index].get("tail", _NOTHING) for run in runs]),
        )
        for index in range(len(runs[0]))
    ]


_NOTHING = Section(segments=(), after_us=0.0)


def typical(sections: Sequence[Section]) -> Section:
    """Return the section of which each piece is the median of what was measured.

    Pieces are then stretched so that together they take the trimmed mean of the whole: a median
    of each forgets what makes now one piece slow and now another. Raises TsqpError if the sections
    have not the same RPCs.
    """
    shapes = {tuple(len(one.rpcs) for one in section.segments) for section in sections}
    if len(shapes) != 1:
        raise TsqpError("tsqp plan", got=f"layers with {len(shapes)} patterns", expected="one")
    made = Section(
        segments=tuple(
            _typical_segment([section.segments[index] for section in sections])
            for index in range(len(sections[0].segments))
        ),
        after_us=_median(sections, lambda section: section.after_us),
    )
    total = _trimmed_mean([_total_us(section) for section in sections])
    factor = total / _total_us(made) if _total_us(made) > 0 else 1.0
    return scaled(made, factor, all_times=True)


def scaled(section: Section, factor: float, *, all_times: bool) -> Section:
    """Return a section whose work takes `factor` times as long, or everything in it."""
    return section.model_copy(
        update={
            "segments": tuple(
                Segment(
                    work_us=one.work_us * factor,
                    rpcs=tuple(rpc.stretched(factor) for rpc in one.rpcs)
                    if all_times
                    else one.rpcs,
                )
                for one in section.segments
            ),
            "after_us": section.after_us * factor,
        }
    )


def with_round_trips(lane: Lane, alone: Lane) -> Lane:
    """Return a lane with the round trips of one that ran without others beside it."""
    sections = zip(
        (lane.head, *lane.layers, lane.tail), (alone.head, *alone.layers, alone.tail), strict=True
    )
    head, *layers, tail = (_with_round_trips(here, there) for here, there in sections)
    return Lane(head=head, layers=tuple(layers), tail=tail)


def _with_round_trips(section: Section, alone: Section) -> Section:
    # A lane without output rows has no tail.
    if not section.segments:
        return section

    def merge(rpc: Rpc, other: Rpc) -> Rpc:
        receive_us = min(rpc.receive_us, other.wire_us)
        update = {
            "receive_us": receive_us,
            "wire_us": other.wire_us - receive_us,
            "service_us": other.service_us,
        }
        return rpc.model_copy(update=update)

    return section.model_copy(
        update={
            "segments": tuple(
                Segment(
                    work_us=here.work_us,
                    rpcs=tuple(merge(*both) for both in zip(here.rpcs, there.rpcs, strict=True)),
                )
                for here, there in zip(section.segments, alone.segments, strict=True)
            )
        }
    )


def _total_us(section: Section) -> float:
    spent = (rpc.total_us for segment in section.segments for rpc in segment.rpcs)
    return sum(spent, start=section.work_us)


def _typical_segment(segments: Sequence[Segment]) -> Segment:
    return Segment(
        work_us=_median(segments, lambda segment: segment.work_us),
        rpcs=tuple(
            _typical_rpc([segment.rpcs[index] for segment in segments])
            for index in range(len(segments[0].rpcs))
        ),
    )


def _typical_rpc(rpcs: Sequence[Rpc]) -> Rpc:
    times = {name: statistics.median([getattr(rpc, name) for rpc in rpcs]) for name in RPC_TIMES}
    # What it asks for in the last of the measured steps: contexts grow.
    return rpcs[-1].model_copy(update=times)


def _median(values: Iterable[T], of: Callable[[T], float]) -> float:
    return statistics.median(map(of, values))


def _trimmed_mean(values: Sequence[float]) -> float:
    cut = int(len(values) * _TRIMMED)
    return statistics.fmean(sorted(values)[cut : len(values) - cut])
