"""What Gaussian noise guarantees: (epsilon, delta) differential privacy, without slack."""

from __future__ import annotations

import math

import torch

_HALVINGS = 80


def rows_epsilon(longest: float, rows: int, sigma: float, delta: float) -> float:
    """Return epsilon at `delta` of noise of deviation `sigma`; infinite where that is 0.

    Neighbours: `rows` of all rows that ever cross differ, each at most `longest` long, so together
    by 2 sqrt(rows) longest. Gaussian noise composes so: arXiv 1905.02383.
    """
    if sigma == 0:
        return math.inf
    return gaussian_epsilon(2 * math.sqrt(rows) * longest / sigma, delta)


def gaussian_epsilon(mu: float, delta: float) -> float:
    """Return the smallest epsilon at `delta` of Gaussian noise; `mu`: sensitivity / deviation.

    The analytic Gaussian mechanism, arXiv 1805.06530, theorem 8, solved by bisection from above:
    delta = Phi(a) - exp(epsilon) Phi(-b) with a, b = mu/2 -+ epsilon/mu. exp(epsilon) is far
    beyond a float for the mu of a hidden state; it goes away in
    exp(epsilon) Phi(-b) = exp(-a^2/2) erfcx(b / sqrt 2) / 2.
    """

    def exceeds(epsilon: float) -> bool:
        a, b = mu / 2 - epsilon / mu, mu / 2 + epsilon / mu
        scaled = float(torch.special.erfcx(torch.tensor(b / math.sqrt(2), dtype=torch.float64)))
        return (math.erfc(-a / math.sqrt(2)) - math.exp(-a * a / 2) * scaled) / 2 > delta

    low, high = 0.0, 1.0
    while exceeds(high):
        low, high = high, 2 * high
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if exceeds(middle) else (low, middle)
    return high
