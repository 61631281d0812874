"""Makes unmasking factors u = r W ahead of use, many tokens at a time.

One row against a weight is bound by reading the weight; hundreds of rows are bound by arithmetic,
thirty times cheaper each. So pads are made in large products, site by site: one weight is read
from the model directory, quantised, multiplied with, and dropped.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from protocol.integer import DIGITS, ring_product
from protocol.model.checkpoint import Checkpoint
from protocol.model.config import ModelConfig
from protocol.model.quantized import load_quantized
from protocol.model.weights import CPU, load_linear
from tee_side.masks.mask import AdditiveMask
from tee_side.pads.layout import PadLayout, SiteShape
from tee_side.pads.store import PadStore
from tee_side.sites import tensors_of

# Called with (sites done, sites in all) after each site.
OnSite = Callable[[int, int], None]


class PadMaker:
    """Computes u for what a store asks; memory is one layer's weight and one site's products."""

    def __init__(self, mask: AdditiveMask, checkpoint: Checkpoint, config: ModelConfig) -> None:
        self._mask = mask
        self._checkpoint = checkpoint
        self._config = config

    def fill(self, store: PadStore, tokens: int, on_site: OnSite | None = None) -> None:
        """Make pads for `tokens` more tokens, or as many as there is room for.

        Raises ModelError if the model directory has changed, PadBankError if the disk is full.
        """
        sites = store.layout.sites
        with store.begin(tokens) as batch:
            for done, site in enumerate(sites, start=1):
                batch.put(site.number, self._products(site, batch.r(site.number)))
                if on_site is not None:
                    on_site(done, len(sites))
            batch.commit()

    def _products(self, site: SiteShape, words_TI: torch.Tensor) -> torch.Tensor:
        """Return u as int32 [T, O]: ring elements, or the bits of float32."""
        r_TI = self._mask.draw(words_TI)
        if self._mask.arithmetic == "int8":
            weights = load_quantized(self._checkpoint, self._config, site.layer, site.operator)
            return ring_product(r_TI, weights.weight)
        fused = load_linear(
            self._checkpoint,
            self._config,
            site.layer,
            site.operator,
            dtype=torch.float32,
            device=CPU,
        )
        # No bias: it is added to the unmasked result.
        return (r_TI @ fused.weight.t()).view(torch.int32)


def product_operations(layout: PadLayout) -> int:
    """Return the int8 multiplications and additions behind the pads of one token."""
    return sum(2 * DIGITS * site.in_features * site.out_features for site in layout.sites)


def check_sites(checkpoint: Checkpoint, config: ModelConfig, layout: PadLayout) -> None:
    """Check that the directory has the weights that pads are made from. Raises ModelError."""
    checkpoint.require(tensors_of([(site.layer, site.operator) for site in layout.sites], config))
