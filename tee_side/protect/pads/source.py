"""The pads of a run: made ahead of use and beside it, and drawn by one micro-batch after another.

Who multiplies a pad's u = r W is the TEE, or dealers: ahead of use, or as it is used.

One row against a weight is bound by reading the weight; hundreds of rows are bound by arithmetic,
thirty times cheaper each. So pads are made in large products, site by site. Where the TEE holds no
weights for other reasons, one at a time is read from the model directory, quantised, multiplied
with, and dropped: that costs six times the product for 32 tokens, and half of it for 512.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Literal, Protocol, TypeAlias

import torch

from protocol.errors import PadsExhaustedError, TsqpError
from protocol.integer import ring_product
from protocol.keystream import Streams
from protocol.messages import Arithmetic
from protocol.model.checkpoint import Checkpoint
from protocol.model.config import ModelConfig
from protocol.model.weights import CPU, load_linear
from tee_side.protect.masks.mask import AdditiveMask, Factors, Seed
from tee_side.protect.pads.store import Draw, MadePads, PadStore, Words
from tee_side.protect.sites import IntegerSites, SiteShape

if TYPE_CHECKING:
    from tee_side.protect.pads.background_maker import BackgroundMaker, TellLoad

WhenOut = Literal["wait", "tee", "fail"]

# Tokens in one product of the maker while a run waits. Nobody knows how long an answer will be, so
# each batch is twice the one before: a run makes at most a first batch more in vain than it uses,
# and a long one soon has products of a size that the int8 kernels are fast at. Fewer rows than the
# first batch has cost hardly less.
FIRST_BATCH_TOKENS = 8
BATCH_TOKENS = 64

# Returns a site's weight [O, I]: int8 for products in the ring, float32 for masks over floats.
ReadWeight: TypeAlias = Callable[[SiteShape], torch.Tensor]
# Yields u [N, O] of each site of a batch of pads: ring elements, or the bits of float32.
Multiply: TypeAlias = Callable[[MadePads], Iterator[tuple[SiteShape, torch.Tensor]]]
# Of a pad for some rows of a site: what r is drawn from, u, and what dealers are to be sent where
# they reply with u.
Drawn: TypeAlias = tuple[Streams, torch.Tensor | None, tuple[Seed, ...]]


def multiply_here(mask: AdditiveMask, weights: ReadWeight) -> Multiply:
    """Return what multiplies in the TEE; memory is one site's weight and products.

    Raises what `weights` raises.
    """

    def multiply(batch: MadePads) -> Iterator[tuple[SiteShape, torch.Tensor]]:
        for site in batch.layout.sites:
            r_TI, weight_OI = mask.draw(batch.r(site.number)), weights(site)
            # Biases come later.
            if mask.arithmetic == "int8":
                yield site, ring_product(r_TI, weight_OI)
            else:
                yield site, (r_TI @ weight_OI.t()).view(torch.int32)

    return multiply


def fill_pads(
    multiply: Multiply,
    store: PadStore,
    tokens: int,
    on_site: Callable[[int], object] | None = None,
) -> None:
    """Make pads for `tokens` more tokens, rounded up to whole groups of the store.

    `on_site`: called with `tokens` after each site.

    Raises what `multiply` raises, PadBankError if the disk is full, and ValueError where the store
    has no room for so many.
    """
    put = None
    with (
        store.begin(-(-tokens // store.group) * store.group) as batch,
        ThreadPoolExecutor(1, "pads put") as writer,
    ):
        for site, u_TO in multiply(batch):
            if put is not None:
                put.result()
            # A disk takes half as long as the products; what is next does not wait for it.
            # Inference mode is each thread's own, and a store may have been made in it.
            put = writer.submit(torch.inference_mode()(batch.put), site.number, u_TO)
            if on_site is not None:
                on_site(tokens)
        if put is not None:
            put.result()
        batch.commit()


def read_weights(
    checkpoint: Checkpoint,
    config: ModelConfig,
    arithmetic: Arithmetic,
    integers: IntegerSites | None = None,
) -> ReadWeight:
    """Return a source of weights, which reads one from the model directory each time it is asked.

    `integers`: of a run, which may hold some. The source raises ModelError, also where the
    directory has changed.
    """
    if arithmetic == "int8":
        known = integers or IntegerSites(config, checkpoint, {}, torch.float32)
        return lambda shape: known.weights(shape.site).weight
    read = partial(load_linear, checkpoint, config, dtype=torch.float32, device=CPU)
    return lambda shape: read(*shape.site).weight


class DrawsPads(Protocol):
    """Draws the pads of one site after another, as `PadLane` does."""

    def words(self, site: int, rows: int) -> Drawn:
        """Return what the pads for `rows` rows of a site (its number) are made of."""


class Dealing(Protocol):
    """Who has dealers multiply pads.

    `failure`: why the last that were asked for did not come; None once some have.
    """

    failure: TsqpError | None

    def accuse(self, where: str) -> TsqpError:
        """Ask no dealer any more, because a pad that was used is wrong; return an error for it."""


@dataclass(eq=False)
class Pads:
    """The pads of a run, for one additive mask.

    Micro-batches draw from a `PadLane` each, once `ready` has said that there are enough.
    `when_out`: make more while the run waits, have the TEE compute rows that get none, or refuse
    them. `fill`: makes pads for so many tokens more, and puts them into the store, as `fill_pads`
    does. `ahead`: tokens that pads are kept ready for while nothing runs, None for all that the
    store has room for; beside steps, half of them. `decode_share`: of these, what a prompt leaves
    to decode; None where it need not. `dealing`: who asks the dealers, None where the TEE
    multiplies: prompts then have pads dealt as they are used, but for what `decode_share` leaves.
    `on_wait` is told how many are missing. `store` counts what there is.
    """

    mask: AdditiveMask
    store: PadStore
    fill: Callable[[int], None]
    when_out: WhenOut
    _: KW_ONLY
    ahead: int | None = None
    decode_share: float | None = None
    dealing: Dealing | None = None
    on_wait: Callable[[int], None] | None = None
    # Since the first block of `filling`.
    background: BackgroundMaker | None = field(default=None, init=False)
    # Totals for people: steps that found no pads left, by what was done instead.
    waited: int = field(default=0, init=False)
    in_tee: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self._batch_tokens = FIRST_BATCH_TOKENS
        capacity = self.store.capacity
        # Tokens that pads are kept ready for.
        self._kept = capacity if self.ahead is None else min(self.ahead, capacity)

    def in_stock(self, rows: int) -> bool:
        """Say whether a prompt's step of so many rows leaves decode its share."""
        if (share := self.decode_share) is None:
            return self.dealing is None
        return self.store.available - rows >= share * self._kept

    @property
    def dealers_there(self) -> bool:
        """Whether a prompt's pads can be dealt as they are used; where they must, it waits."""
        if self.dealing is None:
            return False
        return self.dealing.failure is None or self.when_out != "tee"

    def plenty(self, rows: int) -> bool:
        """Say whether half of the pads that are kept ready are left after so many rows."""
        return self.store.available - rows >= self._kept / 2

    def ready(self, rows: int) -> int:
        """Return for how many of a step's rows there are pads, having made more if runs wait.

        Before a step is composed: what it then draws is there. Raises PadsExhaustedError where runs
        wait and none can be made, PadBankError and ModelError for what making them meets.
        """
        available = self.store.available
        if available < rows and self.when_out == "wait":
            self.waited += 1
            self.store.check_usable()
            PadsExhaustedError.unless(
                rows <= self.store.capacity,
                "pads",
                f"room for {self.store.capacity} tokens",
                f"{rows} (fewer --step-tokens need fewer at once)",
            )
            background = self.background
            with nullcontext() if background is None else background.held_off():
                while (missing := rows - self.store.available) > 0:
                    if self.on_wait is not None:
                        self.on_wait(missing)
                    wanted = min(self.store.room, BATCH_TOKENS, max(missing, self._batch_tokens))
                    PadsExhaustedError.unless(
                        wanted > 0,
                        "pads",
                        f"room for {self.store.capacity} tokens, used by this step",
                        f"{missing} more (fewer --step-tokens need fewer at once)",
                    )
                    self.fill(wanted)
                    self._batch_tokens = min(BATCH_TOKENS, 2 * self._batch_tokens)
            return rows
        return min(rows, available)

    def exhausted(self, rows: int) -> PadsExhaustedError:
        """Return the error for rows that get no pads."""
        cause = None if self.background is None else self.background.failure
        failure = f"; making more failed: {cause}" if cause else ""
        error = PadsExhaustedError(
            "pads",
            f"{self.store.available} left{failure}",
            f"{rows} (tee-runner pads make, or --when-out wait or tee)",
        )
        error.__cause__ = cause
        return error

    def accuse(self, where: str) -> TsqpError | None:
        """Use none of the pads that are left, as one was not r W; None where the TEE multiplied."""
        if self.dealing is None:
            return None
        # In this order: a batch in work ends without a commit, and is waited for.
        error = self.dealing.accuse(where)
        with nullcontext() if self.background is None else self.background.held_off():
            self.drop()
        return error

    def stock_up(self) -> None:
        """Make pads now for all tokens that they are kept ready for, as far as there is room."""
        while (missing := min(self._kept - self.store.available, self.store.room)) > 0:
            self.fill(min(missing, BATCH_TOKENS))

    def drop(self) -> None:
        """Use none of the pads that are left."""
        if left := self.store.available:
            self.store.release(self.store.take(left))

    def take(self, rows: int) -> range:
        """Take indices for a micro-batch's rows. Raises as `PadLane.draw`."""
        if self.store.available < rows and self.ready(rows) < rows:
            raise self.exhausted(rows)
        taken = self.store.take(rows)
        if self.background is not None:
            self.background.notify()
        return taken

    def filling(self) -> AbstractContextManager[TellLoad]:
        """Make pads in the background while the block runs; see `BackgroundMaker.running`."""
        from tee_side.protect.pads.background_maker import BackgroundMaker, missing

        if self.background is None:
            self.background = BackgroundMaker(partial(missing, self.store, self._kept), self.fill)
        return self.background.running()


