"""What every store promises: each index once, each pair once, the right u, space recycled."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from protocol.errors import PadBankError, PadsExhaustedError
from tee_side.protect.pads import store as store_module
from tee_side.protect.pads.store import MemoryStore, PadStore
from tee_side.protect.randomness import Keystream
from tests.unit.tee_side.pads.tiny import LAYOUT, create, fill, product, put_all, use

CAPACITY = 8


@pytest.fixture(params=["memory", "bank"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[PadStore]:
    """Each kind of store, empty."""
    made: PadStore = (
        MemoryStore(LAYOUT, CAPACITY) if request.param == "memory" else create(tmp_path, CAPACITY)
    )
    with made:
        yield made


def test_empty_store(store: PadStore) -> None:
    assert (store.available, store.room, store.capacity) == (0, CAPACITY, CAPACITY)
    assert store.layout == LAYOUT
    with pytest.raises(PadsExhaustedError, match="got 0 pads, expected 1"):
        store.take(1)


def test_pads_are_right_and_used_once(store: PadStore) -> None:
    fill(store, 5)
    assert (store.available, store.room) == (5, CAPACITY - 5)
    indices = store.take(3)
    assert indices == range(3)
    use(store, indices)
    assert store.available == 2
    with pytest.raises(RuntimeError, match="index 0"):
        store.factors(indices, LAYOUT.sites[0].number)


def test_exhausted_store_hands_nothing_out(store: PadStore) -> None:
    fill(store, 3)
    store.take(1)
    with pytest.raises(PadsExhaustedError) as caught:
        store.take(3)
    assert (caught.value.got, caught.value.expected) == ("2 pads", "3")
    assert caught.value.retryable
    assert store.take(2) == range(1, 3)


def test_slots_are_used_again_with_fresh_pads(store: PadStore) -> None:
    seen = set()
    next_index = 0
    for count in (8, 3, 5, 8, 1, 7, 8):
        fill(store, count)
        indices = store.take(count)
        assert indices == range(next_index, next_index + count)
        next_index += count
        for r in use(store, indices):
            seen |= {tuple(row) for row in r.tolist()}
    assert next_index > 4 * CAPACITY
    assert len(seen) == next_index * len(LAYOUT.sites)


def test_room_waits_for_what_is_in_use(store: PadStore) -> None:
    fill(store, CAPACITY)
    first, second = store.take(2), store.take(3)
    assert store.room == 0
    use(store, second)
    assert store.room == 0  # the oldest two are still in use
    store.factors(first, LAYOUT.sites[0].number)
    assert store.room == 0
    with pytest.raises(ValueError, match=r"expected 1 \.\. 0"):
        store.begin(1)
    store.factors(first, LAYOUT.sites[1].number)
    assert store.room == 5
    fill(store, 5)
    use(store, store.take(CAPACITY))


def test_released_indices_make_room_and_are_gone(store: PadStore) -> None:
    fill(store, CAPACITY)
    indices = store.take(2)
    store.factors(indices, LAYOUT.sites[0].number)
    store.release(indices)
    store.release(indices)
    assert store.room == 2
    with pytest.raises(RuntimeError, match="index 0"):
        store.factors(indices, LAYOUT.sites[1].number)


def test_only_taken_indices_have_factors(store: PadStore) -> None:
    fill(store, 4)
    store.take(2)
    site = LAYOUT.sites[0].number
    with pytest.raises(RuntimeError, match="index 2"):
        store.factors(range(1, 3), site)
    # Nothing of a refused range is used up.
    r, u = store.factors(range(2), site)
    assert torch.equal(u, product(site, r))


def test_unknown_site_and_bad_counts(store: PadStore) -> None:
    fill(store, 1)
    with pytest.raises(KeyError):
        store.factors(store.take(1), 0)
    for count in (0, -1):
        with pytest.raises(ValueError, match=f"got {count} to take"):
            store.take(count)
        with pytest.raises(ValueError, match=f"got {count} to fill"):
            store.begin(count)


def test_abandoned_batch_is_not_available_and_filled_again(store: PadStore) -> None:
    with store.begin(4) as batch:
        put_all(batch)
        assert store.room == CAPACITY - 4
        first = batch.r(1)
    assert (store.available, store.room) == (0, CAPACITY)
    with pytest.raises(RuntimeError, match="has ended"):
        batch.commit()
    with store.begin(6) as batch:
        assert batch.indices == range(6)
        assert torch.equal(batch.r(1)[:4], first)
        put_all(batch)
        batch.commit()
    use(store, store.take(6))


def test_all_sites_at_once_are_what_each_is_alone_and_used_up(store: PadStore) -> None:
    fill(store, 8)
    store.take(1)
    for count in (1, 2, 4):  # of one group of a bank, and of two
        indices = store.take(count)
        for site, (r, u) in store.all_factors(indices).items():
            shape = store.layout.by_number[site]
            assert torch.equal(r, Keystream(store._key).rows(indices, site, shape.in_features))
            assert torch.equal(u, product(site, r))
        with pytest.raises(RuntimeError, match="used or released"):
            store.all_factors(indices)
        with pytest.raises(RuntimeError, match="neither released nor used"):
            store.factors(indices, 1)


@pytest.mark.parametrize("lost", ["one site", "released"])
def test_all_sites_at_once_are_read_of_none_where_one_was(store: PadStore, lost: str) -> None:
    fill(store, 4)
    indices = store.take(2)
    if lost == "released":
        store.release(range(1, 2))
    else:
        store.factors(range(1, 2), 5)
    with pytest.raises(RuntimeError, match="used or released"):
        store.all_factors(indices)
    store.factors(range(1), 5)  # still there


def test_incomplete_batch_cannot_be_committed(store: PadStore) -> None:
    with store.begin(2) as batch:
        batch.put(1, product(1, batch.r(1)))
        with pytest.raises(RuntimeError, match="1 sites not put"):
            batch.commit()
        batch.put(5, product(5, batch.r(5)))
        batch.commit()
    assert store.available == 2


def test_batch_refuses_what_does_not_fit(store: PadStore) -> None:
    with store.begin(2) as batch:
        with pytest.raises(RuntimeError, match="second batch"):
            store.begin(1)
        for wrong in (
            torch.zeros(2, 3, dtype=torch.int32),
            torch.zeros(3, 2, dtype=torch.int32),
            torch.zeros(4, dtype=torch.int32),
            torch.zeros(2, 2, dtype=torch.int64),
        ):
            with pytest.raises(ValueError, match=r"layer 0 o_proj.*expected torch.int32 \[2, 2\]"):
                batch.put(1, wrong)
        with pytest.raises(KeyError):
            batch.put(2, torch.zeros(2, 2, dtype=torch.int32))
        batch.put(1, product(1, batch.r(1)))
        with pytest.raises(RuntimeError, match="put twice"):
            batch.put(1, product(1, batch.r(1)))


def test_put_takes_tensors_that_are_not_contiguous(store: PadStore) -> None:
    with store.begin(2) as batch:
        for site in LAYOUT.sites:
            u = product(site.number, batch.r(site.number))
            batch.put(site.number, u.t().contiguous().t())
        batch.commit()
    use(store, store.take(2))


def test_closed_store_does_nothing(store: PadStore) -> None:
    fill(store, 2)
    indices = store.take(1)
    batch = store.begin(1)
    store.close()
    for call in (
        lambda: store.take(1),
        lambda: store.factors(indices, 1),
        lambda: store.begin(1),
        store.check_usable,
        lambda: batch.put(1, torch.zeros(1, 2, dtype=torch.int32)),
        batch.commit,
    ):
        with pytest.raises(RuntimeError, match="closed store"):
            call()
    batch.abandon()
    store.close()


def test_copy_in_a_forked_child_is_refused(
    store: PadStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(store, 4)
    taken = store.take(2)
    parent = os.getpid()
    monkeypatch.setattr(os, "getpid", lambda: parent + 1)
    for call in (
        lambda: store.take(1),
        lambda: store.factors(taken, 1),
        lambda: store.start(taken, 1),
        lambda: store.begin(1),
        store.check_usable,
    ):
        with pytest.raises(RuntimeError, match="copied by fork"):
            call()
    monkeypatch.undo()
    store.check_usable()
    use(store, taken)


def test_one_thread_fills_while_another_takes(store: PadStore) -> None:
    total, seen = 300, list[int]()
    failed: list[Exception] = []
    changed = threading.Condition()

    def filler() -> None:
        left = total
        try:
            while left:
                with changed:
                    changed.wait_for(lambda: store.room > 0)
                count = min(left, store.room, 3)
                fill(store, count)
                left -= count
                with changed:
                    changed.notify_all()
        except Exception as error:  # noqa: BLE001 - shown by the thread that asserts
            failed.append(error)
            with changed:
                changed.notify_all()

    thread = threading.Thread(target=filler)
    thread.start()
    while len(seen) < total and not failed:
        with changed:
            changed.wait_for(lambda: failed or store.available > 0)
        if failed:
            break
        indices = store.take(min(2, store.available))
        use(store, indices)
        seen.extend(indices)
        with changed:
            changed.notify_all()
    thread.join()
    assert not failed
    assert seen == list(range(total))


def test_two_stores_in_memory_share_nothing() -> None:
    first, second = MemoryStore(LAYOUT, 1), MemoryStore(LAYOUT, 1)
    with first.begin(1) as one, second.begin(1) as other:
        assert not torch.equal(one.r(1), other.r(1))
        assert not torch.equal(one.r(1)[0, :2], one.r(5)[0])


@pytest.mark.parametrize("capacity", [0, -1])
def test_store_without_capacity_is_refused(capacity: int) -> None:
    with pytest.raises(ValueError, match=f"capacity {capacity}"):
        MemoryStore(LAYOUT, capacity)


def test_releasing_some_indices_leaves_the_others_to_be_read(store: PadStore) -> None:
    fill(store, 4)
    first, second = store.take(2), store.take(2)
    store.release(first)
    use(store, second)


# ------------------------------------------------------------------------- shared by threads


@pytest.fixture(params=["memory", "bank"])
def shared(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[PadStore]:
    """Each kind of store, full, with three threads that draw."""
    monkeypatch.setattr(store_module, "reading_threads", lambda: 3)
    made: PadStore = (
        MemoryStore(LAYOUT, CAPACITY) if request.param == "memory" else create(tmp_path, CAPACITY)
    )
    with made:
        fill(made, CAPACITY)
        yield made


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("counts", [(8,), (1, 7), (3, 5)])
def test_threads_draw_what_one_would(
    shared: PadStore, counts: tuple[int, ...], inference: bool
) -> None:
    with torch.inference_mode(inference):
        for indices in [shared.take(count) for count in counts]:
            draws = [shared.start(indices, site.number) for site in LAYOUT.sites]
            for site, draw in zip(LAYOUT.sites, draws, strict=True):
                r, u = draw()
                assert torch.equal(
                    r, Keystream(shared._key).rows(indices, site.number, site.in_features)
                )
                assert torch.equal(u, product(site.number, r))
                assert r.is_contiguous()
                assert u.is_contiguous()


@pytest.fixture
def go(shared: PadStore, monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Until it is set the threads of the store wait before they read."""
    event, read = threading.Event(), shared._read_into

    def waits(*what: Any) -> None:
        event.wait()
        read(*what)

    monkeypatch.setattr(shared, "_read_into", waits)
    return event


