"""Fresh permutation of the rows of a call, with dummy rows among them."""

from __future__ import annotations

from typing import Annotated, ClassVar

import torch
from pydantic import Field

from tee_side.protect.masks.mask import Masked, MaskedProduct, RowMask
from tee_side.protect.randomness import Randomness
from tsqp.lab.research.draws import integers, permutation, shuffled_product, uniform


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
        return shuffled_product(a_BMJ, b_BJN, randomness)

    @staticmethod
    def _shuffled(rows: torch.Tensor, real: int, randomness: Randomness) -> Masked:
        order = permutation(randomness, len(rows))
        back = order.argsort()[:real]
        return Masked((rows[order],), lambda y: y[back])
