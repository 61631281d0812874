"""What every store promises: each index once, each pair once, the right u, space recycled."""

import os
import random
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch

from protocol.errors import PadsExhaustedError
from tee_side.protect.pads import bank as bank_module
from tee_side.protect.pads.store import Draw, MemoryStore, PadStore, Words
from tests.kit.pads import LAYOUT, create, fill, product, put_all, reopen, use

CAPACITY = 8
SITES = frozenset(site.number for site in LAYOUT.sites)


class Checked:
    """One store, and in plain sets what it may hand out.

    A step that is refused says so, and changes nothing.
    """

    def __init__(self, kind: str) -> None:
        self._memory = TemporaryDirectory(prefix="tsqp-tests-", dir="/dev/shm")
        self.folder = Path(self._memory.name)
        self.group = 4 if kind == "groups" else 1
        self.capacity = CAPACITY * (2 if kind == "groups" else 1)
        self.reopens = kind != "memory"
        self.store: PadStore = (
            create(self.folder, self.capacity, group=self.group)
            if self.reopens
            else MemoryStore(LAYOUT, self.capacity)
        )
        self.block = 16
        self.first = self.filled = self.filled_before = self.next = 0
        self.in_use: dict[int, set[int]] = {}
        # Beginnings of all r that were handed out. Equal ones are a coincidence of 2^-64.
        self.drawn: set[bytes] = set()
        self.held: dict[tuple[int, range], Words] = {}
        self.pending: list[tuple[range, int, Draw]] = []

    def close(self) -> None:
        self.store.close()
        self.let_go(range(self.next))
        self._memory.cleanup()

    def let_go(self, indices: range) -> None:
        """What was handed out has not changed until it is released."""
        self.result()
        for site, held in [*self.held]:
            if max(held.start, indices.start) < min(held.stop, indices.stop):
                pad, u = self.held.pop((site, held))
                assert torch.equal(u, product(site, pad.elements()))

    @property
    def oldest(self) -> int:
        return min(self.in_use, default=self.next)

    @property
    def room(self) -> int:
        return self.oldest // self.group * self.group + self.capacity - self.filled

    def got(self, indices: range, site: int, pair: Words) -> None:
        r, u = pair[0].elements(), pair[1]
        assert torch.equal(u, product(site, r))
        rows = [row[:2].numpy().tobytes() for row in r]
        assert len(rows) == len(indices)
        assert self.drawn.isdisjoint(rows)
        self.drawn.update(rows)
        self.held[site, indices] = pair

    def fill(self, groups: int, commit: bool) -> None:
        count = groups * self.group
        if not 1 <= count <= self.room:
            expected = rf"got {count} to fill, expected {self.group} \.\. {self.room}, by "
            with pytest.raises(ValueError, match=expected):
                self.store.begin(count)
            return
        with self.store.begin(count) as batch:
            assert batch.indices == range(self.filled, self.filled + count)
            put_all(batch)
            if commit:
                batch.commit()
                self.filled += count

    def take(self, count: int, right: bool) -> None:
        left = self.filled - self.next
        count = min(count, left) if right else count
        if count < 1:
            with pytest.raises(ValueError, match=f"got {count} to take"):
                self.store.take(count)
        elif count > left:
            with pytest.raises(PadsExhaustedError) as caught:
                self.store.take(count)
            assert (caught.value.got, caught.value.expected) == (f"{left} pads", f"{count}")
            assert caught.value.retryable
        else:
            taken = range(self.next, self.next + count)
            assert self.store.take(count) == taken
            self.next = taken.stop
            self.in_use |= {index: set(SITES) for index in taken}

    def asked(self, offset: int, count: int, sites: frozenset[int], right: bool) -> range:
        """Return indices; if it is to be right, those of them that have these sites in use."""
        first = self.oldest + offset
        wanted = range(first, first + count)
        wrong = (at for at in wanted if not sites <= self.in_use.get(at, set()))
        stop = next(wrong, wanted.stop) if right else wanted.stop
        return range(first, max(stop, first + 1))

    def read(self, offset: int, count: int, how: str, site: int, right: bool) -> None:
        sites = SITES if how == "all" else frozenset({site})
        indices = self.asked(offset, count, sites, right)
        calls: dict[str, Callable[[], dict[int, Any]]] = {
            "now": lambda: {site: self.store.start(indices, site)()},
            "later": lambda: {site: self.store.start(indices, site)},
            "all": lambda: self.store.all_factors(indices),
        }
        wrong = [index for index in indices if not sites <= self.in_use.get(index, set())]
        if wrong:
            with pytest.raises(RuntimeError, match=f"index {wrong[0]},|used or released"):
                calls[how]()
            return
        for index in indices:
            self.in_use[index] -= sites
        for number, found in calls[how]().items():
            if how == "later":
                self.pending.append((indices, number, found))
            else:
                self.got(indices, number, found)

    def result(self) -> None:
        for indices, site, draw in self.pending:
            self.got(indices, site, draw())
        self.pending.clear()

    def release(self, offset: int, count: int) -> None:
        indices = self.asked(offset, count, SITES, right=False)
        self.let_go(indices)
        self.store.release(indices)
        for index in indices:
            self.in_use.pop(index, None)

    def reopen(self, block: int) -> None:
        """As after a crash: of a block that was begun nothing is left, and nothing comes again."""
        if not self.reopens:
            return
        left, used = self.store.left, self.next - self.first
        self.store.close()
        self.store = reopen(self.folder, block)
        assert self.store.available == left
        lost = self.filled - left - self.next
        # A run loses no more than it used, and never a whole block.
        assert 0 <= lost <= min(used, self.block - 1)
        self.first = self.next = self.next + lost
        self.filled_before, self.block = self.filled, block
        self.in_use.clear()

    def counts(self) -> None:
        store = self.store
        assert store.available == self.filled - self.next >= store.left
        assert (store.room, store.capacity, store.layout) == (self.room, self.capacity, LAYOUT)
        assert store.made == self.filled - self.filled_before
        assert store.used == self.next - self.first


