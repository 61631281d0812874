"""Static permutation of the hidden axis, undone in the weights that the server holds."""

from __future__ import annotations

from typing import Annotated, ClassVar

import torch
from pydantic import Field

from tee_side.protect.masks.mask import FeatureMask, FeatureSite, KeyedTransform, Masked
from tee_side.protect.randomness import Randomness
from tsqp.lab.research.draws import permutation


class FeaturePermutation(FeatureMask):
    """Shuffle the input's features, and each module's outputs, within blocks of the axis.

    `block`: features of a block; None for one block, the whole axis.
    """

    name: ClassVar[str] = "feature-permutation"
    hides: ClassVar[str] = "which hidden feature is which, on the way in and on the way out"
    known_break: ClassVar[str] = (
        "vocabulary matching of sorted vectors (arXiv 2505.18332): 97.6 % of tokens; matching"
        " sorted rows and columns of the public weights with the server's gives the permutation"
    )
    broken: ClassVar[bool] = True
    source: ClassVar[str] = "STIP, arXiv 2312.00025 (hidden axis); Centaur, PermLLM"
    # The same products as in the clear, added up in another order.
    tolerance: ClassVar[float] = 1e-5
    cost: ClassVar[str] = "a gather each way; weights provisioned once; nothing more on the wire"

    block: Annotated[int, Field(ge=2)] | None = None

    def transform(self, site: FeatureSite) -> KeyedTransform:
        """Draw a permutation for the input and one for each module's output."""
        order_I = self._order(site.in_features, site.randomness)
        orders = [self._order(size, site.randomness) for size in site.outputs]
        starts = [sum(site.outputs[:module]) for module in range(len(orders))]
        order_O = torch.cat([start + order for start, order in zip(starts, orders, strict=True)])
        return _ShuffledSite(order_I, order_O)

    def _order(self, size: int, randomness: Randomness) -> torch.Tensor:
        block = self.block or size
        starts = range(0, size, block)
        return torch.cat([at + permutation(randomness, min(block, size - at)) for at in starts])


class _ShuffledSite(KeyedTransform):
    def __init__(self, order_I: torch.Tensor, order_O: torch.Tensor) -> None:
        self._order_I, self._order_O = order_I, order_O
        self._back_O = order_O.argsort()

    def weight(self, weight_OI: torch.Tensor) -> torch.Tensor:
        return weight_OI[self._order_O][:, self._order_I]

    def mask(self, x_TI: torch.Tensor, randomness: Randomness) -> Masked:
        """Shuffle. GPU sees: every value of the input, at the place of another feature."""
        return Masked((x_TI[:, self._order_I],), lambda y_TO: y_TO[:, self._back_O])
