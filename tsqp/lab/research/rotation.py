"""What the masks that rotate features share: a rotation, their options, what noise guarantees.

A rotation of a long axis costs O(size x block): it is a permutation, then blocks.
"""

from __future__ import annotations

import math
from typing import Annotated, ClassVar

import torch
from pydantic import Field

from tee_side.protect.masks.mask import Mask
from tee_side.protect.randomness import Randomness
from tsqp.lab.research.draws import orthogonal, permutation

_HALVINGS = 80


class RotationMask(Mask):
    """A mask that rotates features, and adds Gaussian noise if it is asked to.

    `block`: how many features each block of a rotation mixes, after a shuffle. `sigma`: deviation
    of the noise; with it results are inexact. `delta`: see `epsilon`.
    """

    broken: ClassVar[bool] = True
    # At sigma 0. Weights in bfloat16 are rounded after the rotation: as many digits, but others.
    tolerance: ClassVar[float] = 2e-5

    block: Annotated[int, Field(ge=2, le=4096)] = 128
    sigma: Annotated[float, Field(ge=0, le=1e6)] = 0.0
    delta: Annotated[float, Field(ge=1e-12, lt=1)] = 1e-5

    def rows_epsilon(self, longest: float, rows: int) -> float:
        """Return epsilon at `delta` of the noise (differential privacy); infinite without noise.

        Neighbours: `rows` of all rows that ever cross differ, each at most `longest` long, so
        together by 2 sqrt(rows) longest. Gaussian noise composes so: arXiv 1905.02383.
        """
        if self.sigma == 0:
            return math.inf
        return gaussian_epsilon(2 * math.sqrt(rows) * longest / self.sigma, self.delta)


class BlockRotation:
    """Rows times P Q: P a permutation of the axis, Q orthogonal and block-diagonal.

    Haar-distributed blocks of `block` features, the last one smaller where `block` does not divide
    `size`. Kept in float32: as orthogonal as the rounding of what it multiplies.
    """

    def __init__(self, size: int, block: int, randomness: Randomness) -> None:
        self._order = permutation(randomness, size)
        self._back = self._order.argsort()
        block = min(block, size)
        # The last block is filled up with zeros, so that one batched product does all of them.
        self._blocks = torch.zeros(-(-size // block), block, block)
        for start, matrix in zip(range(0, size, block), self._blocks, strict=True):
            side = min(block, size - start)
            matrix[:side, :side] = orthogonal(randomness, side)

    def apply(self, rows: torch.Tensor) -> torch.Tensor:
        """Return rows P Q: float [T, size] in and out."""
        return self._turned(rows[:, self._order], self._blocks)

    def undo(self, rows: torch.Tensor) -> torch.Tensor:
        """Return rows Q^T P^T: float [T, size] in and out."""
        return self._turned(rows, self._blocks.mT)[:, self._back]

    @staticmethod
    def _turned(rows: torch.Tensor, blocks: torch.Tensor) -> torch.Tensor:
        size, (count, block, _) = rows.shape[1], blocks.shape
        padded = torch.nn.functional.pad(rows, (0, count * block - size))
        parts = padded.unflatten(1, (count, block)).transpose(0, 1)
        turned: torch.Tensor = (parts @ blocks.to(rows.dtype)).transpose(0, 1).flatten(1)
        return turned[:, :size]


# ----------------------------------------------------------------------------------------- privacy


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
