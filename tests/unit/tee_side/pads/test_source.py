"""Pads are handed out once, for one input; and what happens when there are none left."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch

from protocol.errors import ModelError, PadBankError, PadsExhaustedError
from tee_side.protect.masks.mask import AdditiveMask, Factors
from tee_side.protect.masks.pad import Pad
from tee_side.protect.pads.background_maker import Load
from tee_side.protect.pads.layout import PadLayout, SiteShape
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
from tee_side.protect.pads.store import Draw, MemoryStore, PadStore
from tee_side.protect.randomness import Keystream
from tests.unit.tee_side.pads.tiny import LAYOUT, fill, product, put_all
from tsqp.lab.research.float_noise import FloatNoise

LOADS: tuple[Load, ...] = ("idle", "steps")
SITES = [site.number for site in LAYOUT.sites]
FIRST, SECOND = SITES


class Maker:
    """Makes pads for the layout of two sites; counts what it was asked for."""

    def __init__(self) -> None:
        self.asked: list[int] = []

    def fill(self, store: PadStore, tokens: int) -> None:
        self.asked.append(tokens)
        with store.begin(tokens) as batch:
            put_all(batch)
            batch.commit()


class Spy:
    """A store that notes what is taken, read and released."""

    def __init__(self, store: MemoryStore) -> None:
        self._store = store
        self.taken: list[range] = []
        self.released: list[range] = []
        self.read: list[tuple[int, int]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def r(self, indices: range, position: int) -> torch.Tensor:
        """Return what r of these indices is, whether it was read or not."""
        site = LAYOUT.sites[position]
        return Keystream(self._store._key).rows(indices, site.number, site.in_features)

    def take(self, count: int) -> range:
        indices = self._store.take(count)
        self.taken.append(indices)
        return indices

    def factors(self, indices: range, site: int) -> tuple[torch.Tensor, torch.Tensor]:
        found = self._store.factors(indices, site)
        self.read += [(index, site) for index in indices]
        return found

    def start(self, indices: range, site: int) -> Draw:
        found = self._store.start(indices, site)
        self.read += [(index, site) for index in indices]
        return found

    def all_factors(self, indices: range) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
        found = self._store.all_factors(indices)
        self.read += [(index, site) for index in indices for site in found]
        return found

    def release(self, indices: range) -> None:
        self.released.append(indices)
        self._store.release(indices)


def _pads(
    ready: int,
    when_out: WhenOut = "fail",
    *,
    capacity: int = 16,
    mask: AdditiveMask | None = None,
    on_wait: Callable[[int], None] | None = None,
    maker: Any = None,
) -> tuple[Pads, Spy, Maker]:
    store = MemoryStore(LAYOUT, capacity)
    if ready:
        fill(store, ready)
    spy, made = Spy(store), maker or Maker()
    source = Pads(
        mask or Pad(), cast(PadStore, spy), cast(PadMaker, made), when_out, on_wait=on_wait
    )
    return source, spy, made


def _step(lane: PadLane, rows: int) -> list[Factors]:
    return [lane.draw(site, rows) for site in SITES]


# ---------------------------------------------------------------------------------- one step


def test_the_operators_of_a_step_share_indices_and_get_factors_of_their_own() -> None:
    pads, store, _ = _pads(8)
    lane = pads.lane()
    found = _step(lane, 3)
    assert store.taken == [range(3)]
    assert sorted(store.read) == [(i, site.number) for i in range(3) for site in LAYOUT.sites]
    for site, factors in zip(LAYOUT.sites, found, strict=True):
        assert factors.r.shape == (3, site.in_features)
        assert torch.equal(factors.u, product(site.number, factors.r))
    assert pads._store.available == 5


def test_the_next_step_gets_new_indices() -> None:
    pads, store, _ = _pads(8)
    lane = pads.lane()
    for rows in (2, 2, 3):
        _step(lane, rows)
    assert store.taken == [range(2), range(2, 4), range(4, 7)]
    assert len(store.read) == len(set(store.read)) == 14


def test_a_step_of_another_size_gets_new_indices_even_if_the_last_one_was_not_finished() -> None:
    pads, store, _ = _pads(8)
    lane = pads.lane()
    lane.draw(FIRST, 2)
    lane.draw(SECOND, 3)
    assert store.taken == [range(2), range(2, 5)]


@pytest.mark.parametrize("rows", [8, 9, MANY_ROWS])
def test_fewer_rows_of_a_site_get_the_first_pads_of_the_step(rows: int) -> None:
    """Read ahead, or not: of the LM head fewer rows are wanted than of the layers."""
    pads, store, _ = _pads(rows, capacity=rows)
    lane = pads.lane()
    lane.draw(FIRST, rows)
    part = lane.draw(SECOND, 2)
    assert store.taken == [range(rows)]
    assert torch.equal(part.r, store.r(range(2), 1))
    assert torch.equal(part.u, product(SECOND, part.r))


def test_a_step_that_is_repeated_gets_new_indices_and_the_old_ones_are_released() -> None:
    pads, store, _ = _pads(8)
    lane = pads.lane()
    first = lane.draw(FIRST, 2)
    again = lane.draw(FIRST, 2)
    assert store.taken == [range(2), range(2, 4)]
    assert store.released == [range(2)]
    assert not torch.equal(first.r, again.r)
    # What was not used of the first two is gone, too: the second operator goes on with the new.
    second = lane.draw(SECOND, 2)
    assert torch.equal(second.r, store.r(range(2, 4), 1))


def test_released_pads_make_room_for_new_ones() -> None:
    pads, store, _ = _pads(12, capacity=12)
    lane = pads.lane()
    lane.draw(FIRST, 11)
    assert store.room == 0
    lane.draw(FIRST, 1)
    assert store.room >= 11


@pytest.mark.parametrize("rows", [(1, 2), (9, 12), (MANY_ROWS, MANY_ROWS + 1)])
def test_no_pad_is_handed_out_twice_however_steps_fail(rows: tuple[int, int]) -> None:
    """All beginnings of a step, in all orders of three, of sizes that are read ahead or not."""
    pads, _, _ = _pads(0, "wait", capacity=max(16, *rows))
    lane = pads.lane()
    handed: list[tuple[int, bytes]] = []
    for count in (*rows, *rows):
        for first in (0, 1, 2):
            for second in (0, 1, 2):
                for operators in (SITES[:first], SITES[:second], SITES):
                    for site in operators:
                        factors = lane.draw(site, count)
                        # Eight bytes of a word each: equal ones are a coincidence of 2^-64.
                        handed += [(site, row.numpy().tobytes()) for row in factors.r]
    assert len(handed) == len(set(handed)) > 100


def test_factors_that_could_not_be_read_end_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither what is left of the step before nor half of the new one is handed out afterwards."""
    pads, store, _ = _pads(8)
    lane = pads.lane()
    lane.draw(FIRST, 1)

    def tampered(indices: range) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
        raise PadBankError("bank", got="another record than was written", expected="its tag")

    with monkeypatch.context() as patch:
        patch.setattr(store, "all_factors", tampered)
        with pytest.raises(PadBankError):
            lane.draw(FIRST, 1)
    factors = lane.draw(SECOND, 1)
    assert torch.equal(factors.r, store.r(range(2, 3), 1))


