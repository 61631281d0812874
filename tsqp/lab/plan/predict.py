"""From what a few layers cost to what the whole model would, on a described accelerator and link.

A step is played through: one thread of the TEE that gives each lane its turn as
`tee_side.remote.call` does, links whose bandwidth requests and replies queue for, as in
`tsqp.link`, and services that answer one request after another.
"""

from bisect import bisect_left
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import ceil
from typing import Any

from gpu_side.devices import DeviceProfile
from gpu_side.kernels import request_us
from gpu_side.tasks import LinearWork, Task
from tsqp.lab.plan.costs import (
    PARTS,
    Costs,
    Crossover,
    Instead,
    LaneCost,
    PartCost,
    PartName,
    Prediction,
    Rpc,
    Section,
    Step,
)
from tsqp.link import Link

# A request's way to the other ranks: one message over gloo, and the rate of all of them together.
# Measured on 2 EPYC cores over loopback: 8 KiB out and 16 KiB back take 264 us, 8 MiB out and 64
# MiB back 57 ms. Results of ranks without a GPU go that way, too; a profile is of an accelerator.
GLOO_US = 120.0
GLOO_GB_PER_S = 1.3

# No weight of a known model has so many columns.
_MOST_COLUMNS = 2**24


# Of a round trip's time that the service neither computes nor queues: taking the request in and
# handing the reply out keep it from its next request, too.
_SERVICE_SHARE = 0.5

# Rows of a step from which most of it is shared by all threads: attention and passes over wide
# tensors are (protocol/native/tasks.h), and what stays on one thread is little beside them.
_SHARED_ROWS = 64


@dataclass(frozen=True)
class Hardware:
    """What is planned for. `profile`: None for a service that computes nothing.

    `cores`: of the TEE side. `itemsize`: bytes of an element of the accelerator's weights.
    `instead`: what a measured machine replaces of what was measured here; None: nothing. `ranks`:
    over how many such accelerators of each service a weight's columns are spread
    (`gpu-service --tensor-parallel`).
    """

    profile: DeviceProfile | None
    link: Link
    cores: int
    itemsize: int
    instead: Instead | None = None
    ranks: int = 1

    def gpu_us(self, task: Task) -> float:
        """Return how long a service takes for a request.

        Ranks get the input from host memory to host memory (gloo), at what was measured; their
        parts come back at the profile's rate to the host, and kernels run at its peak rates: a
        lower bound.
        """
        if (profile := self.profile) is None:
            return 0.0
        whole_us, work = request_us(profile, task, self.itemsize), task.work
        if self.ranks == 1 or not isinstance(work, LinearWork):
            return whole_us
        own, all_of_it = (
            profile.linear_us(work.rows, work.in_features, columns, self.itemsize, work.integer)
            for columns in (ceil(work.out_features / self.ranks), work.out_features)
        )
        sent_us = GLOO_US + task.input_bytes * (self.ranks - 1) / (GLOO_GB_PER_S * 1e3)
        others = task.output_bytes * (self.ranks - 1) // self.ranks
        return whole_us - all_of_it + own + sent_us + profile.transfer_us(others)


def crossover(hardware: Hardware, rpcs: Iterable[Rpc]) -> Crossover | None:
    """Return from which size of a weight on several ranks pay, for rows and inputs of the largest.

    None where no request multiplies by a weight.
    """
    linear = [(rpc.asked.work, rpc.asked) for rpc in rpcs if isinstance(rpc.asked.work, LinearWork)]
    if not linear:
        return None
    work, task = max(linear, key=lambda one: one[0].in_features * one[0].out_features)
    row_bytes = work.in_features * (1 if work.integer else hardware.itemsize)
    alone = replace(hardware, ranks=1)

    def pays(columns: int) -> bool:
        part = replace(work, out_features=columns)
        one = replace(task, shape=(*task.shape[:-1], columns), work=part)
        return hardware.gpu_us(one) < alone.gpu_us(one)

    least = bisect_left(range(_MOST_COLUMNS), True, lo=1, key=pays)
    return Crossover(
        weight_bytes=None if least == _MOST_COLUMNS else least * row_bytes,
        largest_bytes=work.out_features * row_bytes,
    )


