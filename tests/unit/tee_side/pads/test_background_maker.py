"""A thread makes pads beside a run, which goes first; what it meets is not lost."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

import pytest

from protocol.errors import PadBankError
from tee_side.protect.pads.background_maker import BackgroundMaker, Load

# A test that waits for what never comes fails.
WAIT_S = 30.0


class Work:
    """What is wanted under each load, and what was made. `before`: called with each batch."""

    def __init__(
        self, wanted: dict[Load, int], before: Callable[[], object] = lambda: None
    ) -> None:
        self.wanted = wanted
        self.before = before
        self.batches: list[int] = []
        self.changed = threading.Condition()
        self.maker = BackgroundMaker(lambda load: self.wanted.get(load, 0), self._make)

    def _make(self, tokens: int) -> None:
        self.before()
        with self.changed:
            self.batches.append(tokens)
            self.wanted = {load: n - tokens for load, n in self.wanted.items()}
            self.changed.notify_all()

    def until(self, batches: int) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: len(self.batches) >= batches, WAIT_S)


def _threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "pads"]


def test_it_makes_what_each_load_wants() -> None:
    work = Work({"steps": 3})
    with work.maker.running() as tell_load:
        tell_load("steps")
        work.until(1)
        # Nothing more is wanted of this load.
        work.wanted = {"idle": 5}
        tell_load("idle")
        work.until(2)
    assert work.batches == [3, 5]
    assert not _threads()


def test_it_looks_again_when_it_is_told_that_more_may_be_wanted() -> None:
    work = Work({})
    with work.maker.running():
        work.wanted = {"idle": 4}
        work.maker.notify()
        work.until(1)
    work.wanted = {"idle": 4}
    work.maker.notify()  # nobody makes any
    assert work.batches == [4]


def test_each_block_begins_idle_whatever_the_last_one_said() -> None:
    work = Work({})
    with work.maker.running() as tell_load:
        tell_load("steps")
    work.wanted = {"idle": 2}
    with work.maker.running():
        work.until(1)
    assert work.batches == [2]


def test_leaving_the_block_waits_for_the_batch_in_work_and_starts_no_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    started, leaving = threading.Event(), threading.Event()

    def slowly() -> None:
        started.set()
        assert leaving.wait(WAIT_S)
        work.wanted = {"idle": 20}

    join = threading.Thread.join

    def joined(thread: threading.Thread, timeout: float | None = None) -> None:
        leaving.set()  # the block is being left, and only now can the batch end
        join(thread, timeout)

    monkeypatch.setattr(threading.Thread, "join", joined)
    work = Work({"idle": 10}, slowly)
    with work.maker.running():
        assert started.wait(WAIT_S)
    assert work.batches == [10]
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
        _until(work, lambda: work.maker._held_off)
        assert not seen
        go_on.set()
        thread.join(WAIT_S)
        work.until(2)
    assert seen == [([10], False)]


def test_what_failed_is_tried_again_when_the_load_changes() -> None:
    tries: list[bool] = []
    full = PadBankError("bank", got="0 bytes available", expected="4096 bytes")

    def write() -> None:
        tries.append(space)
        if not space:
            raise full

    space, work = False, Work({"idle": 1, "steps": 1}, write)
    with work.maker.running() as tell_load:
        _until(work, lambda: work.maker._failed)
        assert work.maker.failure is full
        work.maker.notify()
        tell_load("idle")  # no change
        space = True
        tell_load("steps")
        work.until(1)
    assert tries == [False, True]
    assert work.maker.failure is None


def _until(work: Work, holds: Callable[[], bool]) -> None:
    with work.maker._changed:
        assert work.maker._changed.wait_for(holds, WAIT_S)


def test_a_run_that_could_make_pads_has_them_tried_again() -> None:
    full = PadBankError("bank", got="0 bytes available", expected="4096 bytes")

    def write() -> None:
        if not space:
            raise full

    space, work = False, Work({"idle": 1}, write)
    with work.maker.running():
        _until(work, lambda: work.maker._failed)
        with pytest.raises(KeyError), work.maker.held_off():
            raise KeyError
        assert work.maker.failure is full
        space = True
        with work.maker.held_off():
            assert not work.batches
        work.until(1)
    assert work.maker.failure is None


@pytest.mark.parametrize("where", ["make", "wanted"])
def test_a_mistake_is_raised_where_the_load_is_told(where: str) -> None:
    def fail(*_: object) -> int:
        raise RuntimeError("pads: got a second batch")

    maker = BackgroundMaker(*((lambda _: 1, fail) if where == "make" else (fail, print)))

    def run() -> None:
        with maker.running() as tell_load:
            with maker._changed:
                assert maker._changed.wait_for(lambda: maker._mistake is not None, WAIT_S)
            tell_load("idle")  # which is no change
            told.append("idle")

    told: list[Load] = []
    with pytest.raises(RuntimeError, match="a second batch"):
        run()
    assert not told
    assert not _threads()


def test_a_mistake_is_raised_when_the_block_is_left_but_for_an_error_of_its_own() -> None:
    def fail() -> None:
        raise RuntimeError("pads: got a second batch")

    maker = Work({"idle": 1}, fail).maker
    with pytest.raises(RuntimeError, match="a second batch"), maker.running(), maker._changed:
        assert maker._changed.wait_for(lambda: maker._mistake is not None, WAIT_S)
    with pytest.raises(KeyError), Work({"idle": 1}, fail).maker.running():
        raise KeyError
    assert not _threads()


def test_steps_go_first_on_the_cores() -> None:
    niceness: list[int] = []
    work = Work({"idle": 1}, lambda: niceness.append(os.getpriority(os.PRIO_PROCESS, 0)))
    before = os.getpriority(os.PRIO_PROCESS, 0)
    with work.maker.running():
        work.until(1)
    assert min(19, before + 1) <= niceness[0]
    assert os.getpriority(os.PRIO_PROCESS, 0) == before
