"""How a cost grows: the power law nearest to a few measured points."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class PowerLaw:
    """`factor * x ** exponent`, and how well it fits.

    `r_squared`: share of the variance of log(cost) that it explains, 1 for a perfect fit (always
    so for two points, which say nothing about the fit). `worst`: by which factor the point that is
    farthest off lies above or below the line, at least 1.
    """

    exponent: float
    factor: float
    r_squared: float
    worst: float
    points: int

    def at(self, x: float) -> float:
        """Return the cost that the law predicts at `x`."""
        return float(self.factor * x**self.exponent)


def fit_exponent(points: Iterable[tuple[float, float]]) -> PowerLaw | None:
    """Fit log(cost) = log(factor) + exponent * log(x) by least squares.

    `points`: pairs of x and cost. None where no such line exists: fewer than two different x, or a
    number that has no logarithm. No point is left out silently.
    """
    pairs = list(points)
    if not all(0 < number < math.inf for pair in pairs for number in pair):
        return None
    xs = [math.log(x) for x, _ in pairs]
    ys = [math.log(cost) for _, cost in pairs]
    if len(set(xs)) < 2:
        return None
    x_mean, y_mean = sum(xs) / len(xs), sum(ys) / len(ys)
    spread = sum((x - x_mean) ** 2 for x in xs)
    exponent = sum((x - x_mean) * (y - y_mean) for x, y in zip(xs, ys, strict=True)) / spread
    offset = y_mean - exponent * x_mean
    misses = [y - offset - exponent * x for x, y in zip(xs, ys, strict=True)]
    variance = sum((y - y_mean) ** 2 for y in ys)
    unexplained = sum(miss**2 for miss in misses)
    # A cost that does not change at all is fitted perfectly by a flat line.
    r_squared = 1.0 - unexplained / variance if variance > 1e-18 else 1.0
    return PowerLaw(
        exponent=exponent,
        factor=math.exp(offset),
        r_squared=r_squared,
        worst=math.exp(max(map(abs, misses))),
        points=len(pairs),
    )