@pytest.mark.parametrize("rows", [1, 9, MANY_ROWS])
def test_a_forked_child_gets_nothing_of_its_parents_step(rows: int) -> None:
    """Not even factors that were read ahead before the fork: the parent will send them."""
    pads, store, _ = _pads(rows, capacity=rows)
    lane = pads.lane()
    lane.draw(FIRST, rows)
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        outcome = b"drawn"
        try:
            lane.draw(SECOND, rows)
        except RuntimeError as error:
            outcome = str(error).encode()
        finally:
            os.write(writer, outcome)
            os._exit(0)
    os.close(writer)
    told = os.read(reader, 200)
    os.close(reader)
    assert os.waitpid(child, 0)[1] == 0
    assert b"copied by fork" in told
    factors = lane.draw(SECOND, rows)
    assert torch.equal(factors.r, store.r(range(rows), 1))


@pytest.mark.parametrize("rows", [1, MANY_ROWS])
def test_a_closed_store_ends_the_step_even_where_it_was_read_ahead(rows: int) -> None:
    pads, store, _ = _pads(rows, capacity=rows)
    lane = pads.lane()
    lane.draw(FIRST, rows)
    store.close()
    with pytest.raises(RuntimeError, match="closed store"):
        lane.draw(SECOND, rows)


# --------------------------------------------------------------------------- many rows, ahead


