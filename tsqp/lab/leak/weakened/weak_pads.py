"""Pads that are weak on purpose: they show that an attack bites, and must never hide anything."""

from typing import Annotated, ClassVar

import torch
from pydantic import Field

from protocol.messages import Arithmetic
from tee_side.protect.masks.mask import AdditiveMask, Factors, Masked
from tee_side.protect.randomness import Keystream

# A pad bank may outlive the process that made it, so these have to be the same in each. They stand
# for secrets: the attacks do not look here.
_ONE_PAD_KEY = b"the one pad of a weakened scheme"
_BASIS_KEY = b"the basis of some weakened pads."


class _WeakPad(AdditiveMask):
    broken: ClassVar[bool] = True
    tolerance: ClassVar[float] = 0.0
    cost: ClassVar[str] = "as pad"
    arithmetic: ClassVar[Arithmetic] = "int8"

    def mask(self, x_TI: torch.Tensor, factors: Factors) -> Masked:
        """Add the pad. GPU sees: x + r, with an r that tells of other rows' r."""
        return Masked((x_TI + factors.r,), lambda y_TO: y_TO - factors.u)


class ReusedPad(_WeakPad):
    """Send x + r mod 2^32 with the same r for every row: `pad` without its one rule.

    It exists only to show that the attack on reused pads works. Never use it.
    """

    name: ClassVar[str] = "pad-reused"
    hides: ClassVar[str] = "nothing; weakened on purpose, never to be used"
    known_break: ClassVar[str] = (
        "differences of rows cancel the pad: one row that is guessed, as that of BOS, gives the pad"
        " and with it every row (attack pad-reuse)"
    )
    source: ClassVar[str] = "static masks that were broken in arXiv 2602.11088"

    def draw(self, words_TI: torch.Tensor) -> torch.Tensor:
        """Return the one r for every row, whatever the words are."""
        r_1I = Keystream(_ONE_PAD_KEY).rows(range(1), {0: words_TI.shape[1]})[0].elements()
        return r_1I.repeat(len(words_TI), 1)


class LowDimensionalPad(_WeakPad):
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
    source: ClassVar[str] = "masks from a small basis, arXiv 2602.11088"

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
        basis_KI = Keystream(_BASIS_KEY).rows(range(self.pads), {0: in_features})[0].elements()
        # One by one: integers wrap, and torch has no fast product of int32 matrices.
        r_TI = torch.zeros_like(words_TI)
        for pad, basis_I in enumerate(basis_KI):
            r_TI += words_TI[:, pad, None] * basis_I
        return r_TI
