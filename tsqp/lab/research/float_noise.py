"""Gaussian noise over floats: what many prototypes call a pad."""

from __future__ import annotations

from typing import Annotated, ClassVar

import torch
from pydantic import Field

from tee_side.protect.masks.mask import AdditiveMask, Factors, Masked


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
