"""Pads undo the mask exactly, are handed out once, for one input; what if none are left."""

import os
import random
import threading
from collections.abc import Callable
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from protocol.errors import ModelError, PadBankError, PadsExhaustedError, TsqpError
from protocol.model.checkpoint import Checkpoint
from protocol.model.config import read_config
from protocol.model.weights import QuantizedLinear, load_quantized
from tee_side.assembly import Assembly
from tee_side.protect.masks.mask import Factors, Pad
from tee_side.protect.pads import source
from tee_side.protect.pads.background_maker import (
    BACKGROUND_BATCH_TOKENS,
    BackgroundMaker,
    Load,
    missing,
)
from tee_side.protect.pads.source import (
    PadLane,
    Pads,
    WhenOut,
    fill_pads,
    multiply_here,
)
from tee_side.protect.pads.store import MemoryStore, PadStore
from tee_side.protect.randomness import Keystream
from tee_side.protect.sites import IntegerSites, PadLayout, SiteShape
from tee_side.words import PROJECTIONS, Site
from tests.kit.model import Models
from tests.kit.pads import LAYOUT, fill, product
from tests.kit.rows import each_row

FIRST, SECOND = SITES = [site.number for site in LAYOUT.sites]
# A test that waits for what never comes fails.
WAIT_S = 30.0
# Site by site from a bank.
MANY_ROWS = 64


def _r(store: PadStore, indices: range, site: int) -> torch.Tensor:
    """Return what r of these indices is, whether it was read or not."""
    sizes = {site: LAYOUT.by_number[site].in_features}
    return Keystream(store._key).rows(indices, sizes)[site].elements()


class Lanes:
    """Two lanes of a store, and which indices each one's step has, with the sites it drew."""

    def __init__(self, rows_at_once: int) -> None:
        self.store = MemoryStore(LAYOUT, 160)
        self.store.rows_at_once = rows_at_once
        pads = Pads(Pad(), self.store, lambda _: None, "fail")
        self.lanes = [PadLane(pads), PadLane(pads)]
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


# As of a bank, and of a store in memory.
@each_row("rows_at_once", [PadStore.rows_at_once, MemoryStore.rows_at_once])
def test_however_steps_go_and_fail_no_pad_is_drawn_twice(rows_at_once: int) -> None:
    choose, asked = random.Random(1), list[tuple[Any, ...]]()
    lanes = Lanes(rows_at_once)
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
        self.tried = threading.Event()  # told of each attempt

    def fill(self, store: PadStore, tokens: int) -> None:
        self.tried.set()
        if self.error is not None:
            raise self.error
        self.asked.append(tokens)
        fill(store, tokens)


def _pads(
    ready: int, when_out: WhenOut = "fail", capacity: int = 16, **more: Any
) -> tuple[Pads, MemoryStore, Maker]:
    store, made = MemoryStore(LAYOUT, capacity), Maker()
    store.rows_at_once = PadStore.rows_at_once
    if ready:
        fill(store, ready)
    return Pads(Pad(), store, lambda n: made.fill(store, n), when_out, **more), store, made


def _step(lane: PadLane, rows: int) -> list[Factors]:
    return [lane.draw(site, rows) for site in SITES]


@each_row("rows", [1, 9, MANY_ROWS])
def test_what_was_read_ahead_is_not_drawn_in_a_forked_child_or_of_a_closed_store(rows: int) -> None:
    pads, store, _ = _pads(rows, capacity=rows)
    lane, parent = PadLane(pads), os.getpid()
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
    lane, read, read_all = PadLane(pads), store._start_reading, store._read_all

    def check(indices: range) -> None:
        if indices.start < rows:
            raise PadBankError("bank", "another record than was written", "its tag")

    def tampered(indices: range, site: SiteShape) -> Callable[[], torch.Tensor]:
        def waits() -> torch.Tensor:
            if site.number == SECOND:
                check(indices)
            return read(indices, site)()

        return waits

    def all_tampered(indices: range) -> dict[int, torch.Tensor]:
        check(indices)
        return read_all(indices)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(store, "_start_reading", tampered)
        patch.setattr(store, "_read_all", all_tampered)
        # One row is read of all sites at once, many rows site by site.
        if rows > 1:
            lane.draw(FIRST, rows)
        with pytest.raises(PadBankError, match="another record"):
            lane.draw(SECOND, rows)
    factors = lane.draw(SECOND, rows)
    assert torch.equal(factors.r, _r(store, range(rows, 2 * rows), SECOND))
    assert torch.equal(factors.u, product(SECOND, factors.r))


