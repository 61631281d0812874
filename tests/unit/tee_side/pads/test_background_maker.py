"""A thread makes pads beside a run, which goes first; what it meets is not lost."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from protocol.errors import PadBankError
from tee_side.protect.pads.background_maker import BackgroundMaker, Load
from tests.kit.rows import each_row

# A test that waits for what never comes fails.
WAIT_S = 30.0
FULL = PadBankError("bank", got="0 bytes available", expected="4096 bytes")


class Work:
    """What is wanted under each load, and what was made. `before`: called with each batch."""

    def __init__(self, wanted: dict[Load, int], before: Callable[[], object] = tuple) -> None:
        self.wanted = wanted
        self.before = before
        self.batches: list[int] = []
        self.maker = BackgroundMaker(lambda load: self.wanted.get(load, 0), self._make)

    def _make(self, tokens: int) -> None:
        self.before()
        self.wanted = {load: n - tokens for load, n in self.wanted.items()}
        self.batches.append(tokens)

    def until(self, holds: Callable[[], object]) -> None:
        changed = self.maker._changed
        with changed:
            assert changed.wait_for(lambda: bool(holds()), WAIT_S)


def _threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "pads"]


def test_it_makes_what_each_load_wants_and_begins_each_block_idle() -> None:
    work = Work({"steps": 3})
    with work.maker.running() as tell_load:
        tell_load("steps")
        work.until(lambda: work.batches == [3])
        # Nothing more is wanted of this load.
        work.wanted = {"idle": 5}
        tell_load("idle")
        work.until(lambda: work.batches == [3, 5])
        work.wanted = {"idle": 4}
        work.maker.notify()
        work.until(lambda: work.batches == [3, 5, 4])
        tell_load("steps")
    assert not _threads()
    work.wanted = {"idle": 2}
    work.maker.notify()  # nobody makes any
    assert work.batches == [3, 5, 4]
    with work.maker.running():
        work.until(lambda: work.batches == [3, 5, 4, 2])
    assert not _threads()


def test_a_run_waits_for_the_batch_in_work_and_then_goes_first() -> None:
    started, go_on = threading.Event(), threading.Event()

    def slowly() -> None:
        started.set()
        assert go_on.wait(WAIT_S)
        work.wanted = {"idle": 20}

    work = Work({"idle": 10}, slowly)
    seen: list[tuple[list[int], bool]] = []

    def run() -> None:
        with work.maker.held_off():
            work.maker.notify()  # as taking pads does
            with work.maker._changed:
                seen.append((list(work.batches), work.maker._makes))

    with work.maker.running():
        assert started.wait(WAIT_S)
        thread = threading.Thread(target=run)
        thread.start()
        work.until(lambda: work.maker._held_off)
        assert not seen
        go_on.set()
        thread.join(WAIT_S)
        work.until(lambda: len(work.batches) >= 2)
    assert seen == [([10], False)]


@each_row("again", ["another load", "a run that could"])
def test_what_failed_is_tried_again_when_something_has_changed(again: str) -> None:
    space, tries = False, list[bool]()

    def write() -> None:
        tries.append(space)
        if not space:
            raise FULL

    work = Work({"idle": 1, "steps": 1}, write)
    with work.maker.running() as tell_load:
        work.until(lambda: work.maker._failed)
        work.maker.notify()
        tell_load("idle")  # no change
        with pytest.raises(KeyError), work.maker.held_off():
            raise KeyError  # of a run that could make none
        assert work.maker.failure is FULL
        space = True
        if again == "another load":
            tell_load("steps")
        else:
            with work.maker.held_off():
                assert not work.batches
        work.until(lambda: work.batches)
    assert tries == [False, True]
    assert work.maker.failure is None


@each_row("where", ["make", "wanted"])
def test_a_mistake_is_raised_where_the_load_is_told_or_the_block_is_left(where: str) -> None:
    def fail(*_: object) -> int:
        raise RuntimeError("pads: got a second batch")

    def run(inside: Callable[[Callable[[Load], None]], object]) -> None:
        maker = BackgroundMaker(*((lambda _: 1, fail) if where == "make" else (fail, print)))
        with maker.running() as tell_load:
            with maker._changed:
                assert maker._changed.wait_for(lambda: maker._mistake is not None, WAIT_S)
            inside(tell_load)

    told: list[Load] = []
    with pytest.raises(RuntimeError, match="a second batch"):
        run(lambda tell_load: (tell_load("idle"), told.append("idle")))  # which is no change
    assert not told
    with pytest.raises(RuntimeError, match="a second batch"):
        run(lambda _: None)
    with pytest.raises(KeyError):  # an error of the block's own
        run(lambda _: {}["missing"])
    assert not _threads()
