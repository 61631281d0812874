"""One pad for every row. It shows that an attack bites, and must never hide anything."""

from __future__ import annotations

from typing import ClassVar

import torch

from protocol.messages import Arithmetic
from tee_side.protect.masks.mask import AdditiveMask, Factors, Masked
from tee_side.protect.randomness import Keystream

# A pad bank may outlive the process that made it, so the one pad has to be the same in each. It
# stands for a secret: the attack does not look here.
_KEY = b"the one pad of a weakened scheme"


class ReusedPad(AdditiveMask):
    """Send x + r mod 2^32 with the same r for every row: `pad` without its one rule.

    It exists only to show that the attack on reused pads works. Never use it.
    """

    name: ClassVar[str] = "pad-reused"
    hides: ClassVar[str] = "nothing; weakened on purpose, never to be used"
    known_break: ClassVar[str] = (
        "differences of rows cancel the pad: one row that is guessed, as that of BOS, gives the pad"
        " and with it every row (attack pad-reuse)"
    )
    broken: ClassVar[bool] = True
    source: ClassVar[str] = "static masks that were broken in arXiv 2602.11088"
    tolerance: ClassVar[float] = 0.0
    cost: ClassVar[str] = "as pad"
    arithmetic: ClassVar[Arithmetic] = "int8"

    def draw(self, words_TI: torch.Tensor) -> torch.Tensor:
        """Return the one r for every row, whatever the words are."""
        r_1I = Keystream(_KEY).rows(range(1), 0, words_TI.shape[1])
        return r_1I.repeat(len(words_TI), 1)

    def mask(self, x_TI: torch.Tensor, factors: Factors) -> Masked:
        """Add the pad. GPU sees: x + r, with an r that it has seen before."""
        return Masked((x_TI + factors.r,), lambda y_TO: y_TO - factors.u)
