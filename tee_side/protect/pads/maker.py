"""Makes unmasking factors u = r W ahead of use, many tokens at a time.

One row against a weight is bound by reading the weight; hundreds of rows are bound by arithmetic,
thirty times cheaper each. So pads are made in large products, site by site. Where the TEE holds no
weights for other reasons, one at a time is read from the model directory, quantised, multiplied
with, and dropped: that costs six times the product for 32 tokens, and half of it for 512.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TypeAlias

import torch

from protocol.integer import ring_product
from protocol.messages import Arithmetic
from protocol.model.checkpoint import Checkpoint
from protocol.model.config import ModelConfig
from protocol.model.quantized import QuantizedLinear, load_quantized
from protocol.model.weights import CPU, load_linear
from tee_side.protect.masks.mask import AdditiveMask
from tee_side.protect.pads.layout import SiteShape
from tee_side.protect.pads.store import Batch, PadStore
from tee_side.words import Site

# Called with (sites done, sites in all) after each site.
OnSite: TypeAlias = Callable[[int, int], None]

# Returns a site's weight [O, I]: int8 for products in the ring, float32 for masks over floats.
Weights: TypeAlias = Callable[[SiteShape], torch.Tensor]

# Raises where quantised weights are not those that a site's scales belong to.
CheckWeights: TypeAlias = Callable[[Site, QuantizedLinear], None]


class PadMaker:
    """Computes u for what a store asks; memory is one site's weight and products."""

    def __init__(self, mask: AdditiveMask, weights: Weights) -> None:
        self._mask = mask
        self._weights = weights

    def fill(self, store: PadStore, tokens: int, on_site: OnSite | None = None) -> None:
        """Make pads for `tokens` more tokens, rounded up to whole groups of the store.

        Raises what `weights` raises, PadBankError if the disk is full, and ValueError where the
        store has no room for so many.
        """
        sites, put = store.layout.sites, None
        with (
            store.begin(-(-tokens // store.group) * store.group) as batch,
            ThreadPoolExecutor(1, "pads put") as writer,
        ):
            for done, site in enumerate(sites, start=1):
                u_TO = self._products(site, batch.r(site.number))
                if put is not None:
                    put.result()
                # A disk takes half as long as the products; what is next does not wait for it.
                put = writer.submit(_put, batch, site.number, u_TO)
                if on_site is not None:
                    on_site(done, len(sites))
            if put is not None:
                put.result()
            batch.commit()

    def _products(self, site: SiteShape, words_TI: torch.Tensor) -> torch.Tensor:
        """Return u as int32 [T, O]: ring elements, or the bits of float32. Biases come later."""
        r_TI, weight_OI = self._mask.draw(words_TI), self._weights(site)
        if self._mask.arithmetic == "int8":
            return ring_product(r_TI, weight_OI)
        return (r_TI @ weight_OI.t()).view(torch.int32)


# Inference mode is each thread's own, and a store may have been made in it.
@torch.inference_mode()
def _put(batch: Batch, site: int, u_TO: torch.Tensor) -> None:
    batch.put(site, u_TO)


def read_weights(
    checkpoint: Checkpoint,
    config: ModelConfig,
    arithmetic: Arithmetic,
    check: CheckWeights | None = None,
) -> Weights:
    """Return a source that reads a weight from the model directory each time it is asked.

    `check`: called with a site's quantised weights when they are first read; None where nothing is
    known to compare them with. The source raises ModelError if the directory has changed, and what
    `check` raises.
    """
    checked: set[Site] = set()

    def integers(shape: SiteShape) -> torch.Tensor:
        weights = load_quantized(checkpoint, config, shape.layer, shape.operator)
        if check is not None and shape.site not in checked:
            check(shape.site, weights)
            checked.add(shape.site)
        return weights.weight

    def floats(shape: SiteShape) -> torch.Tensor:
        return load_linear(
            checkpoint, config, shape.layer, shape.operator, dtype=torch.float32, device=CPU
        ).weight

    return integers if arithmetic == "int8" else floats


def held_or(held: Mapping[Site, QuantizedLinear], otherwise: Weights) -> Weights:
    """Return a source that takes int8 weights that are in memory anyway, and else asks another.

    `held` may still be filled afterwards. Its weights have been checked by who put them there.
    """

    def find(shape: SiteShape) -> torch.Tensor:
        weights = held.get(shape.site)
        return otherwise(shape) if weights is None else weights.weight

    return find
