"""When each side is busy in a timeline, and what is between its operators."""

from __future__ import annotations

from collections.abc import Iterable

from tsqp.lab.bench.model import Span, Timeline

# Which side is busy during a stage, in the order of the timeline's lanes.
RESOURCES: tuple[str, ...] = ("TEE", "wire", "GPU")
_BUSY: dict[str, str] = {"wire": "wire", "queue": "GPU", "gpu": "GPU"}


def resource(span: Span) -> str:
    """Return the side that is busy during a span: TEE, wire or GPU."""
    return _BUSY.get(span.stage.removesuffix("_us"), "TEE")


def length_us(timeline: Timeline) -> float:
    """Return how long the step took, from its start to the end of the last span."""
    return max((span.start_us + span.duration_us for span in timeline.spans), default=0.0)


def busy_us(spans: Iterable[Span]) -> float:
    """Return for how long at least one of the spans ran."""
    total, end = 0.0, 0.0
    for span in sorted(spans, key=lambda span: span.start_us):
        stop = span.start_us + span.duration_us
        total += max(0.0, stop - max(end, span.start_us))
        end = max(end, stop)
    return total


def between_us(timeline: Timeline, lane: int) -> list[tuple[float, float]]:
    """Return starts and ends of what is between the operators of a lane, up to its last span.

    Nothing of the lane runs then, nor another lane's operator in the TEE. The first lane's begins
    with the step.
    """
    own = [span for span in timeline.spans if span.lane == lane]
    others = [s for s in timeline.spans if s.lane != lane and resource(s) == "TEE"]
    if not own:
        return []
    first = lane == lanes(timeline)[0]
    now = 0.0 if first else min(span.start_us for span in own)
    last = max(span.start_us + span.duration_us for span in own)
    found: list[tuple[float, float]] = []
    for span in sorted([*own, *others], key=lambda span: span.start_us):
        if span.start_us >= last:
            break
        if span.start_us > now:
            found.append((now, span.start_us))
        now = max(now, span.start_us + span.duration_us)
    return found


def lanes(timeline: Timeline) -> list[int]:
    """Return the numbers of the micro-batches."""
    return sorted({span.lane for span in timeline.spans})
