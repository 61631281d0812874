"""Masks of single calls: rows are shuffled, mixed or rotated among each other, or get noise."""

from typing import Annotated, ClassVar

import torch
from pydantic import Field

from tee_side.protect.masks.mask import AdditiveMask, Factors, Masked
from tee_side.protect.randomness import Randomness
from tsqp.lab.research.draws import (
    integers,
    normal,
    orthogonal,
    permutation,
    signs,
    uniform,
)
from tsqp.mask_kinds import MaskedProduct, RowMask


class RowPermutation(RowMask):
    """Shuffle the T rows of a call, of all its sequences, with `dummy_rows` mixtures of them.

    Broken where the weights are public: every row still crosses as it is, and a row names its
    token (vocabulary matching over all rows not yet used, arXiv 2505.18332).
    """

    name: ClassVar[str] = "row-permutation"
    hides: ClassVar[str] = "which row is of which position and sequence"
    known_break: ClassVar[str] = (
        "vocabulary matching against all rows that are left (arXiv 2505.18332): 97.6 % of tokens;"
        " of the embedding the token ids themselves cross, in random order among random ones"
    )
    broken: ClassVar[bool] = True
    source: ClassVar[str] = "published TSQP; STIP (token axis)"
    tolerance: ClassVar[float] = 1e-5
    cost: ClassVar[str] = "a gather each way; dummy_rows more rows on the wire and at the server"

    dummy_rows: Annotated[int, Field(ge=1, le=1024)] = 4

    def mask(self, x_TI: torch.Tensor, randomness: Randomness) -> Masked:
        """Append signed mixtures of two rows, and shuffle. GPU sees: real and dummy rows."""
        pairs = integers(randomness, len(x_TI), 2, self.dummy_rows)
        angles = uniform(randomness, self.dummy_rows, 1, low=0.2, high=1.4).to(x_TI.dtype)
        dummies = x_TI[pairs[0]] * angles.cos() - x_TI[pairs[1]] * angles.sin()
        return self._shuffled(torch.cat([x_TI, dummies]), len(x_TI), randomness)

    def mask_ids(self, ids_T: torch.Tensor, vocab_size: int, randomness: Randomness) -> Masked:
        """Append random ids, and shuffle. GPU sees: the token ids, in random order."""
        dummies = integers(randomness, vocab_size, self.dummy_rows)
        return self._shuffled(torch.cat([ids_T, dummies]), len(ids_T), randomness)

    def mask_product(
        self, a_BMJ: torch.Tensor, b_BJN: torch.Tensor, randomness: Randomness
    ) -> MaskedProduct:
        """Shuffle all three axes. GPU sees: both operands with rows and columns shuffled."""
        return _shuffled_product(a_BMJ, b_BJN, randomness)

    @staticmethod
    def _shuffled(rows: torch.Tensor, real: int, randomness: Randomness) -> Masked:
        order = permutation(randomness, len(rows))
        back = order.argsort()[:real]
        return Masked((rows[order],), lambda y: y[back])


def _shuffled_product(
    a_BMJ: torch.Tensor, b_BJN: torch.Tensor, randomness: Randomness
) -> MaskedProduct:
    """Shuffle all three axes of a product; `unmask` puts the rows and columns of y in order."""
    m, j, n = (permutation(randomness, size) for size in (*a_BMJ.shape[1:], b_BJN.shape[2]))
    back_m, back_n = m.argsort(), n.argsort()
    a, b = a_BMJ[:, m][:, :, j], b_BJN[:, j][:, :, n]
    return MaskedProduct(a, b, lambda y_BMN: y_BMN[:, back_m][:, :, back_n])


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
        shuffled = _shuffled_product(a_BMJ, b_BJN, randomness)
        sizes = (*a_BMJ.shape[1:], b_BJN.shape[2])
        d1, d2, d3 = (_diagonal(randomness, size).to(a_BMJ.dtype)[:, 0] for size in sizes)
        a = shuffled.a * d1[:, None] * d2
        b = shuffled.b / d2[:, None] * d3
        return MaskedProduct(a, b, lambda y: shuffled.unmask(y / d1[:, None] / d3))


