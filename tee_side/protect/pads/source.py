"""Hands out unmasking factors, each once, and says what happens when there are none left."""

from __future__ import annotations

import os
from collections.abc import Callable
from itertools import pairwise
from typing import Literal

import torch

from protocol.errors import PadsExhaustedError
from tee_side.protect.masks.mask import AdditiveMask, Factors
from tee_side.protect.pads.maker import BackgroundMaker, Load, PadMaker
from tee_side.protect.pads.store import Draw, PadStore, Words

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


class Pads:
    """The pads of a run, for one additive mask.

    Micro-batches draw from a `PadLane` each, once `ready` has said that there are enough.
    `when_out`: make more while the run waits, have the TEE compute rows that get none, or refuse
    them. `maker`: None in a TEE without linear weights, which cannot make any. `ahead`: tokens that
    `background` keeps pads ready for while nothing runs, None for all that the store has room for;
    beside steps, half of them. `decode_share`: of these, what a prompt leaves to decode; None where
    it need not. `on_wait` is told how many are missing. `store` counts what there is.
    """

    def __init__(
        self,
        mask: AdditiveMask,
        store: PadStore,
        maker: PadMaker | None,
        when_out: WhenOut,
        *,
        ahead: int | None = None,
        decode_share: float | None = None,
        on_wait: Callable[[int], None] | None = None,
    ) -> None:
        self.mask = mask
        self.store = store
        self._maker = maker
        self.when_out: WhenOut = when_out
        # Tokens that pads are kept ready for.
        self._kept = store.capacity if ahead is None else min(ahead, store.capacity)
        self._decode_share = decode_share
        self._on_wait = on_wait
        self._batch_tokens = FIRST_BATCH_TOKENS
        self.background = BackgroundMaker(self._missing, self._fill)
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
            self._make(rows)
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

    def _make(self, rows: int) -> None:
        self.store.check_usable()
        if self._maker is None:
            raise PadsExhaustedError(
                "pads", "no linear weights to make more from", f"{rows} in the bank"
            )
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
                self._maker.fill(self.store, wanted)
                self._batch_tokens = min(BATCH_TOKENS, 2 * self._batch_tokens)

    def _fill(self, tokens: int) -> None:
        if self._maker is not None:
            self._maker.fill(self.store, tokens)

    def _missing(self, load: Load) -> int:
        """Return for how many tokens pads are to be made next in the background.

        While nothing runs, all that are kept ready. Beside steps half of them, by whole batches:
        what is ready is used at full speed, and what it falls to is held. So many also where more
        requests wait than run: made later, they would be made between two tokens.
        """
        kept = (self._kept if load == "idle" else self._kept // 2) if self._maker else 0
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
        indices = self._indices
        if site in self._used or rows > len(indices):
            self.end_step()
            indices = self.source.take(rows)
            if rows <= _ROWS_READ_AHEAD:
                # Where this fails all of them are used up, and the next draw starts a step.
                self._ready = store.all_factors(indices)
            self._indices = indices
        self._used.add(site)
        ready = self._ready.pop(site, None)
        if ready is None:
            if rows < MANY_ROWS and site not in self._ahead:
                return self._store.factors(indices[:rows], site)
            ready = self._read_many(indices, site, rows)
        return ready if rows == len(indices) else (ready[0][:rows], ready[1][:rows])

    def _read_many(self, indices: range, site: int, rows: int) -> Words:
        """Return words for `rows` rows at least, and have those of the next site read."""
        draw = self._ahead.pop(site, None) or self._store.start(indices[:rows], site)
        following = self._following.get(site)
        if following is not None and following not in self._used and not self._ahead:
            self._ahead[following] = self._store.start(indices, following)
        return draw()

    def end_step(self) -> None:
        """Release what a step, failed or not, did not use; the next draw starts another."""
        indices = self._indices
        self._indices, self._used, self._ready = range(0), set(), {}
        self._ahead = {}
        if indices:
            self._store.release(indices)
