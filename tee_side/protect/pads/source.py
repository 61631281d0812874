"""The pads of a run: made ahead of use and beside it, and drawn by one micro-batch after another.

One row against a weight is bound by reading the weight; hundreds of rows are bound by arithmetic,
thirty times cheaper each. So pads are made in large products, site by site. Where the TEE holds no
weights for other reasons, one at a time is read from the model directory, quantised, multiplied
with, and dropped: that costs six times the product for 32 tokens, and half of it for 512.
"""

import os
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from itertools import pairwise
from typing import Literal, TypeAlias

import torch

from protocol.errors import PadsExhaustedError, TsqpError
from protocol.integer import ring_product
from protocol.messages import Arithmetic
from protocol.model.checkpoint import Checkpoint
from protocol.model.config import ModelConfig
from protocol.model.weights import CPU, QuantizedLinear, load_linear, load_quantized
from tee_side.protect.masks.mask import AdditiveMask, Factors
from tee_side.protect.pads.store import Draw, PadStore, Words
from tee_side.protect.sites import SiteShape
from tee_side.words import Site

WhenOut = Literal["wait", "tee", "fail"]

# Tokens in one product of the maker while a run waits. Nobody knows how long an answer will be, so
# each batch is twice the one before: a run makes at most a first batch more in vain than it uses,
# and a long one soon has products of a size that the int8 kernels are fast at. Fewer rows than the
# first batch has cost hardly less.
FIRST_BATCH_TOKENS = 8
BATCH_TOKENS = 64
# In the background: a run that finds none left waits for the batch in work.
BACKGROUND_BATCH_TOKENS = 32

# Rows whose factors are read for all operators of a step at once: in one go they take half the
# time, between operators the processor has forgotten how. More rows would take more memory.
_ROWS_READ_AHEAD = 8
# From here on a site's factors are read by threads, while the operator before it is under way.
MANY_ROWS = 64

# Returns a site's weight [O, I]: int8 for products in the ring, float32 for masks over floats.
Weights: TypeAlias = Callable[[SiteShape], torch.Tensor]

# What else is to be done: nothing, or steps.
Load: TypeAlias = Literal["idle", "steps"]
# Tells what it is now.
TellLoad: TypeAlias = Callable[[Load], None]

# Of the thread, and of those that its kernels start: where all cores are taken, steps go first. Not
# by more: a run may wait for it, and for the interpreter's lock that it has. As a thread for idle
# cores it cost 64 streams 5 % less, and held a run up for as long as others took its core.
_NICENESS = 5


