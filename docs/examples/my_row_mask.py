"""A row mask of my own: random signs and sizes, then Householder reflections among shield rows."""

from typing import Annotated, ClassVar

import torch
from pydantic import Field

from tee_side.protect.masks.mask import Masked
from tee_side.protect.randomness import Randomness
from tsqp.lab.research.draws import normal, signs, uniform
from tsqp.mask_kinds import RowMask


class RowReflection(RowMask):
    """Send H_k ... H_1 D [X; S]: S are `shield_rows` random rows as large as X's, D is diagonal.

    A reflection H = I - 2 v v^T costs two passes over the rows, where a rotation costs a QR.
    """

    name: ClassVar[str] = "row-reflection"
    hides: ClassVar[str] = "single rows, their norms and signs"
    known_break: ClassVar[str] = (
        "subspace membership: the tokens' rows stay in the span of what crosses, as under"
        " row-rotation, while rows + shield_rows < hidden dimensions, and so at decode"
    )
    broken: ClassVar[bool] = True
    source: ClassVar[str] = "docs/write-a-mask.md"
    tolerance: ClassVar[float] = 2e-5
    cost: ClassVar[str] = "2 x reflections passes each way; shield_rows more rows on the wire"

    shield_rows: Annotated[int, Field(ge=1, le=1024)] = 4
    reflections: Annotated[int, Field(ge=1, le=64)] = 3

    def mask(self, x_TI: torch.Tensor, randomness: Randomness) -> Masked:
        """Scale and reflect the rows. GPU sees: H_k ... H_1 D [X; S]."""
        T, in_features = x_TI.shape
        rows = T + self.shield_rows
        size = x_TI.double().square().mean().sqrt()
        shield = normal(randomness, self.shield_rows, in_features) * size
        d_R1 = uniform(randomness, rows, 1, low=0.5, high=2) * signs(randomness, rows, 1)
        v_kR1 = normal(randomness, self.reflections, rows, 1)
        v_kR1 /= v_kR1.norm(dim=1, keepdim=True)

        sent_RI = torch.cat([x_TI.double(), shield]) * d_R1
        for v_R1 in v_kR1:
            sent_RI -= 2 * v_R1 @ (v_R1.t() @ sent_RI)

        def unmask(y_RO: torch.Tensor) -> torch.Tensor:
            plain_RO = y_RO.double()
            for v_R1 in v_kR1.flip(0):  # each reflection undoes itself
                plain_RO = plain_RO - 2 * v_R1 @ (v_R1.t() @ plain_RO)
            return (plain_RO / d_R1)[:T].to(y_RO.dtype)

        return Masked((sent_RI.to(x_TI.dtype),), unmask)