class PadLane:
    """Draws pads for one micro-batch after another.

    A step with T rows takes T token indices the first time one of its operators asks; each
    operator then gets the factors of its own site for these indices, once, or for the first of
    them: fewer rows are wanted of the LM head. An operator that asks for more rows, or again,
    because a step is repeated or a new one began, gets new indices: no factor is ever used for two
    inputs. Who runs steps says when one has ended: until then, its pads keep their room.
    """

    def __init__(self, pads: Pads) -> None:
        self.source = pads
        self._store = store = pads.store
        # Of the step that draws; of none, where there is none: no draw asks for so few.
        self._indices = range(0)
        self._used: set[int] = set()
        self._ready: dict[int, Words] = {}
        # The next site of each that wants as many rows, and the one at most that is read ahead.
        numbers = (site.number for site in store.layout.sites if site.operator != "lm_head")
        self._following = dict(pairwise(numbers))
        self._ahead: dict[int, Draw] = {}
        # Of u: ring elements, or floats as their bits.
        self._dtype = torch.int32 if pads.mask.arithmetic == "int8" else torch.float32

    def draw(self, site: int, rows: int) -> Factors:
        """Return the mask's factors for `rows` rows of a site. Raises as `words`."""
        pad, u_TO, _ = self.words(site, rows)
        return Factors(self.source.mask.draw(pad.elements()), u_TO.view(self._dtype))

    def words(self, site: int, rows: int) -> tuple[Streams, torch.Tensor, tuple[()]]:
        """Return what the factors for `rows` rows of a site (its number) are made of.

        Raises PadsExhaustedError, PadBankError for a bank that was tampered with, and RuntimeError
        in a process that was forked, or after the store was closed.
        """
        # Words that were read ahead are in a forked child, too, and the store is not asked for
        # them again.
        store = self._store
        if store.closed or os.getpid() != store.process:
            store.check_usable()
        if site in self._used or rows > len(self._indices):
            self.end_step()
            self._indices = self.source.take(rows)
            if rows <= store.rows_at_once:
                # Where this fails the step is over: no site has anything left to draw.
                self._used = set(store.layout.by_number)
                self._ready = store.all_factors(self._indices)
                self._used = set()
        indices = self._indices
        self._used.add(site)
        ready = self._ready.pop(site, None)
        if ready is None:
            # Those of `rows` rows at least; and those of the next site are read meanwhile.
            draw = self._ahead.pop(site, None) or self._store.start(indices[:rows], site)
            following = self._following.get(site)
            if following is not None and following not in self._used and not self._ahead:
                self._ahead[following] = self._store.start(indices, following)
            ready = draw()
        pad, u_TO = ready
        if len(u_TO) > rows:
            pad, u_TO = replace(pad, of=pad.of[:rows]), u_TO[:rows]
        return pad, u_TO, ()

    def end_step(self) -> None:
        """Release the pads of a step, failed or not; the next draw starts another."""
        indices = self._indices
        self._indices, self._used, self._ready = range(0), set(), {}
        self._ahead = {}
        if indices:
            self._store.release(indices)