def test_a_draw_uses_its_pairs_up_before_anything_of_them_is_read(
    shared: PadStore, go: threading.Event
) -> None:
    indices, site = shared.take(CAPACITY), LAYOUT.sites[0].number
    draw = shared.start(indices, site)
    for again in (shared.factors, shared.start):
        with pytest.raises(RuntimeError, match="index 0"):
            again(indices, site)
    go.set()
    r, u = draw()
    assert torch.equal(u, product(site, r))


def test_nothing_is_filled_again_while_a_thread_may_read_it(
    shared: PadStore, go: threading.Event
) -> None:
    indices, site = shared.take(CAPACITY), LAYOUT.sites[0].number
    draw = shared.start(indices, site)
    shared.release(indices)
    filler = threading.Thread(target=fill, args=(shared, CAPACITY))
    filler.start()
    filler.join(0.05)
    go.set()
    filler.join()
    r, u = draw()
    assert torch.equal(r, Keystream(shared._key).rows(indices, site, r.shape[1]))
    assert torch.equal(u, product(site, r))


def test_a_store_closes_when_its_threads_have_read(shared: PadStore, go: threading.Event) -> None:
    indices, site = shared.take(CAPACITY), LAYOUT.sites[0].number
    draw = shared.start(indices, site)
    closer = threading.Thread(target=shared.close)
    closer.start()
    closer.join(0.05)
    go.set()
    closer.join()
    r, u = draw()
    assert torch.equal(u, product(site, r))
    with pytest.raises(RuntimeError, match="closed store"):
        shared.start(indices, LAYOUT.sites[1].number)


def test_an_error_in_a_thread_is_raised_where_the_result_is_asked_for(
    shared: PadStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object) -> None:
        raise PadBankError("bank", got="another record than was written", expected="its tag")

    indices, (first, second) = shared.take(CAPACITY), LAYOUT.sites
    with monkeypatch.context() as patch:
        patch.setattr(shared, "_read_into", refused)
        draw = shared.start(indices, first.number)
        with pytest.raises(PadBankError, match="another record"):
            draw()
    with pytest.raises(RuntimeError, match="index 0"):
        shared.factors(indices, first.number)
    r, u = shared.start(indices, second.number)()
    assert torch.equal(u, product(second.number, r))
