"""When each side is busy in a timeline, what is between its operators, and a trace of it.

The trace opens in ui.perfetto.dev and chrome://tracing. Trace Event Format: a process for each
step, a thread for each of TEE, wire and GPU of each micro-batch, complete events (`"ph": "X"`) with
times in microseconds.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from itertools import product
from typing import Any

from tsqp.lab.bench.model import Report, Span, Timeline
from tsqp.lab.bench.summary import case_name

# Which side is busy during a stage, in the order of the timeline's lanes.
RESOURCES: tuple[str, ...] = ("TEE", "wire", "GPU")
_BUSY: dict[str, str] = {"wire": "wire", "queue": "GPU", "gpu": "GPU"}
# Clocks are read one after another: spans that touch may overlap by this much.
_TOUCH_US = 1.0

# Starts and ends, in microseconds from the step's start.
Times = Sequence[tuple[float, float]]
Event = dict[str, Any]


def resource(span: Span) -> str:
    """Return the side that is busy during a span: TEE, wire or GPU."""
    return _BUSY.get(span.stage, "TEE")


def times_of(spans: Iterable[Span]) -> list[tuple[float, float]]:
    """Return start and end of each span."""
    return [(span.start_us, span.end_us) for span in spans]


def length_us(timeline: Timeline) -> float:
    """Return how long the step took, from its start to the end of the last span."""
    return max((stop for _, stop in times_of(timeline.spans)), default=0.0)


def busy_us(times: Times) -> float:
    """Return for how long at least one of them ran."""
    total, end = 0.0, 0.0
    for start, stop in sorted(times):
        total += max(0.0, stop - max(end, start))
        end = max(end, stop)
    return total


def between_us(timeline: Timeline, lane: int) -> list[tuple[float, float]]:
    """Return starts and ends of what is between the operators of a lane, up to its last span.

    Nothing of the lane runs then, nor another lane's operator in the TEE. The first lane's begins
    with the step.
    """
    own = times_of(span for span in timeline.spans if span.lane == lane)
    others = [s for s in timeline.spans if s.lane != lane and resource(s) == "TEE"]
    first = lane == lanes(timeline)[0]
    now = 0.0 if first else min(start for start, _ in own)
    last = max(stop for _, stop in own)
    found: list[tuple[float, float]] = []
    for start, stop in sorted([*own, *times_of(others)]):
        if now < start < last:
            found.append((now, start))
        now = max(now, stop)
    return found


def lanes(timeline: Timeline) -> list[int]:
    """Return the numbers of the micro-batches."""
    return sorted({span.lane for span in timeline.spans})


# -------------------------------------------------------------------------------------- trace


def perfetto(report: Report) -> dict[str, Any]:
    """Return the trace as an object for JSON; without a timeline it has no events."""
    steps = [(run.policy, one) for run in report.policies for one in run.timelines]
    setup = report.setup
    return {
        "traceEvents": [
            event
            for process, (policy, step) in enumerate(steps, start=1)
            for event in _process(process, policy, step)
        ],
        "displayTimeUnit": "ms",
        "otherData": {
            "model": setup.model,
            "device": setup.device,
            "transport": setup.transport,
            "measured": setup.created,
            "note": "queue and GPU are the service's own claim, laid into the round trip",
        },
    }


def perfetto_json(report: Report) -> str:
    """Return the trace as the text of a file."""
    return json.dumps(perfetto(report), allow_nan=False, separators=(",", ":"))


def _process(pid: int, policy: str, timeline: Timeline) -> Iterator[Event]:
    name = case_name(timeline.phase, timeline.tokens, timeline.batch)
    yield _named("process_name", pid, 0, {"name": f"{policy}, {name}"})
    yield _named("process_sort_index", pid, 0, {"sort_index": pid})
    thread, numbers = 0, lanes(timeline)
    for busy, lane in product(RESOURCES, numbers):
        spans = [s for s in timeline.spans if s.lane == lane and resource(s) == busy]
        for row, placed in enumerate(rows(spans)):
            thread += 1
            label = busy if len(numbers) == 1 else f"{busy}, micro-batch {lane}"
            label += f" ({row + 1})" if row else ""
            yield _named("thread_name", pid, thread, {"name": label})
            yield _named("thread_sort_index", pid, thread, {"sort_index": thread})
            yield from (_complete(span, pid, thread) for span in placed)


def rows(spans: Iterable[Span]) -> list[list[Span]]:
    """Lay spans into as few rows as hold them without overlap: events of a thread may not cross.

    Spans that overlap by less than a microsecond count as touching; the later one is shortened.
    """
    made: list[list[Span]] = []
    for span in sorted(spans, key=lambda s: (s.start_us, -s.duration_us)):
        for row in made:
            if span.start_us >= row[-1].end_us - _TOUCH_US and span.end_us >= row[-1].end_us:
                start_us = max(span.start_us, row[-1].end_us)
                shorter = {"start_us": start_us, "duration_us": span.end_us - start_us}
                row.append(span.model_copy(update=shorter))
                break
        else:
            made.append([span])
    return made


def _named(what: str, pid: int, tid: int, args: Event) -> Event:
    return {"name": what, "ph": "M", "pid": pid, "tid": tid, "ts": 0, "args": args}


def _complete(span: Span, pid: int, tid: int) -> Event:
    stage = span.stage
    # To whole nanoseconds, both ends alike: spans that touch must not overlap by a rounding.
    start, stop = round(span.start_us, 3), round(span.end_us, 3)
    args: Event = {"operator": span.operator, "stage": stage, "micro_batch": span.lane}
    if span.layer is not None:
        args["layer"] = span.layer
    return {
        "name": span.operator if stage == "tee" else f"{span.operator} {stage}",
        "cat": stage,
        "ph": "X",
        "ts": start,
        "dur": round(stop - start, 3),
        "pid": pid,
        "tid": tid,
        "args": args,
    }