@dataclass(slots=True)
class Turn:
    """What a lane does until it waits: work of its own, then round trips side by side.

    `weights_us`: multiplying by weights that stay in the TEE; `tee_us`: the other operators there.
    """

    weights_us: float = 0.0
    tee_us: float = 0.0
    mask_us: float = 0.0
    message_us: float = 0.0
    trips: Sequence[Rpc] = ()

    def add(self, work_us: float, section: Section, weights: float, elsewhere: float) -> None:
        """Add work of a section, each kind of it times a factor."""
        weights_us, masks_us = work_us * section.product_share, work_us * section.mask_share
        self.weights_us += weights_us * weights
        self.mask_us += masks_us * elsewhere
        self.tee_us += (work_us - weights_us - masks_us) * elsewhere


def predict(steps: Sequence[Step], costs: Costs, hardware: Hardware) -> Prediction:
    """Predict steps of `costs` one after the other: of a prompt, or one decode step."""
    lanes = [[turns_of(lane, step.rows, costs, hardware) for lane in step.lanes] for step in steps]

    def total_us(without: PartName | None) -> float:
        latency_us = 0.0 if without == "link latency" else hardware.link.rtt_us
        return sum(
            play([[_without(turn, without) for turn in lane] for lane in step], latency_us)
            for step in lanes
        )

    total = total_us(None)
    turns = [turn for step in lanes for lane in step for turn in lane]
    busy = _busy(turns, hardware.link.rtt_us)
    parts = tuple(
        PartCost(name=name, busy_us=busy[name], without_us=total_us(name)) for name in PARTS
    )
    shortest = min(parts, key=lambda part: part.without_us)
    rpcs = [rpc for step in steps for rpc in rpcs_of(step, costs.order)]
    return Prediction(
        total_us=total,
        rpcs=len(rpcs),
        bytes_sent=sum(rpc.bytes_sent for rpc in rpcs),
        bytes_received=sum(rpc.bytes_received for rpc in rpcs),
        parts=parts,
        bottleneck=shortest.name if shortest.without_us < total else None,
    )


def rpcs_of(step: Step, order: Sequence[int]) -> Iterator[Rpc]:
    """Yield all round trips of a step through the whole model, to one accelerator a share."""
    for lane in step.lanes:
        for section in _sections(lane, order):
            for segment in section.segments:
                yield from segment.rpcs


def _sections(lane: LaneCost, order: Sequence[int]) -> list[Section]:
    head, *kinds, tail = lane
    return [head, *(kinds[kind] for kind in order), tail]


def turns_of(lane: LaneCost, rows: int, costs: Costs, hardware: Hardware) -> list[Turn]:
    """Return all turns of a lane through the whole model.

    With more cores than were measured, weights are read as many times as fast; everything else
    only in steps that are large enough to be shared by several threads.
    """
    fewer = min(1.0, costs.threads / hardware.cores)
    elsewhere = fewer if rows >= _SHARED_ROWS else 1.0
    if (instead := hardware.instead) is not None:
        fewer = instead.weights
        elsewhere = instead.shared if rows >= _SHARED_ROWS else instead.alone
    turns: list[Turn] = []
    left = Turn()
    for section in _sections(lane, costs.order):
        for segment in section.segments:
            left.add(segment.work_us, section, fewer, elsewhere)
            rpcs = [_there(rpc, hardware) for rpc in segment.rpcs]
            left.message_us += sum(rpc.encode_us for rpc in rpcs)
            left.trips = rpcs
            turns.append(left)
            # Messages are decoded when the lane has its next turn.
            left = Turn(message_us=sum(rpc.decode_us for rpc in rpcs))
        left.add(section.after_us, section, fewer, elsewhere)
    return [*turns, left]


def _there(rpc: Rpc, hardware: Hardware) -> Rpc:
    """Return a round trip as on the machine, the accelerator and the link that are planned for."""
    if (instead := hardware.instead) is not None and rpc.total_us > 0:
        size = rpc.bytes_sent + rpc.bytes_received
        rpc = rpc.stretched(instead.transport.us(size) / rpc.total_us)
    return replace(
        rpc,
        gpu_us=hardware.gpu_us(rpc.asked),
        up_us=hardware.link.transfer_ns(rpc.bytes_sent) / 1e3,
        down_us=hardware.link.transfer_ns(rpc.bytes_received) / 1e3,
    )


