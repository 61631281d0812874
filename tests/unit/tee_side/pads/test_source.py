"""Pads are handed out once, for one input; and what happens when there are none left."""

from __future__ import annotations

import os
import random
import threading
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from protocol.errors import PadBankError, PadsExhaustedError
from tee_side.protect.masks.mask import AdditiveMask, Factors
from tee_side.protect.masks.pad import Pad
from tee_side.protect.pads.background_maker import Load
from tee_side.protect.pads.layout import SiteShape
from tee_side.protect.pads.maker import PadMaker
from tee_side.protect.pads.source import (
    BACKGROUND_BATCH_TOKENS,
    BATCH_TOKENS,
    FIRST_BATCH_TOKENS,
    MANY_ROWS,
    PadLane,
    Pads,
    WhenOut,
)
from tee_side.protect.pads.store import MemoryStore, PadStore
from tee_side.protect.randomness import Keystream
from tests.kit.pads import LAYOUT, create, fill, product
from tests.kit.rows import each_row
from tsqp.lab.research.float_noise import FloatNoise

LOADS: tuple[Load, ...] = ("idle", "steps")
FIRST, SECOND = SITES = [site.number for site in LAYOUT.sites]
# A test that waits for what never comes fails.
WAIT_S = 30.0


def _r(store: PadStore, indices: range, site: int) -> torch.Tensor:
    """Return what r of these indices is, whether it was read or not."""
    return Keystream(store._key).rows(indices, site, LAYOUT.by_number[site].in_features)


# ------------------------------------------------------------------------------------ the steps


class Lanes:
    """Two lanes of a store, and which indices each one's step has, with the sites it drew."""

    def __init__(self) -> None:
        self.store = MemoryStore(LAYOUT, 160)
        pads = Pads(Pad(), self.store, None, "fail")
        self.lanes = [pads.lane(), pads.lane()]
        self.steps: list[tuple[range, set[int]] | None] = [None, None]
        self.filled = self.next = 0
        self.drawn: set[tuple[int, int]] = set()

    def make(self, count: int) -> None:
        if (count := min(count, self.store.room)) > 0:
            fill(self.store, count)
            self.filled += count

    def draw(self, at: int, site: int, rows: int) -> None:
        step = self.steps[at]
        if step is None or site in step[1] or rows > len(step[0]):
            # The step is over, and nothing that it left is handed out.
            self.steps[at] = None
            if rows > self.filled - self.next:
                with pytest.raises(PadsExhaustedError):
                    self.lanes[at].draw(site, rows)
                return
            step = self.steps[at] = (range(self.next, self.next + rows), set())
            self.next += rows
        indices, used = step
        used.add(site)
        factors = self.lanes[at].draw(site, rows)
        assert torch.equal(factors.r, _r(self.store, indices[:rows], site))
        assert torch.equal(factors.u, product(site, factors.r))
        pairs = {(site, index) for index in indices[:rows]}
        assert self.drawn.isdisjoint(pairs)
        self.drawn |= pairs

    def end_step(self, at: int) -> None:
        self.lanes[at].end_step()
        self.steps[at] = None

    def counts(self) -> None:
        assert self.store.available == self.filled - self.next
        # A lane that has no step keeps no room.
        if self.steps == [None, None]:
            assert self.store.available + self.store.room == self.store.capacity


def test_however_steps_go_and_fail_no_pad_is_drawn_twice() -> None:
    choose, asked = random.Random(1), list[tuple[Any, ...]]()
    lanes = Lanes()
    try:
        for _ in range(1500):
            at, rows = choose.choice((0, 0, 1)), choose.choice((1, 2, 8, 9, *[MANY_ROWS] * 3, 65))
            made = ("make", choose.randint(1, 160))
            draws = [("draw", at, site, rows) for site in SITES]
            asked.append(choose.choice([made, *draws * 4, ("end_step", at)]))
            name, *arguments = asked[-1]
            getattr(lanes, name)(*arguments)
            lanes.counts()
    except BaseException as error:
        error.add_note(f"after {asked[-20:]}")
        raise
    assert len(lanes.drawn) > 10_000  # guards the test


