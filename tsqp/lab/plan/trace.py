"""Notes what a step asks of services and where its layers begin, and what each section cost.

Far less than an observer of every operator, so that what is timed is what runs without it. One
thread does all of the TEE's work, so the time between two events belongs to one lane: to the one
that was resumed, or after a request to the one whose turn is next.
"""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Literal, NamedTuple, TypeAlias

import torch

from gpu_side.tasks import RequestChecker, Task
from protocol.channel import Channel, WrappedChannel
from protocol.errors import TsqpError
from protocol.messages import HealthRequest, InitRequest, Request
from protocol.model.forward import Norm
from protocol.prepared import Exchange
from tee_side.model.operators import MicroBatchOperators, TeeModel
from tsqp.lab.plan.costs import RPC_TIMES, LaneCost, Rpc, Section, Stretch

_US = 1e-3  # microseconds in a nanosecond
# Of the measured values of a section, on either side: a hiccup is no cost of it.
_TRIMMED = 0.1


class LaneEvent(NamedTuple):
    """A lane did something, or came by, between two pieces of its work.

    From `start_ns` to `resumed_ns` it was done and written down here. `what`: "asked" where a
    request was handed over, the round trip where its reply is there, the layer that begins, and
    None past the last layer.
    """

    lane: int
    start_ns: int
    resumed_ns: int
    what: Rpc | int | Literal["asked"] | None


# Of each lane of a step its sections by name: "head", the numbers of layers, and "tail", which a
# lane may lack.
Sections: TypeAlias = "list[dict[str | int, Section]]"
LaneMaker: TypeAlias = "Callable[[list[Channel]], MicroBatchOperators]"


class Tracer:
    """Collects the events of one step after the other."""

    def __init__(self, checker: RequestChecker) -> None:
        self._checker = checker
        self._events: list[LaneEvent] = []

    def step(self, work: Callable[[], object]) -> Sections:
        """Run a step, and return what its sections cost."""
        self._events = []
        started_ns = time.perf_counter_ns()
        work()
        return sections_of(self._events, started_ns, time.perf_counter_ns())

    def note(self, lane: int, start_ns: int, what: Rpc | int | Literal["asked"] | None) -> None:
        """Keep an event that ends now."""
        self._events.append(LaneEvent(lane, start_ns, time.perf_counter_ns(), what))

    def task(self, request: Request) -> Task:
        """Return what a service would make of a request."""
        if isinstance(request, InitRequest | HealthRequest):
            raise TypeError(f"a step asks for {request.method}")
        return self._checker.check(request)

    def lane(
        self, index: int, channels: list[Channel], operators: LaneMaker
    ) -> MicroBatchOperators:
        """Return the operators of a lane, whose events are noted."""
        made = operators(
            [_NotedChannel(channel, self, index, number) for number, channel in enumerate(channels)]
        )
        return replace(made, model=self._marking(made.model, index))

    def _marking(self, model: TeeModel, lane: int) -> TeeModel:
        """Return the model with norms that say where a layer begins, and where the last ended."""

        def marked(layer: int | None, norm: Norm) -> Norm:
            def call(h: torch.Tensor) -> torch.Tensor:
                self.note(lane, time.perf_counter_ns(), layer)
                return norm(h)

            return call

        marking = replace(model)
        marking.norm = marked(None, model.norm)
        marking.layers = tuple(
            replace(layer, input_layernorm=marked(layer.index, layer.input_layernorm))
            for layer in model.layers
        )
        return marking


class _NotedChannel(WrappedChannel):
    """A `Channel` that says when it was used."""

    def __init__(self, channel: Channel, tracer: Tracer, lane: int, service: int) -> None:
        super().__init__(channel)
        self._tracer, self._lane, self._service = tracer, lane, service
        # Of requests under way: when they began and ended to be handed over, and what they ask for.
        self._asked: dict[int, tuple[int, int, Task]] = {}

    def submit(self, request: Request, timeout_s: float | None = None) -> int:
        """See `Channel.submit`."""
        start_ns = time.perf_counter_ns()
        request_id = self._channel.submit(request, timeout_s)
        end_ns = time.perf_counter_ns()
        # The request itself is not kept: its memory would not be used again.
        self._asked[request_id] = start_ns, end_ns, self._tracer.task(request)
        self._tracer.note(self._lane, start_ns, "asked")
        return request_id

    def wait(self, request_id: int) -> Exchange:
        """See `Channel.wait`."""
        start_ns = time.perf_counter_ns()
        exchange = self._channel.wait(request_id)
        end_ns = time.perf_counter_ns()
        encoding_ns, submitted_ns, task = self._asked.pop(request_id)
        arrived_ns = exchange.sent_ns + exchange.elapsed_ns
        send_ns = submitted_ns - exchange.sent_ns
        timing = exchange.timing
        service_ns = 0 if timing is None else (timing.queue_us + timing.compute_us) * 1000
        rpc = Rpc(
            service=self._service,
            asked=task,
            bytes_sent=exchange.bytes_sent,
            bytes_received=exchange.bytes_received,
            encode_us=(exchange.sent_ns - encoding_ns) * _US,
            send_us=max(0, send_ns) * _US,
            wire_us=max(0, exchange.elapsed_ns - service_ns - send_ns) * _US,
            service_us=service_ns * _US,
            receive_us=max(0, arrived_ns - start_ns) * _US,
            decode_us=(end_ns - arrived_ns) * _US,
        )
        self._tracer.note(self._lane, start_ns, rpc)
        return exchange


