"""Who is busy in a timeline, and what is between operators."""

from __future__ import annotations

from tsqp.lab.bench.model import Span, Timeline
from tsqp.lab.bench.timeline import between_us, busy_us, resource


def test_what_is_between_operators() -> None:
    def span(lane: int, start: float, length: float, stage: str = "tee") -> Span:
        return Span(
            lane=lane, operator="o", layer=0, stage=stage, start_us=start, duration_us=length
        )

    def between(*spans: Span, lane: int = 0) -> list[tuple[float, float]]:
        return between_us(Timeline(phase="decode", tokens=1, batch=1, spans=spans), lane)

    # The wire's time is nobody's gap, nor is what comes after the last span.
    alone = (span(0, 5, 5), span(0, 10, 20, "wire"), span(0, 35, 5))
    assert between(*alone) == [(0, 5), (30, 35)]
    # Another lane's operator takes the TEE, its wire does not.
    second = (span(1, 32, 2), span(1, 36, 30, "wire"), span(1, 70, 1))
    assert between(*alone, *second) == [(0, 5), (30, 32), (34, 35)]
    assert between(*alone, *second, lane=1) == [(34, 35), (66, 70)]
    assert between() == []


def test_spans_that_overlap_are_busy_once() -> None:
    def span(start: float, length: float, stage: str = "tee") -> Span:
        return Span(lane=0, operator="o", layer=0, stage=stage, start_us=start, duration_us=length)

    assert busy_us([]) == 0
    assert busy_us([span(20, 5), span(0, 10), span(5, 10), span(6, 2)]) == 20
    stages = ("tee", "mask", "verify", "encode", "wire", "queue", "gpu", "decode", "unmask")
    owners = {stage: resource(span(0, 1, stage)) for stage in stages}
    assert [stage for stage, owner in owners.items() if owner == "wire"] == ["wire"]
    assert [stage for stage, owner in owners.items() if owner == "GPU"] == ["queue", "gpu"]
    assert resource(span(0, 1, "gpu_us")) == "GPU"
