"""Pads mixed from a few. They show that an attack bites, and must never hide anything."""

from __future__ import annotations

from typing import Annotated, ClassVar

import torch
from pydantic import Field

from protocol.messages import Arithmetic
from tee_side.protect.masks.mask import AdditiveMask, Factors, Masked
from tee_side.protect.randomness import Keystream

# As in reused_pad.py: the same in every process that reads a pad bank, and unknown to the attack.
_KEY = b"the basis of some weakened pads."


class LowDimensionalPad(AdditiveMask):
    """Send x + c A mod 2^32: c is fresh for every row, A [pads, I] is always the same.

    That saves products in the TEE, as u = c (A W), and is what some schemes do. It exists only to
    show that the attack on it works. Never use it.
    """

    name: ClassVar[str] = "pad-low-dimensional"
    hides: ClassVar[str] = "nothing for long; weakened on purpose, never to be used"
    known_break: ClassVar[str] = (
        "rows of a known token differ by what the pads span; a few more such rows than there are"
        " pads give the span, and what is outside of it is in the clear (attack pad-basis)"
    )
    broken: ClassVar[bool] = True
    source: ClassVar[str] = "masks from a small basis, arXiv 2602.11088"
    tolerance: ClassVar[float] = 0.0
    cost: ClassVar[str] = "as pad"
    arithmetic: ClassVar[Arithmetic] = "int8"

    pads: Annotated[int, Field(ge=1, le=1024)] = 10

    def draw(self, words_TI: torch.Tensor) -> torch.Tensor:
        """Mix the pads, with the first words of a row as coefficients.

        Raises ValueError for more pads than a row has words.
        """
        _, in_features = words_TI.shape
        if self.pads > in_features:
            raise ValueError(
                f"pad-low-dimensional: pads: got {self.pads}, expected at most {in_features}"
            )
        basis_KI = Keystream(_KEY).rows(range(self.pads), 0, in_features)
        # One by one: integers wrap, and torch has no fast product of int32 matrices.
        r_TI = torch.zeros_like(words_TI)
        for pad, basis_I in enumerate(basis_KI):
            r_TI += words_TI[:, pad, None] * basis_I
        return r_TI

    def mask(self, x_TI: torch.Tensor, factors: Factors) -> Masked:
        """Add the mixed pad. GPU sees: x + c A."""
        return Masked((x_TI + factors.r,), lambda y_TO: y_TO - factors.u)
