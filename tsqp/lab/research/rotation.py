"""Random rotations of a long axis that cost O(size x block): a permutation, then blocks."""

from __future__ import annotations

import torch

from tee_side.protect.randomness import Randomness
from tsqp.lab.research.draws import orthogonal, permutation


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