def fill_pads(
    mask: AdditiveMask,
    weights: Weights,
    store: PadStore,
    tokens: int,
    on_site: Callable[[int, int], None] | None = None,
) -> None:
    """Make pads for `tokens` more tokens, rounded up to whole groups of the store.

    Computes u for what the store asks; memory is one site's weight and products. `on_site`: called
    with (sites done, sites in all) after each site.

    Raises what `weights` raises, PadBankError if the disk is full, and ValueError where the store
    has no room for so many.
    """
    sites, put = store.layout.sites, None
    with (
        store.begin(-(-tokens // store.group) * store.group) as batch,
        ThreadPoolExecutor(1, "pads put") as writer,
    ):
        for done, site in enumerate(sites, start=1):
            r_TI, weight_OI = mask.draw(batch.r(site.number)), weights(site)
            # Ring elements, or the bits of float32. Biases come later.
            u_TO = (
                ring_product(r_TI, weight_OI)
                if mask.arithmetic == "int8"
                else (r_TI @ weight_OI.t()).view(torch.int32)
            )
            if put is not None:
                put.result()
            # A disk takes half as long as the products; what is next does not wait for it.
            # Inference mode is each thread's own, and a store may have been made in it.
            put = writer.submit(torch.inference_mode()(batch.put), site.number, u_TO)
            if on_site is not None:
                on_site(done, len(sites))
        if put is not None:
            put.result()
        batch.commit()


def read_weights(
    checkpoint: Checkpoint,
    config: ModelConfig,
    arithmetic: Arithmetic,
    check: Callable[[Site, QuantizedLinear], None] | None = None,
    *,
    held: Mapping[Site, QuantizedLinear] | None = None,
) -> Weights:
    """Return a source that reads a weight from the model directory each time it is asked.

    `check`: called with a site's quantised weights when they are first read, raises where they are
    not those that its scales belong to; None where nothing is known to compare them with. `held`:
    integers that are in memory anyway, checked by who put them there; they are not read, and may
    still be filled afterwards. The source raises ModelError if the directory has changed, and what
    `check` raises.
    """
    checked: set[Site] = set()

    def integers(shape: SiteShape) -> torch.Tensor:
        weights = None if held is None else held.get(shape.site)
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
    changed. It is called again when the load changes; `failure` is what it met last. None: what
    cannot be made is never wanted.
    """

    def __init__(self, wanted: Callable[[Load], int], make: Callable[[int], None] | None) -> None:
        self.failure: TsqpError | None = None
        self._wanted, self._make = wanted, make
        # Guards all below; `wanted` may be another number when it is notified.
        self._changed = threading.Condition()
        # None while no thread is to run.
        self._load: Load | None = None
        self._makes = self._held_off = self._failed = False
        # Of the thread: what it met by a mistake of this program, too.
        self._ended: Future[None] = Future()

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
        self._load, self._failed, self._ended = "idle", False, Future()
        # A program that ends without leaving the block is not to wait for the thread.
        thread = threading.Thread(target=self._run, name="pads", daemon=True)
        thread.start()
        try:
            yield self._set_load
        finally:
            with self._changed:
                self._load = None
                self._changed.notify_all()
            thread.join()
        self._ended.result()

    def _set_load(self, load: Load) -> None:
        if self._ended.done():
            self._ended.result()
        if self._load not in (None, load):
            with self._changed:
                self._load, self._failed = load, False
                self._changed.notify_all()

    def _run(self) -> None:
        os.nice(_NICENESS)  # on Linux, of this thread
        try:
            while self._make is not None and (tokens := self._next_batch()):
                failure: TsqpError | None = None
                try:
                    self._make(tokens)
                except TsqpError as error:
                    failure = error
                finally:
                    with self._changed:
                        self._makes, self._failed = False, failure is not None
                        self.failure = failure
                        self._changed.notify_all()
        except BaseException as error:  # noqa: BLE001 - raised where the load is told
            self._ended.set_exception(error)
        else:
            self._ended.set_result(None)

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


class Pads:
    """The pads of a run, for one additive mask.

    Micro-batches draw from a `PadLane` each, once `ready` has said that there are enough.
    `when_out`: make more while the run waits, have the TEE compute rows that get none, or refuse
    them. `fill`: makes pads for so many tokens more, and puts them into the store, as `fill_pads`
    does; None in a TEE without linear weights, which cannot make any. `ahead`: tokens that
    `background` keeps pads ready for while nothing runs, None for all that the store has room for;
    beside steps, half of them. `decode_share`: of these, what a prompt leaves to decode; None where
    it need not. `on_wait` is told how many are missing. `store` counts what there is.
    """

    def __init__(
        self,
        mask: AdditiveMask,
        store: PadStore,
        fill: Callable[[int], None] | None,
        when_out: WhenOut,
        *,
        ahead: int | None = None,
        decode_share: float | None = None,
        on_wait: Callable[[int], None] | None = None,
    ) -> None:
        self.mask = mask
        self.store = store
        self._fill = fill
        self.when_out: WhenOut = when_out
        # Tokens that pads are kept ready for.
        self._kept = store.capacity if ahead is None else min(ahead, store.capacity)
        self._decode_share = decode_share
        self._on_wait = on_wait
        self._batch_tokens = FIRST_BATCH_TOKENS
        self.background = BackgroundMaker(self._missing, fill)
        # Totals for people: steps that found no pads left, by what was done instead.
        self.waited = 0
        self.in_tee = 0

    def in_stock(self, rows: int) -> bool:
        """Say whether a prompt's step of so many rows leaves decode its share."""
        share = self._decode_share
        return share is None or self.store.available - rows >= share * self._kept

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
            if self._fill is None:
                got = "no linear weights to make more from"
                raise PadsExhaustedError("pads", got, f"{rows} in the bank")
            PadsExhaustedError.unless(
                rows <= self.store.capacity,
                "pads",
                f"room for {self.store.capacity} tokens",
                f"{rows} (fewer --step-tokens need fewer at once)",
            )
            with self.background.held_off():
                while (missing := rows - self.store.available) > 0:
                    if self._on_wait is not None:
                        self._on_wait(missing)
                    wanted = min(self.store.room, BATCH_TOKENS, max(missing, self._batch_tokens))
                    PadsExhaustedError.unless(
                        wanted > 0,
                        "pads",
                        f"room for {self.store.capacity} tokens, used by this step",
                        f"{missing} more (fewer --step-tokens need fewer at once)",
                    )
                    self._fill(wanted)
                    self._batch_tokens = min(BATCH_TOKENS, 2 * self._batch_tokens)
            return rows
        return min(rows, available)

    def exhausted(self, rows: int) -> PadsExhaustedError:
        """Return the error for rows that get no pads."""
        cause = self.background.failure
        failure = f"; making more failed: {cause}" if cause else ""
        error = PadsExhaustedError(
            "pads",
            f"{self.store.available} left{failure}",
            f"{rows} (tee-runner pads make, or --when-out wait or tee)",
        )
        error.__cause__ = cause
        return error

    def take(self, rows: int) -> range:
        """Take indices for a micro-batch's rows. Raises as `PadLane.draw`."""
        if self.store.available < rows and self.ready(rows) < rows:
            raise self.exhausted(rows)
        taken = self.store.take(rows)
        self.background.notify()
        return taken

    def _missing(self, load: Load) -> int:
        """Return for how many tokens pads are to be made next in the background.

        While nothing runs, all that are kept ready. Beside steps half of them, by whole batches:
        what is ready is used at full speed, and what it falls to is held. So many also where more
        requests wait than run: made later, they would be made between two tokens.
        """
        kept = self._kept if load == "idle" else self._kept // 2
        missing = min(self.store.room, kept - self.store.available)
        if load != "idle" and missing < BACKGROUND_BATCH_TOKENS:
            return 0
        return min(missing, BACKGROUND_BATCH_TOKENS)


class PadLane:
    """Draws pads for one micro-batch after another.

    A step with T rows takes T token indices the first time one of its operators asks; each
    operator then gets the factors of its own site for these indices, once, or for the first of
    them: fewer rows are wanted of the LM head. An operator that asks for more rows, or again,
    because a step is repeated or a new one began, gets new indices: no factor is ever used for two
    inputs. Who runs steps says when one has ended: what it left over would keep room in the store
    until this lane draws again, which may be never.
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
        words_TI, u_TO = self.words(site, rows)
        return Factors(self.source.mask.draw(words_TI), u_TO.view(self._dtype))

    def words(self, site: int, rows: int) -> Words:
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
            if rows <= _ROWS_READ_AHEAD:
                # Where this fails the step is over: no site has anything left to draw.
                self._used = set(store.layout.by_number)
                self._ready = store.all_factors(self._indices)
                self._used = set()
        indices = self._indices
        self._used.add(site)
        ready = self._ready.pop(site, None)
        if ready is None:
            if rows < MANY_ROWS and site not in self._ahead:
                return self._store.factors(indices[:rows], site)
            # Those of `rows` rows at least; and those of the next site are read meanwhile.
            draw = self._ahead.pop(site, None) or self._store.start(indices[:rows], site)
            following = self._following.get(site)
            if following is not None and following not in self._used and not self._ahead:
                self._ahead[following] = self._store.start(indices, following)
            ready = draw()
        return ready if rows == len(indices) else (ready[0][:rows], ready[1][:rows])

    def end_step(self) -> None:
        """Release what a step, failed or not, did not use; the next draw starts another."""
        indices = self._indices
        self._indices, self._used, self._ready = range(0), set(), {}
        self._ahead = {}
        if indices:
            self._store.release(indices)