def test_a_run_that_would_wait_for_ever_is_refused() -> None:
    pads, _, maker = _pads(0, "wait")
    first, second = PadLane(pads), PadLane(pads)
    with pytest.raises(PadsExhaustedError, match=r"room for 16 tokens, expected 17"):
        first.draw(FIRST, 17)
    assert (maker.asked, pads.store.used) == ([], 0)
    # Two lanes, of which each fits.
    first.draw(FIRST, 10)
    with pytest.raises(PadsExhaustedError, match="room for 16 tokens, used by this step"):
        second.draw(FIRST, 10)
    for lane in (first, second):
        lane.end_step()
    _step(second, 16)


def test_a_full_disk_ends_a_run_only_where_pads_are_out() -> None:
    pads, _, maker = _pads(1, "wait")
    lane = PadLane(pads)
    maker.error = PadBankError("bank", got="0 bytes available", expected="4096 bytes")
    with pads.filling():
        assert maker.tried.wait(WAIT_S)
    _step(lane, 1)
    with pytest.raises(PadBankError, match="0 bytes available"):
        lane.draw(FIRST, 1)
    # One that does not wait is told why.
    pads.when_out = "fail"
    with pytest.raises(PadsExhaustedError, match="0 left; making more failed: bank: got 0 bytes"):
        lane.draw(FIRST, 1)


def test_beside_steps_half_is_kept_ready_and_made_in_large_products() -> None:
    ahead, batch = 4 * BACKGROUND_BATCH_TOKENS, BACKGROUND_BATCH_TOKENS
    pads, store, _ = _pads(ahead, "fail", ahead)
    lane = PadLane(pads)
    for ready, wanted in (
        (ahead, (0, 0)),
        (ahead - 1, (1, 0)),
        (batch + 1, (batch, 0)),
        (batch, (batch, batch)),
        (0, (batch, batch)),
    ):
        if store.available > ready:
            _step(lane, store.available - ready)
        lane.end_step()
        assert tuple(max(0, missing(store, ahead, load)) for load in ("idle", "steps")) == wanted


def test_a_run_waits_for_the_batch_in_work_and_then_goes_first() -> None:
    started, go_on = threading.Event(), threading.Event()
    batches, seen = list[int](), list[tuple[list[int], bool]]()

    def slowly(tokens: int) -> None:
        started.set()
        assert go_on.wait(WAIT_S)
        batches.append(tokens)

    maker = BackgroundMaker(lambda _: 10 if len(batches) < 2 else 0, slowly)

    def until(holds: Callable[[], object]) -> None:
        with maker._changed:
            assert maker._changed.wait_for(lambda: bool(holds()), WAIT_S)

    def run() -> None:
        with maker.held_off():
            maker.notify()  # as taking pads does
            with maker._changed:
                seen.append((list(batches), maker._makes))

    with maker.running():
        assert started.wait(WAIT_S)
        thread = threading.Thread(target=run)
        thread.start()
        until(lambda: maker._held_off)
        assert not seen
        go_on.set()
        thread.join(WAIT_S)
        until(lambda: len(batches) >= 2)
    assert seen == [([10], False)]


def test_what_failed_is_tried_again_after_a_while_however_often_steps_take_pads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock, again, tried = Mock(**{"monotonic.return_value": 0.0}), threading.Event(), list[int]()
    monkeypatch.setattr("tee_side.protect.pads.background_maker.time", clock)

    def make(tokens: int) -> None:
        tried.append(tokens)
        if len(tried) == 1:
            raise TsqpError("dealer", "away", "there")
        again.set()

    def notify_while_waiting(tries: int) -> bool:
        for _ in range(tries):
            maker.notify()  # as taking pads does
            if again.wait(0.01):
                return True
        return False

    maker = BackgroundMaker(lambda _: 0 if again.is_set() else 1, make)
    with maker.running():
        assert not notify_while_waiting(20)
        assert maker.failure is not None
        clock.monotonic.return_value = 6.0
        assert notify_while_waiting(1000)
    assert tried == [1, 1]
    assert maker.failure is None


