"""Fresh random orthogonal mixing of the rows of a call with shield rows."""

from __future__ import annotations

from typing import Annotated, ClassVar

import torch
from pydantic import Field

from tee_side.protect.masks.mask import Masked, RowMask
from tee_side.protect.randomness import Randomness
from tsqp.lab.research.draws import orthogonal


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
        shield = randomness.normal(self.shield_rows, in_features) * size
        # float32 is as exact as the product that follows, and half the work of float64.
        rows = torch.cat([x_TI.float(), shield.float()])
        q = orthogonal(randomness, T + self.shield_rows).float()

        def unmask(y_RO: torch.Tensor) -> torch.Tensor:
            return (q[:, :T].t() @ y_RO.float()).to(y_RO.dtype)

        return Masked(((q @ rows).to(x_TI.dtype),), unmask)
