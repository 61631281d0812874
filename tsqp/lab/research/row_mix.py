"""The published project's later scheme: every row becomes a mixture of all rows of its call."""

from __future__ import annotations

from typing import ClassVar

import torch

from tee_side.protect.masks.mask import Masked, MaskedProduct, RowMask
from tee_side.protect.randomness import Randomness
from tsqp.lab.research.draws import shuffled_product, signs, uniform


class RowMix(RowMask):
    """M X = D X + a (b^T X) for linear operators, with D diagonal; undone by Sherman-Morrison.

    For products Q' = D1 P1 Q P2 D2 and K'^T = D2^-1 P2^-1 K^T P3 D3. Broken where the weights are
    public: the rows span what they spanned before, and one row keeps its direction.
    """

    name: ClassVar[str] = "row-mix"
    hides: ClassVar[str] = "single rows, and so which token is where"
    known_break: ClassVar[str] = (
        "subspace membership: the row space is unchanged, 96 of 96 tokens on synthetic data while"
        " there are fewer rows than hidden dimensions; at decode the direction of the one row; of"
        " products each head's share of a feature, which is scaled alike in all heads"
    )
    broken: ClassVar[bool] = True
    source: ClassVar[str] = "published TSQP, later version (D X + a b^T X cover, Matmul cover)"
    tolerance: ClassVar[float] = 2e-5
    cost: ClassVar[str] = "a few passes over input and output; nothing more on the wire"

    def mask(self, x_TI: torch.Tensor, randomness: Randomness) -> Masked:
        """Mix the rows. GPU sees: M X."""
        T = len(x_TI)
        d_T1 = _diagonal(randomness, T)
        a_T1, b_T1 = (uniform(randomness, T, 1, low=-1, high=1) for _ in range(2))
        # 1 + b^T D^-1 a, what the inverse divides by, is kept away from 0 by its sign.
        overlap = (b_T1 * a_T1 / d_T1).sum()
        a_T1 = a_T1 * (overlap.sign() / max(1.0, float(overlap.abs())))
        divisor = 1 + (b_T1 * a_T1 / d_T1).sum()
        x64_TI = x_TI.double()
        mixed_TI = d_T1 * x64_TI + a_T1 * (b_T1 * x64_TI).sum(0)

        def unmask(y_TO: torch.Tensor) -> torch.Tensor:
            z_TO = y_TO.double() / d_T1
            return (z_TO - a_T1 / d_T1 * ((b_T1 * z_TO).sum(0) / divisor)).to(y_TO.dtype)

        return Masked((mixed_TI.to(x_TI.dtype),), unmask)

    def mask_product(
        self, a_BMJ: torch.Tensor, b_BJN: torch.Tensor, randomness: Randomness
    ) -> MaskedProduct:
        """Shuffle and scale all three axes. GPU sees: both operands shuffled and scaled."""
        shuffled = shuffled_product(a_BMJ, b_BJN, randomness)
        sizes = (*a_BMJ.shape[1:], b_BJN.shape[2])
        d1, d2, d3 = (_diagonal(randomness, size).to(a_BMJ.dtype)[:, 0] for size in sizes)
        a = shuffled.a * d1[:, None] * d2
        b = shuffled.b / d2[:, None] * d3
        return MaskedProduct(a, b, lambda y: shuffled.unmask(y / d1[:, None] / d3))


def _diagonal(randomness: Randomness, size: int) -> torch.Tensor:
    """Draw factors of either sign between 1 and 2, away from 0: they are divided by."""
    return uniform(randomness, size, 1, low=1, high=2) * signs(randomness, size, 1)