def test_a_mistake_is_raised_where_the_load_is_told_or_the_block_is_left() -> None:
    def run(inside: Callable[[Callable[[Load], None]], object]) -> None:
        fail = Mock(side_effect=RuntimeError("pads: got a second batch"))
        maker = BackgroundMaker(lambda _: 1, fail)
        with maker.running() as tell_load:
            assert maker._ended.exception(WAIT_S) is not None
            inside(tell_load)

    with pytest.raises(RuntimeError, match="a second batch"):
        run(lambda tell_load: tell_load("idle"))
    with pytest.raises(RuntimeError, match="a second batch"):
        run(lambda _: None)
    with pytest.raises(KeyError):  # an error of the block's own
        run(lambda _: {}["missing"])
    assert "pads" not in [thread.name for thread in threading.enumerate()]


# More rows than a block of digits, and fewer.
@each_row("count", [1, 40])
def test_factors_are_the_exact_products_of_the_services_own_integers(
    saved_model: Models, count: int
) -> None:
    directory = saved_model("qwen2").directory
    config, checkpoint = read_config(directory), Checkpoint(directory)
    store = MemoryStore(PadLayout.of(config, [(n, op) for n in range(3) for op in PROJECTIONS]), 64)
    told = list[int]()
    weights = source.read_weights(checkpoint, config, "int8")
    multiply = multiply_here(Pad(), weights)
    fill_pads(multiply, store, count, told.append)
    fill_pads(multiply, store, 1)
    assert told == [count] * 15
    assert store.available == count + 1
    indices = store.take(count)
    for site in store.layout.sites:
        pad, u = store.start(indices, site.number)()
        exact = (
            pad.elements().long() @ load_quantized(checkpoint, config, *site.site).weight.long().t()
        )
        assert torch.equal(u, exact.to(torch.int32)), str(site)
        # Guards the test: these products do wrap.
        assert (exact.abs() >= 2**31).any()


def test_what_makes_no_pads_leaves_no_batch_behind(saved_model: Models) -> None:
    """A store without room, and weights that fail their check."""
    directory = saved_model("llama").directory
    config, checkpoint = read_config(directory), Checkpoint(directory)
    store = MemoryStore(PadLayout.of(config, [(n, op) for n in range(3) for op in PROJECTIONS]), 4)

    sites = IntegerSites(config, checkpoint, {}, torch.float32)
    known = sites.weights((1, "down_proj"))

    def refused(error: type[Exception], match: str, tokens: int) -> None:
        weights = source.read_weights(checkpoint, config, "int8", sites)
        for _ in range(2):  # however often they are asked for
            with pytest.raises(error, match=match):
                fill_pads(multiply_here(Pad(), weights), store, tokens)
        assert (store.available, store.room) == (0, 4)

    refused(ValueError, "got 5 to fill", 5)
    known.scale.mul_(2)  # what is read now differs from what was read before
    refused(ModelError, "down_proj in layer 1", 2)


def _fill(assembly: Assembly) -> None:
    for pads in assembly.pads.values():
        pads.fill(1)


def test_pads_are_made_from_the_weights_that_stay_or_else_from_the_directory(
    saved_model: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Either way, other weights are noticed: when they are loaded, or pads made from them."""
    read: list[Site] = []

    def noted(checkpoint: Any, config: Any, *site: Any) -> QuantizedLinear:
        read.append(site)
        return load_quantized(checkpoint, config, *site)

    monkeypatch.setattr("tee_side.protect.sites.load_quantized", noted)
    # Under the default policy prefill is in the TEE, which holds all of them.
    assembly = saved_model("llama").tee("shielded").assembly
    read.clear()
    _fill(assembly)
    assert read == []
    assembly = saved_model("llama").tee("shielded-prefill").assembly
    read.clear()
    _fill(assembly)
    assert len(read) == len(set(read)) == 3 * 4 + 1

    def other(self: IntegerSites, site: Site, weights: QuantizedLinear) -> None:
        raise ModelError(str(site), got="others", expected="the same")

    monkeypatch.setattr(IntegerSites, "take_scales", other)
    for policy in ("shielded", "shielded-prefill"):
        with pytest.raises(ModelError, match="qkv_proj"):
            _fill(saved_model("llama").tee(policy).assembly)