def _diagonal(randomness: Randomness, size: int) -> torch.Tensor:
    """Draw factors of either sign between 1 and 2, away from 0: they are divided by."""
    return uniform(randomness, size, 1, low=1, high=2) * signs(randomness, size, 1)


class RowRotation(RowMask):
    """Send Q [X; S] with Q orthogonal and S `shield_rows` random rows as large as X's.

    Broken where the weights are public, unless rows and shield rows fill the hidden axis.
    """

    name: ClassVar[str] = "row-rotation"
    hides: ClassVar[str] = "single rows, their norms and inner products"
    known_break: ClassVar[str] = (
        "subspace membership: the tokens' rows stay in the span of what crosses, 96 of 96 tokens on"
        " synthetic data while rows + shield_rows < hidden dimensions, and so at decode"
    )
    broken: ClassVar[bool] = True
    source: ClassVar[str] = "GELO, arXiv 2603.05035"
    tolerance: ClassVar[float] = 2e-5
    cost: ClassVar[str] = "a QR of T + shield_rows, and two products with it; more rows on the wire"

    shield_rows: Annotated[int, Field(ge=1, le=1024)] = 8

    def mask(self, x_TI: torch.Tensor, randomness: Randomness) -> Masked:
        """Rotate the rows among each other. GPU sees: Q [X; S]."""
        T, in_features = x_TI.shape
        size = x_TI.double().square().mean().sqrt()
        shield = normal(randomness, self.shield_rows, in_features) * size
        # float32 is as exact as the product that follows, and half the work of float64.
        rows = torch.cat([x_TI.float(), shield.float()])
        q = orthogonal(randomness, T + self.shield_rows).float()

        def unmask(y_RO: torch.Tensor) -> torch.Tensor:
            return (q[:, :T].t() @ y_RO.float()).to(y_RO.dtype)

        return Masked(((q @ rows).to(x_TI.dtype),), unmask)


class FloatNoise(AdditiveMask):
    """Send x + r with r normal of standard deviation `sigma`, and subtract r W from the reply.

    No pad: a float has no uniform distribution to hide in. Noise small enough to leave digits for
    the value leaves the value; larger noise destroys the result as well, since floats cancel.
    """

    name: ClassVar[str] = "float-noise"
    hides: ClassVar[str] = "values, as far as noise of sigma hides them"
    known_break: ClassVar[str] = (
        "nearest vocabulary entry in layer 0, activations of unit RMS: 100 % of tokens at sigma 1,"
        " 64 % at 4, 1 % at 16; all that crosses for a token, in every layer, taken together tells"
        " far more (docs/leakage.md)"
    )
    broken: ClassVar[bool] = True
    source: ClassVar[str] = "common in prototypes (float one-time pads), as in published TSQP"
    # The reply carries sigma times the rounding of a sum of in_features products.
    tolerance: ClassVar[float] = 1e-4
    cost: ClassVar[str] = "as pad, in floats: r W is computed in the TEE, ahead of use"

    sigma: Annotated[float, Field(gt=0, le=1e4)] = 1.0

    def draw(self, words_TI: torch.Tensor) -> torch.Tensor:
        """Turn uniform words into normal numbers, float32, through the inverse distribution."""
        uniform_TI = (words_TI.double() + 0.5) / 2**32 + 0.5
        r_TI: torch.Tensor = torch.special.ndtri(uniform_TI) * self.sigma
        return r_TI.float()

    def mask(self, x_TI: torch.Tensor, factors: Factors) -> Masked:
        """Add noise. GPU sees: x + r in the activations' dtype."""
        # Summed in float32 and rounded once, since u belongs to the r of all its bits. An r that
        # was rounded to the activations' dtype would make no smaller error, and one that is
        # rounded further, the same for all dtypes, would send the last bits of x in the clear.
        sent = (x_TI.float() + factors.r).to(x_TI.dtype)
        return Masked((sent,), lambda y_TO: (y_TO.float() - factors.u).to(y_TO.dtype))
