"""How costs of a report grow."""

from __future__ import annotations

import pytest

from tsqp.lab.bench.growth import growth

from .sample_report import sample_report


def test_growth_is_fitted_for_length_and_batch() -> None:
    report = sample_report(("attention-in-tee",), lengths=(128, 256, 512), layers=2)
    found = {(g.phase, g.cost, g.against, g.scope): g for g in growth(report)}
    assert set(found) == {
        ("prefill", "step", "prompt tokens", "batch 1"),
        ("prefill", "attention", "prompt tokens", "batch 1"),
        ("decode", "step", "context tokens", "batch 1"),
        ("decode", "attention", "context tokens", "batch 1"),
        ("decode", "step", "batch", "128 context tokens"),
    }
    attention = found["prefill", "attention", "prompt tokens", "batch 1"]
    assert [x for x, _ in attention.points] == [128, 256, 512]
    # In ms, of one operator of both layers.
    assert attention.points[0][1] == sum(
        cost.stages.tee_us / 1e3
        for cost in report.policies[0].cases[0].operators
        if cost.operator == "attention"
    )
    assert attention.law is not None
    assert attention.law.exponent == pytest.approx(2, abs=0.05)
    batch = found["decode", "step", "batch", "128 context tokens"]
    assert batch.points == (
        (1, report.policies[0].cases[3].overhead_ms),
        (8, report.policies[0].cases[6].overhead_ms),
    )