class Maker:
    """Makes pads for the layout of two sites; counts what it was asked for."""

    def __init__(self) -> None:
        self.asked: list[int] = []
        self.error: Exception | None = None
        # Told of each attempt, and of each success.
        self.tried, self.made = threading.Event(), threading.Event()

    def fill(self, store: PadStore, tokens: int) -> None:
        self.tried.set()
        if self.error is not None:
            raise self.error
        self.asked.append(tokens)
        fill(store, tokens)
        self.made.set()


def _pads(
    ready: int, when_out: WhenOut = "fail", capacity: int = 16, **more: Any
) -> tuple[Pads, MemoryStore, Maker]:
    store, made = MemoryStore(LAYOUT, capacity), Maker()
    if ready:
        fill(store, ready)
    mask: AdditiveMask = more.pop("mask", Pad())
    return Pads(mask, store, cast(PadMaker, made), when_out, **more), store, made


def _step(lane: PadLane, rows: int) -> list[Factors]:
    return [lane.draw(site, rows) for site in SITES]


@each_row("rows", [1, 9, MANY_ROWS])
def test_what_was_read_ahead_is_not_drawn_in_a_forked_child_or_of_a_closed_store(
    rows: int,
) -> None:
    """Its parent will send what was read before the fork."""
    pads, store, _ = _pads(rows, capacity=rows)
    lane, parent = pads.lane(), os.getpid()
    lane.draw(FIRST, rows)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "getpid", lambda: parent + 1)
        with pytest.raises(RuntimeError, match="copied by fork"):
            lane.draw(SECOND, rows)
    assert torch.equal(lane.draw(SECOND, rows).r, _r(store, range(rows), SECOND))
    store.close()
    for site in SITES:
        with pytest.raises(RuntimeError, match="closed store"):
            lane.draw(site, rows)


@each_row("rows", [1, MANY_ROWS])
def test_factors_that_could_not_be_read_end_the_step(rows: int) -> None:
    """Neither what is left of the step before nor half of the new one is drawn afterwards."""
    pads, store, _ = _pads(2 * rows, capacity=2 * rows)
    lane, read = pads.lane(), store._read_into

    def tampered(indices: range, site: SiteShape, u_TO: torch.Tensor) -> None:
        if site.number == SECOND and indices.start < rows:
            raise PadBankError("bank", got="another record than was written", expected="its tag")
        read(indices, site, u_TO)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(store, "_read_into", tampered)
        # One row is read of all sites at once, many rows site by site.
        if rows > 1:
            lane.draw(FIRST, rows)
        with pytest.raises(PadBankError, match="another record"):
            lane.draw(SECOND, rows)
    factors = lane.draw(SECOND, rows)
    assert torch.equal(factors.r, _r(store, range(rows, 2 * rows), SECOND))
    assert torch.equal(factors.u, product(SECOND, factors.r))


def test_factors_do_not_show_in_messages() -> None:
    factors = _pads(1)[0].lane().draw(FIRST, 1)
    for value in (*factors.r.flatten().tolist(), *factors.u.flatten().tolist()):
        assert str(value) not in repr(factors)
    assert "tensor" not in repr(factors)


def test_factors_of_float_masks_are_floats() -> None:
    pads, store, _ = _pads(0, mask=FloatNoise(sigma=2.0))
    with store.begin(4) as batch:
        for site in LAYOUT.sites:
            batch.put(site.number, torch.full((4, site.out_features), 1.5).view(torch.int32))
        batch.commit()
    factors = pads.lane().draw(FIRST, 4)
    assert factors.r.dtype == factors.u.dtype == torch.float32
    assert (factors.u == 1.5).all()
    # Normal numbers of deviation 2, and not the bits of uniform words.
    assert 0 < factors.r.abs().max() < 20