# ----------------------------------------------------------------------------------- sections


def sections_of(events: Sequence[LaneEvent], start_ns: int, end_ns: int) -> Sections:
    """Return the sections of each lane of a step."""
    found: dict[int, dict[str | int, Section]] = {}
    under_way = Counter[int]()
    several = len({event.lane for event in events}) > 1

    def current(lane: int) -> Section:
        sections = found.setdefault(lane, {"head": Section()})
        return sections[next(reversed(sections))]

    owner: int | None = None
    lane, resumed_ns = 0, start_ns
    for event in events:
        lane = event.lane if owner is None else owner
        section, gap_us = current(lane), (event.start_ns - resumed_ns) * _US
        if under_way[lane] and event.what == "asked" and event.lane == lane:
            # The next of several requests that are sent side by side.
            section.segments[-1].work_us += gap_us
        else:
            section.after_us += gap_us
        resumed_ns, owner = event.resumed_ns, event.lane
        section = current(owner)
        if event.what == "asked":
            if not under_way[owner]:
                section.segments.append(Stretch(section.after_us))
                section.after_us = 0.0
            under_way[owner] += 1
            owner = None
        elif isinstance(event.what, Rpc):
            # A lane that runs alone does nothing while it waits: all of that is the wire's.
            rpc = event.what if several else replace(event.what, receive_us=0.0)
            section.segments[-1].rpcs.append(rpc)
            under_way[owner] -= 1
        else:
            found[owner]["tail" if event.what is None else event.what] = Section()
    current(lane if owner is None else owner).after_us += (end_ns - resumed_ns) * _US
    return [sections for _, sections in sorted(found.items())]


def typical_lanes(runs: Sequence[Sections]) -> list[LaneCost]:
    """Return what is typical of several runs of the same step, lane by lane.

    A lane's layers are put together: they are all of one kind.
    """
    return [
        [
            typical([run[index]["head"] for run in runs]),
            typical([s for run in runs for name, s in run[index].items() if isinstance(name, int)]),
            typical([run[index].get("tail", Section()) for run in runs]),
        ]
        for index in range(len(runs[0]))
    ]


def typical(sections: Sequence[Section]) -> Section:
    """Return the section of which each piece is the median of what was measured.

    Pieces are then stretched so that together they take the trimmed mean of the whole: a median
    of each forgets what makes now one piece slow and now another. Raises TsqpError if the sections
    have not the same RPCs.
    """
    shapes = {tuple(len(one.rpcs) for one in section.segments) for section in sections}
    TsqpError.unless(len(shapes) == 1, "tsqp plan", f"layers with {len(shapes)} patterns", "one")
    alike = zip(*(section.segments for section in sections), strict=True)
    made = Section(
        [
            Stretch(
                statistics.median(one.work_us for one in segments),
                [_typical_rpc(rpcs) for rpcs in zip(*(one.rpcs for one in segments), strict=True)],
            )
            for segments in alike
        ],
        statistics.median(section.after_us for section in sections),
    )
    totals, total_us = sorted(map(_total_us, sections)), _total_us(made)
    cut = int(len(totals) * _TRIMMED)
    mean_us = statistics.fmean(totals[cut : len(totals) - cut])
    factor = mean_us / total_us if total_us > 0 else 1.0
    stretched = (
        Stretch(one.work_us * factor, [rpc.stretched(factor) for rpc in one.rpcs])
        for one in made.segments
    )
    return Section([*stretched], made.after_us * factor)


def _total_us(section: Section) -> float:
    spent = (rpc.total_us for segment in section.segments for rpc in segment.rpcs)
    return sum(spent, start=section.work_us)


def _typical_rpc(rpcs: Sequence[Rpc]) -> Rpc:
    times = {name: statistics.median([getattr(rpc, name) for rpc in rpcs]) for name in RPC_TIMES}
    # What it asks for in the last of the measured steps: contexts grow.
    return replace(rpcs[-1], **times)


def with_round_trips(lane: LaneCost, alone: LaneCost) -> LaneCost:
    """Return a lane with the round trips of one that ran without others beside it."""
    return [*map(_with_round_trips, lane, alone)]


def _with_round_trips(section: Section, alone: Section) -> Section:
    # A lane without output rows has no tail.
    if not section.segments:
        return section

    def merge(rpc: Rpc, other: Rpc) -> Rpc:
        receive_us = min(rpc.receive_us, other.wire_us)
        wire_us, service_us = other.wire_us - receive_us, other.service_us
        return replace(rpc, receive_us=receive_us, wire_us=wire_us, service_us=service_us)

    merged = [
        Stretch(here.work_us, [merge(*both) for both in zip(here.rpcs, there.rpcs, strict=True)])
        for here, there in zip(section.segments, alone.segments, strict=True)
    ]
    return replace(section, segments=merged)
