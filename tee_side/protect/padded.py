"""A site under pads in two passes: compiled, where a mask and a check would take a pass each.

What crosses, and what comes of it, is bit for bit what the site, `Pad` and `ExactCheck` give
one after the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from tee_side.native import kernels as compiled
from tee_side.protect.pads.source import PadLane
from tee_side.protect.sites import DynamicSite, IntegerSite
from tee_side.protect.verification import ExactCheck

Tensor = torch.Tensor


class Padded(NamedTuple):
    """One input under its pad. `sent`: what crosses; `encoded`: the plain integers.

    `scale_T`: of the rows; None for the site's one step.
    """

    of: PaddedSite
    sent: tuple[Tensor]
    encoded: Tensor
    u_TO: Tensor
    scale_T: Tensor | None
    expected_Tk: Tensor | None

    def __repr__(self) -> str:
        # Neither in a traceback nor in a log: u gives the result away to the observer of a link.
        return "Padded()"

    def reveal(self, outputs: Sequence[Tensor]) -> Tensor | None:
        """Take the pad away, check, scale back and add the bias; None for a wrong product."""
        site, check = self.of.site, self.of.check
        vectors_kO = None if check is None else check.vectors_kO
        return compiled.decode(
            *(outputs[0], self.u_TO, self.scale_T, site.factor_O, site.bias_O, site.dtype),
            *(vectors_kO, self.expected_Tk),
        )


@dataclass(frozen=True, slots=True, eq=False)
class PaddedSite:
    """A site's input and output under pads; `number`: the site's, in the pads' layout.

    `check`: of the products, None for none.
    """

    site: IntegerSite | DynamicSite
    number: int
    pads: PadLane
    check: ExactCheck | None

    def hide(self, x_TI: Tensor) -> Padded:
        """Quantise x and add its pad.

        GPU sees: uniform ring elements. Raises ActivationRangeError, and as `PadLane.words`.
        """
        r_TI, u_TO = self.pads.words(self.number, x_TI.shape[0])
        site, check = self.site, self.check
        products = None if check is None else (check.low_kI, check.high_kI)
        q_TI, sent_TI, norm, scale_T, expected = compiled.encode(x_TI, site.step, r_TI, products)
        if not norm <= site.row_limit:
            site.refuse(norm)
        return Padded(self, (sent_TI,), q_TI, u_TO, scale_T, expected)