# What each part consists of: fields of a turn, and of the round trips that it ends with.
_FIELDS: dict[PartName | None, tuple[str, ...]] = {
    "TEE weights": ("weights_us",),
    "TEE operators": ("tee_us",),
    "masks and checks": ("mask_us",),
    "messages": ("message_us", "service_us"),
    "transport": ("send_us", "wire_us", "receive_us"),
    "link bandwidth": ("up_us", "down_us"),
    "GPU": ("gpu_us",),
}


def _without(turn: Turn, part: PartName | None) -> Turn:
    """Return a turn with a part of it free of charge."""

    def free(piece: Turn | Rpc) -> dict[str, Any]:
        return {name: 0.0 for name in _FIELDS.get(part, ()) if hasattr(piece, name)}

    return replace(turn, **free(turn), trips=[replace(trip, **free(trip)) for trip in turn.trips])


def _busy(turns: Sequence[Turn], latency_us: float) -> dict[PartName, float]:
    """Return what each part takes; of round trips side by side, the longest counts."""

    def round_trip_us(trip: Rpc) -> float:
        link_us = trip.up_us + trip.down_us + latency_us
        return trip.service_us + trip.gpu_us + max(trip.wire_us, link_us)

    busy = dict.fromkeys(PARTS, 0.0)
    for turn in turns:
        pieces: list[Turn | Rpc] = [turn]
        if turn.trips:
            trip = max(turn.trips, key=round_trip_us)
            beyond_us = max(0.0, trip.wire_us - trip.up_us - trip.down_us - latency_us)
            pieces.append(replace(trip, wire_us=beyond_us))
            busy["link latency"] += latency_us
        for part in PARTS:
            busy[part] += sum(
                getattr(piece, name, 0.0) for piece in pieces for name in _FIELDS.get(part, ())
            )
    return busy


def play(lanes: Sequence[Sequence[Turn]], latency_us: float) -> float:
    """Return when the last lane is done. Each has its turn as `run_overlapped` gives it.

    The link is laid over the transport: of both, the longer one counts.
    """
    # When each service, its accelerator and both ways of its link are free, in microseconds.
    up, service, gpu, down = (defaultdict[int, float](float) for _ in range(4))
    # Of each lane the turns that it has left, when its replies are there, and taking them in.
    left = [deque(turns) for turns in lanes]
    ready_us, receive_us = ([0.0] * len(lanes) for _ in range(2))
    last, running = 0, deque([0])
    # Requests under way at the same time keep a service busy beyond their own computing.
    handling = _SERVICE_SHARE if len(lanes) > 1 else 0.0
    now = 0.0
    while running:
        lane = running.popleft()
        has_begun = len(left[lane]) < len(lanes[lane])
        now = max(now, ready_us[lane]) + receive_us[lane]
        turn = left[lane].popleft()
        # What keeps the TEE's thread busy before anything is sent.
        now += turn.weights_us + turn.tee_us + turn.mask_us + turn.message_us
        ready_us[lane] = receive_us[lane] = 0.0
        for trip in turn.trips:
            at = trip.service
            now += trip.send_us
            # What the transport takes longer than the link, half of it each way.
            more = max(0.0, trip.wire_us - trip.up_us - trip.down_us - latency_us)
            up[at] = max(up[at], now) + trip.up_us
            read = max(service[at], up[at] + (latency_us + more) / 2) + trip.service_us
            service[at] = read + more * handling
            gpu[at] = max(gpu[at], read) + trip.gpu_us
            down[at] = max(down[at], gpu[at]) + trip.down_us
            ready_us[lane] = max(ready_us[lane], down[at] + (latency_us + more) / 2)
            receive_us[lane] += trip.receive_us
        if left[lane]:
            running.append(lane)
        if lane == last < len(lanes) - 1 and (has_begun or not left[lane]):
            last += 1
            running.appendleft(last)
    return now
