"""How sure a rate is."""

from __future__ import annotations

import math
from statistics import NormalDist

CONFIDENCE = 0.95


def wilson(hits: int, n: int, confidence: float = CONFIDENCE) -> tuple[float, float]:
    """Return the score interval of a share, as E. B. Wilson (1927) has it; (0, 1) of none.

    Tokens count as independent. Those of one text are not quite: docs/leakage.md says what that
    means.
    """
    if n == 0:
        return 0.0, 1.0
    z = NormalDist().inv_cdf(0.5 + confidence / 2)
    share, spread = hits / n, z * z / n
    centre = share + spread / 2
    half = z * math.sqrt((share * (1 - share) + spread / 4) / n)
    low, high = (centre - half) / (1 + spread), (centre + half) / (1 + spread)
    # Where all or none were hit an end is exact, and rounding would say otherwise.
    return (0.0 if hits == 0 else max(0.0, low)), (1.0 if hits == n else min(1.0, high))


def by_luck(hits: int, n: int, chance: float) -> float:
    """Return how likely it is to hit so many of n or more by chance alone: the binomial tail."""
    if hits == 0 or chance >= 1:
        return 1.0
    if chance <= 0:
        return 0.0
    log_hit, log_miss = math.log(chance), math.log1p(-chance)

    def log_term(count: int) -> float:
        ways = math.lgamma(n + 1) - math.lgamma(count + 1) - math.lgamma(n - count + 1)
        return ways + count * log_hit + (n - count) * log_miss

    return min(1.0, math.fsum(math.exp(log_term(count)) for count in range(hits, n + 1)))


def needed(margin: float, confidence: float = CONFIDENCE) -> int:
    """Return how many tokens it takes for the upper end to be `margin` where none was read."""
    z = NormalDist().inv_cdf(0.5 + confidence / 2)
    return math.ceil(z * z * (1 / margin - 1))