def test_of_many_rows_the_next_site_is_read_ahead_and_no_other() -> None:
    sites = [SiteShape(layer, name, 3, 2) for layer in (0, 1) for name in ("qkv_proj", "o_proj")]
    layout = PadLayout((*sites, SiteShape(1, "lm_head", 3, 2)))
    store = MemoryStore(layout, MANY_ROWS)
    with store.begin(MANY_ROWS) as batch:
        for site in layout.sites:
            batch.put(site.number, torch.zeros(MANY_ROWS, 2, dtype=torch.int32))
        batch.commit()
    spy = Spy(store)
    lane = Pads(Pad(), cast(PadStore, spy), None, "fail").lane()
    numbers, seen = [site.number for site in layout.sites], []
    for number in numbers:
        factors = lane.draw(number, 1 if number == numbers[-1] else MANY_ROWS)
        expected = Keystream(store._key).rows(range(len(factors.r)), number, 3)
        assert torch.equal(factors.r, expected)
        seen.append(len({site for _, site in spy.read}))
    # Of the LM head one row: all of them would take more memory than the rest of the step.
    assert seen == [2, 3, 4, 4, 5]
    assert spy.read == [
        *((index, site) for site in numbers[:-1] for index in range(MANY_ROWS)),
        (0, numbers[-1]),
    ]


def test_an_error_ahead_is_raised_where_its_turn_comes_and_ends_the_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pads, store, _ = _pads(2 * MANY_ROWS, capacity=2 * MANY_ROWS)
    lane, read = pads.lane(), store._store._read_into

    def tampered(indices: range, site: SiteShape, u_TO: torch.Tensor) -> None:
        if site.number == SECOND and indices.start < MANY_ROWS:
            raise PadBankError("bank", got="another record than was written", expected="its tag")
        read(indices, site, u_TO)

    monkeypatch.setattr(store._store, "_read_into", tampered)
    lane.draw(FIRST, MANY_ROWS)
    with pytest.raises(PadBankError, match="another record"):
        lane.draw(SECOND, MANY_ROWS)
    factors = lane.draw(SECOND, MANY_ROWS)
    assert torch.equal(factors.r, store.r(range(MANY_ROWS, 2 * MANY_ROWS), 1))
    assert torch.equal(factors.u, product(SECOND, factors.r))


def test_factors_do_not_show_in_messages() -> None:
    pads, _, _ = _pads(1)
    lane = pads.lane()
    factors = lane.draw(FIRST, 1)
    for value in (*factors.r.flatten().tolist(), *factors.u.flatten().tolist()):
        assert str(value) not in repr(factors)
    assert "tensor" not in repr(factors)


# ---------------------------------------------------------------------------- the end of a step


@pytest.mark.parametrize("rows", [1, 9, MANY_ROWS])
def test_after_the_end_of_a_step_nothing_of_it_is_handed_out(rows: int) -> None:
    """Neither what was read ahead nor what was not."""
    pads, store, _ = _pads(2 * rows, capacity=2 * rows)
    lane = pads.lane()
    lane.draw(FIRST, rows)
    lane.end_step()
    second = lane.draw(SECOND, rows)
    assert torch.equal(second.r, store.r(range(rows, 2 * rows), 1))
    assert len(store.read) == len(set(store.read))


def test_the_end_of_a_step_releases_what_was_left_over_once() -> None:
    pads, store, _ = _pads(16)
    lane = pads.lane()
    lane.end_step()
    assert store.released == []
    lane.draw(FIRST, 9)
    lane.end_step()
    lane.end_step()
    assert store.released == [range(9)]
    assert store.room == 9


def test_a_lane_that_is_not_drawn_from_any_more_keeps_no_room() -> None:
    """After a large step that failed, small ones use the first lane alone."""
    pads, store, _ = _pads(0, "wait", capacity=32)
    lanes = [pads.lane(), pads.lane()]
    for lane in lanes:
        lane.draw(FIRST, 9)
    for lane in lanes:
        lane.end_step()
    for _ in range(3 * 32):
        _step(lanes[0], 1)
        lanes[0].end_step()
    assert store.room + pads._store.available == 32


def test_a_step_that_needs_more_than_all_the_space_in_its_lanes_is_refused() -> None:
    """Each of them fits."""
    pads, _, _ = _pads(0, "wait", capacity=16)
    first, second = pads.lane(), pads.lane()
    first.draw(FIRST, 10)
    with pytest.raises(PadsExhaustedError) as caught:
        second.draw(FIRST, 10)
    assert caught.value.got == "room for 16 tokens, used by this step"
    assert caught.value.expected.startswith("4 more (")
    assert "--step-tokens" in caught.value.expected
    first.end_step()
    second.end_step()
    _step(second, 16)


