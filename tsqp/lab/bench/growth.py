"""How costs of a report grow with prompt, context and batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tee_side.words import PHASES, Phase
from tsqp.lab.bench.fit import PowerLaw, fit_exponent
from tsqp.lab.bench.model import Case, Report
from tsqp.lab.bench.summary import sum_stages


@dataclass(frozen=True)
class Growth:
    """How one cost of one policy grows. `points`: pairs of x and cost, by x.

    `scope`: which cases they are from: their batch, or their tokens.
    """

    policy: str
    phase: Phase
    cost: str
    against: str
    scope: str
    points: tuple[tuple[float, float], ...]
    law: PowerLaw | None


_LENGTH: dict[Phase, str] = {"prefill": "prompt tokens", "decode": "context tokens"}
# What is quadratic in a prompt's length; everything else should be linear.
_ATTENTION = ("attention", "attn_scores", "softmax", "attn_values")


def growth(report: Report) -> list[Growth]:
    """Return how time grows with prompt, context and batch, wherever there are two sizes.

    Time is that of a step less Embedding and LM head in the TEE (`overhead_ms`), in ms; beside it,
    attention alone (scores, softmax and values).
    """
    found: list[Growth] = []
    for run in report.policies:
        for phase in PHASES:
            cases = [case for case in run.cases if case.phase == phase]
            for batch, micro in sorted({(c.batch, c.micro_batches) for c in cases}):
                chosen = [c for c in cases if (c.batch, c.micro_batches) == (batch, micro)]
                chosen.sort(key=lambda c: c.tokens)
                scope = f"batch {batch}" + (f", {micro} micro" if micro > 1 else "")
                steps = [(float(c.tokens), c.overhead_ms) for c in chosen]
                attention = [(float(c.tokens), _attention_ms(c)) for c in chosen]
                against = _LENGTH[phase]
                found.append(_grown(run.policy, phase, "step", against, scope, steps))
                found.append(_grown(run.policy, phase, "attention", against, scope, attention))
            for tokens, micro in sorted({(c.tokens, c.micro_batches) for c in cases}):
                chosen = [c for c in cases if (c.tokens, c.micro_batches) == (tokens, micro)]
                chosen.sort(key=lambda c: c.batch)
                scope = f"{tokens} {_LENGTH[phase]}" + (f", {micro} micro" if micro > 1 else "")
                steps = [(float(c.batch), c.overhead_ms) for c in chosen]
                found.append(_grown(run.policy, phase, "step", "batch", scope, steps))
    return [g for g in found if len(g.points) > 1 and any(cost for _, cost in g.points)]


def _attention_ms(case: Case) -> float:
    costs = [c for c in case.operators if c.operator in _ATTENTION]
    return sum_stages(c.stages for c in costs).total_us / 1e3


def _grown(
    policy: str,
    phase: Phase,
    cost: str,
    against: str,
    scope: str,
    points: Sequence[tuple[float, float]],
) -> Growth:
    return Growth(policy, phase, cost, against, scope, tuple(points), fit_exponent(points))
