"""A mask of a user's own, as a file: every row scaled by a factor of its own."""

from typing import ClassVar

import torch

from tee_side.protect.masks.mask import Masked
from tee_side.protect.randomness import Randomness
from tsqp.lab.research.draws import uniform
from tsqp.mask_kinds import RowMask


class RowScale(RowMask):
    """Scale rows. Broken: every row keeps its direction, which names the token."""

    name: ClassVar[str] = "row-scale"
    hides: ClassVar[str] = "norms of rows"
    known_break: ClassVar[str] = "vocabulary matching of rows that are scaled to norm 1"
    broken: ClassVar[bool] = True
    source: ClassVar[str] = "a test"
    tolerance: ClassVar[float] = 1e-5
    cost: ClassVar[str] = "a pass each way"

    def mask(self, x_TI: torch.Tensor, randomness: Randomness) -> Masked:
        """Scale. GPU sees: the rows' directions."""
        factors_T1 = uniform(randomness, len(x_TI), 1, low=1, high=2).to(x_TI.dtype)
        return Masked((x_TI * factors_T1,), lambda y_TO: y_TO / factors_T1)