# -------------------------------------------------------------------------------- pads are out


def test_fail_raises_with_what_is_left_and_what_is_needed() -> None:
    pads, store, maker = _pads(2, "fail")
    lane = pads.lane()
    with pytest.raises(PadsExhaustedError) as caught:
        lane.draw(FIRST, 3)
    assert caught.value.got == "2 left"
    assert caught.value.expected.startswith("3 (")
    assert "--when-out" in caught.value.expected
    assert caught.value.retryable
    assert (store.taken, maker.asked, pads._store.available) == ([], [], 2)


def test_after_a_failure_what_is_left_serves_a_smaller_step() -> None:
    pads, store, _ = _pads(2, "fail")
    lane = pads.lane()
    with pytest.raises(PadsExhaustedError):
        lane.draw(FIRST, 3)
    _step(lane, 2)
    assert store.taken == [range(2)]


def test_a_failure_in_the_middle_leaves_no_half_step_behind() -> None:
    """A step that found no pads is over: none of its operators is left to the TEE instead."""
    pads, _, _ = _pads(1, "fail")
    lane = pads.lane()
    lane.draw(FIRST, 1)
    with pytest.raises(PadsExhaustedError):
        lane.draw(FIRST, 1)
    # As in a policy whose phases send different operators.
    with pytest.raises(PadsExhaustedError):
        lane.draw(SECOND, 1)


def test_a_maker_that_fails_leaves_no_half_step_behind() -> None:
    class Broken:
        def fill(self, store: PadStore, tokens: int) -> None:
            raise ModelError("model", got="another one", expected="the same")

    pads, _, _ = _pads(1, "wait", maker=Broken())
    lane = pads.lane()
    lane.draw(FIRST, 1)
    for site in (FIRST, SECOND):
        with pytest.raises(ModelError):
            lane.draw(site, 1)


@pytest.mark.parametrize("when_out", ["tee", "fail"])
def test_without_waiting_a_step_is_told_how_many_there_are_and_nothing_is_made(
    when_out: WhenOut,
) -> None:
    pads, store, maker = _pads(2, when_out)
    assert [pads.ready(rows) for rows in (0, 1, 2, 3)] == [0, 1, 2, 2]
    assert (store.taken, maker.asked, pads.waited) == ([], [], 0)


def test_a_step_that_waits_finds_its_pads_ready_when_it_draws() -> None:
    pads, _, maker = _pads(2, "wait")
    assert pads.ready(5) == 5
    _step(pads.lane(), 5)
    assert (len(maker.asked), pads.waited) == (1, 1)


@pytest.mark.parametrize(("rows", "plenty"), [(4, True), (5, False)])
def test_half_of_what_is_kept_ready_is_plenty(rows: int, plenty: bool) -> None:
    pads, _, _ = _pads(12)  # of 16
    assert pads.plenty(rows) is plenty


def test_wait_makes_more_and_says_how_many_are_missing() -> None:
    told: list[int] = []
    pads, store, maker = _pads(2, "wait", capacity=16, on_wait=told.append)
    lane = pads.lane()
    _step(lane, 5)
    assert told == [3]
    # More than are missing: the next steps need some, too.
    assert maker.asked == [FIRST_BATCH_TOKENS]
    assert store.taken == [range(5)]
    assert (pads.waited, pads.in_tee) == (1, 0)
    _step(lane, 5)
    assert pads.waited == 1


def test_the_longer_a_run_the_more_it_makes_at_a_time() -> None:
    """A short one does not pay for a long one's pads."""
    pads, _, maker = _pads(0, "wait", capacity=4 * BATCH_TOKENS)
    lane = pads.lane()
    for used in range(1, 301):
        _step(lane, 1)
        assert pads._store.available < used + FIRST_BATCH_TOKENS
    assert maker.asked == [8, 16, 32, *[BATCH_TOKENS] * 4]
    assert pads.waited == len(maker.asked)
    assert (maker.asked[0], maker.asked[3]) == (FIRST_BATCH_TOKENS, BATCH_TOKENS)


