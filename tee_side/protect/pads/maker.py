"""Makes unmasking factors u = r W ahead of use, many tokens at a time, and beside a run.

One row against a weight is bound by reading the weight; hundreds of rows are bound by arithmetic,
thirty times cheaper each. So pads are made in large products, site by site. Where the TEE holds no
weights for other reasons, one at a time is read from the model directory, quantised, multiplied
with, and dropped: that costs six times the product for 32 tokens, and half of it for 512.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from types import MappingProxyType
from typing import Literal, TypeAlias

import torch

from protocol.errors import TsqpError
from protocol.integer import ring_product
from protocol.messages import Arithmetic
from protocol.model.checkpoint import Checkpoint
from protocol.model.config import ModelConfig
from protocol.model.quantized import QuantizedLinear, load_quantized
from protocol.model.weights import CPU, load_linear
from tee_side.protect.masks.mask import AdditiveMask
from tee_side.protect.pads.store import MadePads, PadStore
from tee_side.protect.sites import SiteShape
from tee_side.words import Site

# Called with (sites done, sites in all) after each site.
OnSite: TypeAlias = Callable[[int, int], None]

# Returns a site's weight [O, I]: int8 for products in the ring, float32 for masks over floats.
Weights: TypeAlias = Callable[[SiteShape], torch.Tensor]

# Raises where quantised weights are not those that a site's scales belong to.
CheckWeights: TypeAlias = Callable[[Site, QuantizedLinear], None]

# What else is to be done: nothing, or steps.
Load: TypeAlias = Literal["idle", "steps"]
# Tells what it is now.
TellLoad: TypeAlias = Callable[[Load], None]

# Of the thread, and of those that its kernels start: where all cores are taken, steps go first. Not
# by more: a run may wait for it, and for the interpreter's lock that it has. As a thread for idle
# cores it cost 64 streams 5 % less, and held a run up for as long as others took its core.
_NICENESS = 5


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
def _put(batch: MadePads, site: int, u_TO: torch.Tensor) -> None:
    batch.put(site, u_TO)


def read_weights(
    checkpoint: Checkpoint,
    config: ModelConfig,
    arithmetic: Arithmetic,
    check: CheckWeights | None = None,
    *,
    held: Mapping[Site, QuantizedLinear] = MappingProxyType({}),
) -> Weights:
    """Return a source that reads a weight from the model directory each time it is asked.

    `check`: called with a site's quantised weights when they are first read; None where nothing is
    known to compare them with. `held`: integers that are in memory anyway, checked by who put them
    there; they are not read, and may still be filled afterwards. The source raises ModelError if
    the directory has changed, and what `check` raises.
    """
    checked: set[Site] = set()

    def integers(shape: SiteShape) -> torch.Tensor:
        weights = held.get(shape.site)
        if weights is None:
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


class BackgroundMaker:
    """Calls `make` in turns with a run of one thread: one of them at a time makes pads.

    `wanted`: for how many tokens pads should be made now, under a load. `make`: makes them, and
    fails with TsqpError where that is no mistake of this program: a full disk, weights that
    changed. It is called again when the load changes; `failure` is what it met last.
    """

    def __init__(self, wanted: Callable[[Load], int], make: Callable[[int], None]) -> None:
        self.failure: TsqpError | None = None
        self._wanted, self._make = wanted, make
        # Guards all below; `wanted` may be another number when it is notified.
        self._changed = threading.Condition()
        # None while no thread is to run.
        self._load: Load | None = None
        self._makes = self._held_off = self._failed = False
        self._mistake: BaseException | None = None

    def notify(self) -> None:
        """Say that `wanted` may have changed."""
        if self._load is not None:
            with self._changed:
                self._changed.notify_all()

    @contextmanager
    def held_off(self) -> Iterator[None]:
        """Wait for the batch in work, if there is one, and let none begin while the block runs."""
        with self._changed:
            self._held_off = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._makes)
        try:
            yield
            # What it met, the run has not: it may try again.
            self._failed, self.failure = False, None
        finally:
            with self._changed:
                self._held_off = False
                self._changed.notify_all()

    @contextmanager
    def running(self) -> Iterator[TellLoad]:
        """Make pads while the block runs, which says again and again what the load is.

        At first it is idle. Leaving the block waits for the batch in work. A failure does not end
        the run, which goes on with the pads that are left; one that waits for pads gets the error
        then. What `wanted` and `make` raise by a mistake of this program ends the thread, and is
        raised where the load is told, or when the block is left.
        """
        self._load, self._failed, self._mistake = "idle", False, None
        thread = threading.Thread(target=self._run, name="pads", daemon=True)
        thread.start()
        try:
            yield self._set_load
        finally:
            with self._changed:
                self._load = None
                self._changed.notify_all()
            thread.join()
        self._raise_mistake()

    def _set_load(self, load: Load) -> None:
        self._raise_mistake()
        if self._load not in (None, load):
            with self._changed:
                self._load, self._failed = load, False
                self._changed.notify_all()

    def _raise_mistake(self) -> None:
        if self._mistake is not None:
            raise self._mistake

    def _run(self) -> None:
        os.nice(_NICENESS)  # on Linux, of this thread
        try:
            while tokens := self._next_batch():
                failure: TsqpError | None = None
                try:
                    self._make(tokens)
                except TsqpError as error:
                    failure = error
                with self._changed:
                    self._makes, self._failed, self.failure = False, failure is not None, failure
                    self._changed.notify_all()
        except BaseException as error:  # noqa: BLE001 - handed to the thread that tells the load
            with self._changed:
                self._makes, self._mistake = False, error
                self._changed.notify_all()

    def _next_batch(self) -> int:
        """Wait until pads are wanted, and return for how many tokens; 0: the end."""
        with self._changed:
            while self._load is not None:
                tokens = 0 if self._held_off or self._failed else self._wanted(self._load)
                if tokens > 0:
                    self._makes = True
                    return tokens
                self._changed.wait()
            return 0