def _step(choose: random.Random, checked: Checked) -> tuple[Any, ...]:
    """Choose what is asked next: mostly, but not always, what is allowed."""
    site, count = choose.choice(sorted(SITES)), choose.choice((1, 1, 2, 3, 5, 9))
    place, right = choose.choice((0, 0, 0, 1, 2)), choose.random() < 0.8
    fill = ("fill", choose.randint(0, 5), right)
    if not checked.in_use and choose.random() < 0.7:
        return ("take", count, right) if checked.filled > checked.next else fill
    return choose.choice(
        [
            *[fill, fill, ("take", choose.randint(-1, 9), right)],
            *[("read", place, count, choose.choice(("now", "later", "all")), site, right)] * 12,
            *[("release", place, count)] * 4,
            *[("result",), ("reopen", choose.choice((1, 4, 16)))],
        ]
    )


@pytest.mark.parametrize("kind", ["memory", "bank", "groups"])
def test_whatever_is_asked_each_pad_is_right_and_handed_out_once(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bank_module, "reading_threads", lambda: 3)
    choose, asked = random.Random(1), list[tuple[Any, ...]]()
    checked = Checked(kind)
    try:
        for _ in range(3500):
            asked.append(_step(choose, checked))
            name, *arguments = asked[-1]
            getattr(checked, name)(*arguments)
            checked.counts()
    except BaseException as error:
        error.add_note(f"after {asked[-40:]}")
        raise
    finally:
        checked.close()
    assert len(checked.drawn) > 500  # guards the test


@pytest.fixture(params=["memory", "bank"])
def store(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[PadStore]:
    """Each kind of store, full, with three threads that draw."""
    monkeypatch.setattr(bank_module, "reading_threads", lambda: 3)
    made: PadStore = (
        MemoryStore(LAYOUT, CAPACITY) if request.param == "memory" else create(tmp_path, CAPACITY)
    )
    with made:
        fill(made, CAPACITY)
        yield made


def test_a_store_that_would_hold_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="got capacity 0, block 1, expected at least 1"):
        MemoryStore(LAYOUT, 0)


def test_a_batch_is_committed_as_a_whole_or_filled_again(store: PadStore) -> None:
    use(store, store.take(6))
    with pytest.raises(KeyError):
        store.start(store.take(1), 0)()
    with store.begin(2) as batch:
        assert store.room == 4
        with pytest.raises(RuntimeError, match="second batch"):
            store.begin(1)
        first = batch.r(1)
    with pytest.raises(RuntimeError, match="has ended"):
        batch.commit()
    assert (store.available, store.room) == (1, 6)
    with store.begin(3) as batch:
        assert torch.equal(batch.r(1)[:2], first)
        for shape, dtype in (((3, 3), torch.int32), ((3, 2), torch.int64)):
            with pytest.raises(ValueError, match=r"layer 0 o_proj.*expected torch.int32 \[3, 2\]"):
                batch.put(1, torch.zeros(shape, dtype=dtype))
        for site in sorted(SITES):  # not contiguous
            with pytest.raises(RuntimeError, match="sites not put"):
                batch.commit()
            batch.put(site, product(site, batch.r(site)).t().contiguous().t())
        with pytest.raises(RuntimeError, match="put twice"):
            batch.put(1, product(1, batch.r(1)))
        batch.commit()
    use(store, store.take(4))


def _refuses(store: PadStore, indices: range, why: str) -> None:
    calls: dict[str, Callable[[], object]] = {
        "take": lambda: store.take(1),
        "all_factors": lambda: store.all_factors(indices),
        "start": lambda: store.start(indices, 1),
        "begin": lambda: store.begin(1),
        "check_usable": store.check_usable,
    }
    for name, call in calls.items():
        with pytest.raises(RuntimeError, match=why):
            raise AssertionError(f"{name}: {call()}")


def test_a_store_that_was_closed_or_copied_by_fork_does_nothing(
    store: PadStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken, parent = store.take(2), os.getpid()
    with monkeypatch.context() as patch:
        patch.setattr(os, "getpid", lambda: parent + 1)
        _refuses(store, taken, "copied by fork")
    use(store, taken)
    taken, batch = store.take(1), store.begin(1)
    store.close()
    _refuses(store, taken, "closed store")
    put = partial(batch.put, 1, torch.zeros(1, 2, dtype=torch.int32))
    for refused in (put, partial(batch.buffer, 1), batch.commit):
        with pytest.raises(RuntimeError, match="closed store"):
            refused()
    batch.abandon()
    store.close()


def test_nothing_is_filled_again_while_a_thread_may_read_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bank_module, "reading_threads", lambda: 3)
    store = create(tmp_path, CAPACITY)
    fill(store, CAPACITY)
    go, read = threading.Event(), store._open

    def waits(parts: list[Future[None]]) -> None:
        go.set()
        wait(parts)

    monkeypatch.setattr(bank_module, "wait", waits)
    monkeypatch.setattr(store, "_open", lambda *what: (go.wait(), read(*what)))
    indices = store.take(CAPACITY)
    draws = {site.number: store.start(indices, site.number) for site in LAYOUT.sites}
    store.release(indices)
    fill(store, CAPACITY)
    waited = go.is_set()
    go.set()
    for site, draw in draws.items():
        pad, u = draw()
        assert torch.equal(u, product(site, pad.elements()))
    assert waited
    store.close()