def test_a_step_with_many_rows_gets_them_in_one_batch_and_no_more_than_there_is_room_for() -> None:
    pads, _, maker = _pads(1, "wait", capacity=41)
    lane = pads.lane()
    _step(lane, 41)
    assert maker.asked == [40]
    _step(lane, 1)
    assert maker.asked == [40, 2 * FIRST_BATCH_TOKENS]
    pads, _, maker = _pads(0, "wait", capacity=10)
    lane = pads.lane()
    for rows in (1, 7, 1):
        _step(lane, rows)
    assert maker.asked == [FIRST_BATCH_TOKENS, 10]


def test_wait_makes_at_most_a_batch_at_a_time() -> None:
    told: list[int] = []
    rows = 2 * BATCH_TOKENS + 5
    pads, store, maker = _pads(0, "wait", capacity=3 * BATCH_TOKENS, on_wait=told.append)
    lane = pads.lane()
    _step(lane, rows)
    assert maker.asked == [BATCH_TOKENS, BATCH_TOKENS, 4 * FIRST_BATCH_TOKENS]
    assert told == [rows, rows - BATCH_TOKENS, rows - 2 * BATCH_TOKENS]
    assert store.taken == [range(rows)]
    assert pads.waited == 1


def test_a_step_larger_than_all_the_space_is_refused() -> None:
    pads, store, maker = _pads(0, "wait", capacity=4)
    lane = pads.lane()
    with pytest.raises(PadsExhaustedError) as caught:
        lane.draw(FIRST, 5)
    assert caught.value.got == "room for 4 tokens"
    assert "--step-tokens" in caught.value.expected
    assert (store.taken, maker.asked) == ([], [])
    _step(lane, 4)


def test_without_linear_weights_nothing_can_be_made() -> None:
    """A TEE that has only a bank: waiting would last for ever."""
    store = MemoryStore(LAYOUT, 8)
    fill(store, 2)
    pads = Pads(Pad(), store, None, "wait")
    lane = pads.lane()
    _step(lane, 2)
    with pytest.raises(PadsExhaustedError, match="no linear weights to make more from"):
        lane.draw(FIRST, 1)
    with pads.filling():
        pass
    assert pads._store.available == 0


def test_waiting_after_a_failed_step_finds_room_for_a_full_one() -> None:
    """What a failed step had taken must not keep its space."""
    pads, _, _ = _pads(4, "wait", capacity=4)
    lane = pads.lane()
    for _ in range(3):
        lane.draw(FIRST, 4)
    _step(lane, 4)


# --------------------------------------------------------------------------------- float noise


def test_factors_of_float_masks_are_floats() -> None:
    class FloatMaker:
        def fill(self, store: PadStore, tokens: int) -> None:
            with store.begin(tokens) as batch:
                for site in LAYOUT.sites:
                    ones = torch.full((tokens, site.out_features), 1.5)
                    batch.put(site.number, ones.view(torch.int32))
                batch.commit()

    pads, _, _ = _pads(0, "wait", mask=FloatNoise(sigma=2.0), maker=FloatMaker())
    lane = pads.lane()
    factors = lane.draw(FIRST, 4)
    assert factors.r.dtype == factors.u.dtype == torch.float32
    assert (factors.u == 1.5).all()
    # Normal numbers of deviation 2, and not the bits of uniform words.
    assert 0 < factors.r.abs().max() < 20


# ------------------------------------------------------------------------- in the background


def test_filling_makes_pads_until_the_store_is_full() -> None:
    full = threading.Event()
    capacity = 2 * BACKGROUND_BATCH_TOKENS + 3

    class Watched(Maker):
        def fill(self, store: PadStore, tokens: int) -> None:
            super().fill(store, tokens)
            if store.available == capacity:
                full.set()

    pads, _, maker = _pads(0, capacity=capacity, maker=Watched())
    with pads.filling():
        assert full.wait(30)
    assert maker.asked == [BACKGROUND_BATCH_TOKENS, BACKGROUND_BATCH_TOKENS, 3]
    assert pads._store.available == capacity
    assert (pads.waited, pads.in_tee) == (0, 0)


class Full(Maker):
    """Fails as a bank on a full disk does, until there is space."""

    def __init__(self) -> None:
        super().__init__()
        self.space = False
        self.tried = threading.Event()

    def fill(self, store: PadStore, tokens: int) -> None:
        self.tried.set()
        if not self.space:
            raise PadBankError("bank", got="0 bytes available", expected="4096 bytes")
        super().fill(store, tokens)


