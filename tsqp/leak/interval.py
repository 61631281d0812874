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


def needed(margin: float, confidence: float = CONFIDENCE) -> int:
    """Return how many tokens it takes for the upper end to be `margin` where none was read."""
    z = NormalDist().inv_cdf(0.5 + confidence / 2)
    return math.ceil(z * z * (1 / margin - 1))
