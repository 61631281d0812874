"""How sure a rate is."""

from __future__ import annotations

import math
from collections.abc import Callable
from statistics import NormalDist

CONFIDENCE = 0.95
# How often luck alone may make the laboratory say that something is read: of all places of a policy
# together, of which there are hundreds.
LUCK = 1e-4
_PLACES = 100
_NEGLIGIBLE = 1e-12


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

    total = 0.0
    for count in range(hits, n + 1):
        term = math.exp(log_term(count))
        total += term
        if count > chance * n and term < total * _NEGLIGIBLE:  # and all behind it still smaller
            break
    return min(1.0, total)


def needed(margin: float, chance: float = 0.0) -> int:
    """Return how many tokens it takes for an upper end that is at most `margin` above chance.

    Where guesses are right by chance alone; luck may still end higher, in one of 1 / `LUCK` runs
    through a hundred places. With a chance of 0 nothing is ever right.
    """

    def enough(hits: int) -> bool:
        return by_luck(hits + 1, _fewest(hits, margin, chance), chance) <= LUCK / _PLACES

    return _fewest(_first(enough, 0), margin, chance)


def _fewest(hits: int, margin: float, chance: float) -> int:
    """Return the fewest tokens of which so many may be hit for such an upper end."""
    return _first(lambda n: wilson(hits, n)[1] - chance <= margin, hits + 1)


def _first(holds: Callable[[int], bool], least: int) -> int:
    """Return the first number from `least` on that something holds for, as for all behind it."""
    low, high = least - 1, least
    while not holds(high):
        low, high = high, 2 * high + 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high