def test_a_full_disk_does_not_end_a_run_that_has_pads_left() -> None:
    pads, store, maker = _pads(2, "wait", maker=Full())
    lane = pads.lane()
    for _ in range(2):
        maker.tried.clear()
        with pads.filling():
            assert maker.tried.wait(30)
        _step(lane, 1)
    assert store.taken == [range(1), range(1, 2)]
    # None left: now it matters.
    for site in (FIRST, SECOND):
        with pytest.raises(PadBankError, match="0 bytes available"):
            lane.draw(site, 1)
    maker.space = True
    _step(lane, 1)
    assert not [thread for thread in threading.enumerate() if thread.name == "pads"]


def test_a_run_that_does_not_wait_is_told_why_no_more_pads_were_made() -> None:
    pads, _, maker = _pads(1, "fail", maker=Full())
    lane = pads.lane()
    with pads.filling():
        assert maker.tried.wait(30)
    _step(lane, 1)
    with pytest.raises(PadsExhaustedError) as caught:
        lane.draw(FIRST, 1)
    assert caught.value.got == (
        "0 left; making more failed: bank: got 0 bytes available, expected 4096 bytes"
    )
    assert isinstance(caught.value.__cause__, PadBankError)
    # A later attempt that succeeds is the end of it.
    maker.space = True
    while pads._store.available < 16:
        with pads.filling():
            pass
    _step(lane, 16)
    with pytest.raises(PadsExhaustedError) as caught:
        lane.draw(FIRST, 1)
    assert caught.value.got == "0 left"


def test_after_filling_a_step_draws_what_was_made() -> None:
    pads, store, _ = _pads(0, "fail", capacity=8)
    lane = pads.lane()
    with pads.filling():
        pass
    while pads._store.available < 8:  # the thread may not have had its turn
        with pads.filling():
            pass
    _step(lane, 8)
    assert store.taken == [range(8)]


def test_filling_stops_at_what_is_wanted_ahead() -> None:
    store = MemoryStore(LAYOUT, 3 * BACKGROUND_BATCH_TOKENS)
    enough = threading.Event()

    class Watched(Maker):
        def fill(self, store: PadStore, tokens: int) -> None:
            super().fill(store, tokens)
            if store.available >= 5:
                enough.set()

    maker = Watched()
    pads = Pads(Pad(), store, cast(PadMaker, maker), "wait", ahead=5)
    with pads.filling():
        assert enough.wait(30)
    assert maker.asked == [5]


def test_beside_steps_half_is_kept_ready() -> None:
    """What is ready is used at full speed; what is made is made in large products."""
    ahead = 4 * BACKGROUND_BATCH_TOKENS
    pads, store, _ = _pads(ahead, "fail", capacity=ahead)
    lane = pads.lane()
    beside = 2 * BACKGROUND_BATCH_TOKENS
    for ready, wanted in (
        (ahead, (0, 0)),
        (ahead - 1, (1, 0)),
        (beside + 1, (BACKGROUND_BATCH_TOKENS, 0)),
        (beside - BACKGROUND_BATCH_TOKENS + 1, (BACKGROUND_BATCH_TOKENS, 0)),
        (beside - BACKGROUND_BATCH_TOKENS, (BACKGROUND_BATCH_TOKENS,) * 2),
        (0, (BACKGROUND_BATCH_TOKENS,) * 2),
    ):
        if store.available > ready:
            _step(lane, store.available - ready)
        lane.end_step()
        assert tuple(max(0, pads._missing(load)) for load in LOADS) == wanted


def test_taking_pads_has_more_made() -> None:
    capacity = 2 * BACKGROUND_BATCH_TOKENS
    pads, _, maker = _pads(capacity, "fail", capacity=capacity)
    lane, made = pads.lane(), threading.Event()
    fill = maker.fill
    maker.fill = cast(Any, lambda *given: (fill(*given), made.set()))
    with pads.filling() as tell_load:
        tell_load("steps")
        for _ in range(2):
            _step(lane, BACKGROUND_BATCH_TOKENS)
        assert made.wait(30)
    assert maker.asked == [BACKGROUND_BATCH_TOKENS]


def test_a_run_that_waits_and_the_background_make_pads_in_turns() -> None:
    """A store lets one of them fill at a time, and says so."""
    pads, store, _ = _pads(0, "wait", capacity=4 * BATCH_TOKENS)
    lane = pads.lane()
    with pads.filling() as tell_load:
        for step in range(200):
            tell_load(LOADS[step % 2])
            _step(lane, 1 + step % 50)
    assert sum(len(taken) for taken in store.taken) == sum(1 + step % 50 for step in range(200))