# -------------------------------------------------------------------------------- pads are out


def test_a_run_that_does_not_wait_is_refused_before_anything_is_taken() -> None:
    pads, store, maker = _pads(2, "fail")
    lane = pads.lane()
    assert [pads.ready(rows) for rows in (0, 1, 2, 3)] == [0, 1, 2, 2]
    with pytest.raises(PadsExhaustedError) as caught:
        lane.draw(FIRST, 3)
    assert caught.value.got == "2 left"
    assert caught.value.expected.startswith("3 (tee-runner pads make, or --when-out")
    assert caught.value.retryable
    assert (maker.asked, pads.waited, pads.used, store.available) == ([], 0, 0, 2)


def test_a_run_that_waits_makes_more_in_batches_that_grow() -> None:
    """A short run does not pay for a long one's pads."""
    told: list[int] = []
    pads, store, maker = _pads(0, "wait", 4 * BATCH_TOKENS, on_wait=told.append)
    lane = pads.lane()
    assert pads.ready(1) == 1
    assert (maker.asked, pads.used) == ([FIRST_BATCH_TOKENS], 0)
    for used in range(1, 301):
        _step(lane, 1)
        assert store.available < used + FIRST_BATCH_TOKENS
    assert maker.asked == [8, 16, 32, *[BATCH_TOKENS] * 4]
    assert (maker.asked[0], maker.asked[3]) == (FIRST_BATCH_TOKENS, BATCH_TOKENS)
    # It is said how many are missing.
    assert told == [1] * pads.waited == [1] * len(maker.asked)
    assert pads.in_tee == 0


@each_row(
    ("ready", "capacity", "steps", "asked"),
    [
        (1, 41, [41, 1], [40, 2 * FIRST_BATCH_TOKENS]),
        (0, 10, [1, 7, 1], [FIRST_BATCH_TOKENS, 10]),
        (0, 192, [133], [BATCH_TOKENS, BATCH_TOKENS, 4 * FIRST_BATCH_TOKENS]),
        # What a step that failed had taken does not keep its space.
        (4, 4, [-4, -4, -4, 4], [4, 4, 4]),
    ],
)
def test_a_step_that_waits_gets_what_is_missing_within_a_batch_and_the_room(
    ready: int, capacity: int, steps: list[int], asked: list[int]
) -> None:
    told: list[int] = []
    pads, _, maker = _pads(ready, "wait", capacity, on_wait=told.append)
    lane = pads.lane()
    for rows in steps:
        if rows > 0:
            _step(lane, rows)
        else:
            lane.draw(FIRST, -rows)
    assert maker.asked == asked
    assert pads.waited <= len(steps)
    if steps == [133]:
        assert told == [133, 133 - BATCH_TOKENS, 133 - 2 * BATCH_TOKENS]


def test_a_run_that_would_wait_for_ever_is_refused() -> None:
    pads, _, maker = _pads(0, "wait")
    first, second = pads.lane(), pads.lane()
    with pytest.raises(
        PadsExhaustedError, match=r"room for 16 tokens, expected 17 .*--step-tokens"
    ):
        first.draw(FIRST, 17)
    assert (maker.asked, pads.used) == ([], 0)
    # Two lanes, of which each fits.
    first.draw(FIRST, 10)
    with pytest.raises(PadsExhaustedError) as caught:
        second.draw(FIRST, 10)
    assert caught.value.got == "room for 16 tokens, used by this step"
    assert caught.value.expected.startswith("4 more (fewer --step-tokens")
    for lane in (first, second):
        lane.end_step()
    _step(second, 16)
    # A TEE that has only a bank cannot make any.
    store = MemoryStore(LAYOUT, 8)
    fill(store, 2)
    pads = Pads(Pad(), store, None, "wait")
    _step(pads.lane(), 2)
    with pytest.raises(PadsExhaustedError, match="no linear weights to make more from"):
        pads.lane().draw(FIRST, 1)
    with pads.filling():
        pass
    assert store.available == 0


# ------------------------------------------------------------------------- in the background


def _fill_up(pads: Pads, store: PadStore, tokens: int) -> None:
    while store.available < tokens:  # the thread may not have had its turn
        with pads.filling():
            pass


@each_row(
    ("ahead", "asked"),
    [(None, [BACKGROUND_BATCH_TOKENS, BACKGROUND_BATCH_TOKENS, 3]), (5, [5])],
)
def test_pads_are_made_in_the_background_as_far_as_is_wanted(
    ahead: int | None, asked: list[int]
) -> None:
    pads, store, maker = _pads(0, capacity=2 * BACKGROUND_BATCH_TOKENS + 3, ahead=ahead)
    _fill_up(pads, store, sum(asked))
    with pads.filling():
        pass
    assert (maker.asked, store.available, pads.made) == (asked, sum(asked), sum(asked))
    assert (pads.waited, pads.in_tee) == (0, 0)


def test_a_full_disk_ends_a_run_only_where_pads_are_out() -> None:
    pads, store, maker = _pads(1, "wait")
    lane = pads.lane()
    maker.error = PadBankError("bank", got="0 bytes available", expected="4096 bytes")
    with pads.filling():
        assert maker.tried.wait(WAIT_S)
    _step(lane, 1)
    for site in SITES:
        with pytest.raises(PadBankError, match="0 bytes available"):
            lane.draw(site, 1)
    # One that does not wait is told why.
    pads.when_out = "fail"
    with pytest.raises(PadsExhaustedError) as caught:
        lane.draw(FIRST, 1)
    assert caught.value.got == (
        "0 left; making more failed: bank: got 0 bytes available, expected 4096 bytes"
    )
    assert isinstance(caught.value.__cause__, PadBankError)
    # A later attempt that succeeds is the end of it.
    maker.error = None
    _fill_up(pads, store, 16)
    _step(lane, 16)
    with pytest.raises(PadsExhaustedError) as caught:
        lane.draw(FIRST, 1)
    assert caught.value.got == "0 left"


def test_beside_steps_half_is_kept_ready_and_made_in_large_products() -> None:
    ahead, batch = 4 * BACKGROUND_BATCH_TOKENS, BACKGROUND_BATCH_TOKENS
    pads, store, _ = _pads(ahead, "fail", ahead)
    lane = pads.lane()
    for ready, wanted in (
        (ahead, (0, 0)),
        (ahead - 1, (1, 0)),
        (2 * batch + 1, (batch, 0)),
        (batch + 1, (batch, 0)),
        (batch, (batch, batch)),
        (0, (batch, batch)),
    ):
        if store.available > ready:
            _step(lane, store.available - ready)
        lane.end_step()
        assert tuple(max(0, pads._missing(load)) for load in LOADS) == wanted


def test_taking_pads_has_more_made() -> None:
    capacity = 2 * BACKGROUND_BATCH_TOKENS
    pads, _, maker = _pads(capacity, "fail", capacity)
    lane = pads.lane()
    with pads.filling() as tell_load:
        tell_load("steps")
        for _ in range(2):
            _step(lane, BACKGROUND_BATCH_TOKENS)
        assert maker.made.wait(WAIT_S)
    assert maker.asked == [BACKGROUND_BATCH_TOKENS]


def test_a_run_that_waits_and_the_background_make_pads_in_turns(tmp_path: Path) -> None:
    """A store lets one of them fill at a time, and says so; meanwhile another thread takes."""
    with create(tmp_path, 2 * BATCH_TOKENS) as bank:
        pads = Pads(Pad(), bank, cast(PadMaker, Maker()), "wait")
        lane = pads.lane()
        with pads.filling() as tell_load:
            for step in range(100):
                tell_load(LOADS[step % 2])
                for factors, site in zip(_step(lane, 1 + step % 50), SITES, strict=True):
                    assert torch.equal(factors.u, product(site, factors.r))
        assert pads.used == sum(1 + step % 50 for step in range(100))
