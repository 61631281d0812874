"""Products as graphs, on a stand-in for the device: what is captured, replayed, copied and used."""

from __future__ import annotations

import ctypes
import time
from typing import Any

import pytest
import torch

from gpu_side.cuda import products
from gpu_side.cuda.products import GRAPH_ROWS, Job, Products
from protocol.shared_memory import SlotMemory
from tests.unit.gpu_side.cuda.device import Device

K, N = 5, 3
WEIGHT = torch.arange(15.0).view(N, K)


def _products(device: Device, spin_us: float = 0.0) -> Products:
    stand_in: Any = device
    return Products(stand_in, (K * 4, N * 4), spin_us)


class _Copied:
    """A product that needs its rows on the device."""

    in_place = None

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        return rows @ WEIGHT.t()


_by_weight = _Copied()


def _ask(made: Products, rows: int = 1, place: str = "o_proj") -> None:
    """Compute once, and compare."""
    given, result = torch.randn(rows, K), torch.empty(rows, N)
    work = made.submit(place, _by_weight, given, result)
    assert work.ends_ns() <= time.perf_counter_ns()
    torch.testing.assert_close(result, _by_weight(given))


def test_what_comes_again_is_captured_and_then_replayed() -> None:
    device = Device()
    made = _products(device)
    _ask(made)
    assert device.attempts == 0
    for _ in range(3):
        _ask(made)
    assert (device.attempts, device.graphs[0].replays) == (1, 3)


def test_each_place_and_bucket_has_a_graph_of_its_own() -> None:
    device = Device()
    made = _products(device)
    for place in ("o_proj", "down_proj"):
        for rows in (3, 4, 5, 8, 1):
            _ask(made, rows, place)
            _ask(made, rows, place)
    # Of 1, 4 and 8 rows.
    assert device.attempts == 6


def test_many_rows_are_given_piece_by_piece() -> None:
    device = Device()
    made = _products(device)
    for _ in range(3):
        _ask(made, GRAPH_ROWS[-1] + 1)
    assert device.attempts == 0


def test_where_capture_fails_the_pieces_are_given_one_by_one() -> None:
    device = Device(captures=False)
    made = _products(device)
    for _ in range(4):
        _ask(made)
    assert (device.attempts, device.copies_in) == (1, 4)


def test_two_requests_under_way_do_not_share_memory() -> None:
    device = Device()
    made = _products(device)
    given = [torch.full((1, K), float(n)) for n in range(2)]
    results = [torch.empty(1, N) for _ in given]
    device.done = False
    works = [made.submit("o_proj", _by_weight, *one) for one in zip(given, results, strict=True)]
    assert all(work.ends_ns() > time.perf_counter_ns() - 1 for work in works)
    # The rows may go at once.
    for one in given:
        one.zero_()
    device.done = True
    for number, (work, result) in enumerate(zip(works, results, strict=True)):
        work.ends_ns()
        assert torch.equal(result, _by_weight(torch.full((1, K), float(number))))


def test_a_result_is_there_when_the_device_is_done_and_not_before() -> None:
    device = Device()
    result = torch.full((2, N), -1.0)
    device.done = False
    work = _products(device).submit("o_proj", _by_weight, torch.ones(2, K), result)
    work.ends_ns()
    assert torch.equal(result, torch.full((2, N), -1.0))
    device.done = True
    ended_ns = work.ends_ns()
    assert torch.equal(result, _by_weight(torch.ones(2, K)))
    result.zero_()
    assert work.ends_ns() == ended_ns
    assert not result.any()  # copied once


class _InPlace:
    """A product of elements that does jobs, as kernels would: when the device comes to it."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self.jobs = 0

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        return rows @ WEIGHT.t()

    def in_place(self, job: Job, rows: int) -> None:
        self.jobs += 1
        source, target, count = job.table.tolist()
        assert count <= rows
        for address, width in ((source, K), (target, N)):
            assert self._device.reaches_address(address, count * width * 4)
        memory = (ctypes.c_char * (count * K * 4)).from_address(source)
        given = torch.frombuffer(memory, dtype=torch.float32).view(count, K)
        self._device.later.append(lambda: _store(target, self(given), job))
        self._device.go_on()


def _store(address: int, result: torch.Tensor, job: Job) -> None:
    ctypes.memmove(address, result.contiguous().data_ptr(), result.nbytes)
    job.flag[0] = 1


class _Client:
    """Stands for a client's memory, which goes with it."""


def _slot(rows: int = 4) -> tuple[SlotMemory, torch.Tensor, torch.Tensor]:
    """Return a slot with room for so many rows and their result, and both."""
    memory = torch.zeros(rows * (K + N))
    stand_in: Any = _Client()
    slot = SlotMemory(stand_in, memory.data_ptr(), memory.nbytes, memoryview(b""))
    return slot, memory[: rows * K].view(rows, K), memory[rows * K :].view(rows, N)


@pytest.mark.parametrize("rows", [1, 3, 4])
def test_a_slot_is_used_in_place(rows: int) -> None:
    device = Device()
    made, product = _products(device), _InPlace(device)
    slot, given, result = _slot()
    assert made.reach(slot)
    device.done = False
    for value in (1.0, 2.0, 3.0):
        given.fill_(value)
        result.fill_(-1)
        work = made.submit("o_proj", product, given[:rows], result[:rows], slot)
        assert work.ends_ns() > time.perf_counter_ns() - 1
        assert (result == -1).all()
        device.done = True
        device.go_on()
        # Written by the device, before we have looked; and not a row more.
        assert torch.equal(result[:rows], product(given[:rows]))
        assert (result[rows:] == -1).all()
        assert work.ends_ns() <= time.perf_counter_ns()
        device.done = False
    assert (device.attempts, device.copies_in) == (1, 0)


def test_one_graph_serves_all_slots() -> None:
    device = Device()
    made, product = _products(device), _InPlace(device)
    slots = [_slot() for _ in range(3)]
    for slot, given, result in slots * 2:
        assert made.reach(slot)
        given.normal_()
        made.submit("o_proj", product, given, result, slot).ends_ns()
        assert torch.equal(result, product(given))
    assert (device.attempts, product.jobs) == (1, 6)


def test_what_lies_in_no_slot_goes_through_memory_of_our_own() -> None:
    device = Device()
    made, product = _products(device), _InPlace(device)
    slot, given, result = _slot()
    assert made.reach(slot)
    for rows, target in ((torch.randn(3, K), result[:3]), (given[:3], torch.empty(3, N))):
        made.submit("o_proj", product, rows, target, slot).ends_ns()
        assert torch.equal(target, product(rows))


def test_many_rows_in_a_slot_are_copied_straight_to_and_from_the_device() -> None:
    device = Device()
    made, product = _products(device), _InPlace(device)
    slot, given, result = _slot(40)
    assert made.reach(slot)
    given.normal_()
    device.done = False
    made.submit("o_proj", product, given, result, slot)
    assert torch.equal(result, product(given))
    assert (device.attempts, product.jobs, device.copies_in) == (0, 0, 1)


def test_a_device_that_ends_without_a_result_fails_the_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(products, "_ASK_AFTER_NS", 0)
    device = Device()
    made, product = _products(device), _InPlace(device)
    slot, given, result = _slot()
    assert made.reach(slot)
    device.done = False
    work = made.submit("o_proj", product, given, result, slot)
    device.later.clear()
    work.ends_ns()
    device.done = True
    with pytest.raises(RuntimeError, match="left no result"):
        work.ends_ns()


def test_two_requests_under_way_have_graphs_of_their_own() -> None:
    device = Device()
    made, product = _products(device), _InPlace(device)
    slots = [_slot() for _ in range(2)]
    for _ in range(4):
        device.done = False
        works = []
        for slot, given, result in slots:
            assert made.reach(slot)
            given.normal_()
            works.append(made.submit("o_proj", product, given, result, slot))
        device.done = True
        device.go_on()
        for work, (_, given, result) in zip(works, slots, strict=True):
            work.ends_ns()
            assert torch.equal(result, product(given))
    assert device.attempts == 2


def test_a_product_that_fails_leaves_nothing_that_uses_its_memory() -> None:
    device = Device()
    made = _products(device)

    class Fails(_InPlace):
        def in_place(self, job: Job, rows: int) -> None:
            raise RuntimeError("canary")

    slot, given, result = _slot()
    with pytest.raises(RuntimeError, match="canary"):
        made.submit("o_proj", Fails(device), given, result, slot)
    assert device.waits == 1


@pytest.mark.parametrize("rows", [4, 40])
def test_a_slot_that_is_not_reached_is_copied(rows: int) -> None:
    device = Device(registers=False)
    made, product = _products(device), _InPlace(device)
    slot, given, result = _slot(rows)
    given.normal_()
    for _ in range(3):
        # The stand-in's copies and jobs ask whether they reach what they are given.
        made.submit("o_proj", product, given, result, slot).ends_ns()
        assert torch.equal(result, product(given))
        result.zero_()


def test_slots_that_the_driver_refuses_are_not_reached(caplog: pytest.LogCaptureFixture) -> None:
    device = Device(registers=False)
    made = _products(device)
    slot, *_ = _slot()
    assert not made.reach(slot)
    assert not made.reach(slot)
    assert device.registrations == 1
    assert [record.message for record in caplog.records] == ["not_registered"]


def test_slots_are_reached_up_to_a_bound_which_is_for_all_that_are_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    device = Device()
    made = _products(device)
    (first, *_), (second, *_) = _slot(), _slot()
    monkeypatch.setattr(products, "MAX_REACHED_BYTES", first.size + second.size - 1)
    assert made.reach(first)
    assert not made.reach(second)
    assert not made.reach(None)
    del first
    assert made.reach(second)


def test_one_client_has_so_many_slots_reached() -> None:
    device = Device()
    made = _products(device)
    slot, given, _ = _slot(8)
    of_one = [slot._replace(address=slot.address + given[n].nbytes * n, size=8) for n in range(4)]
    assert [made.reach(one) for one in of_one] == [True, True, False, False]
    other, *_ = _slot()
    assert made.reach(other)


def test_a_slot_is_taken_back_when_its_memory_goes() -> None:
    device = Device()
    made = _products(device)
    slot, *_ = _slot()
    assert made.reach(slot)
    address, size = slot.address, slot.size
    assert device.reaches_address(address, size)
    del slot
    assert not device.reaches_address(address, size)
    # The device may have been at it.
    assert device.waits == 1
    assert made._reached_bytes == 0


def test_the_number_of_graphs_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "MAX_GRAPHS", 3)
    device = Device()
    made = _products(device)
    for place in "abcd":
        _ask(made, place=place)
        _ask(made, place=place)
    # Waits before it gives up graphs that the device may be at.
    assert device.waits == 1
    _ask(made, place="d")
    assert device.attempts == 4
    _ask(made, place="a")
    _ask(made, place="a")
    assert device.attempts == 5
    for number in range(9):
        _ask(made, place=f"once {number}")
    assert device.attempts == 5


def test_a_failure_fails_one_request_and_keeps_its_memory_for_the_next() -> None:
    device = Device()
    made = _products(device)

    class Fails(_Copied):
        def __call__(self, rows: torch.Tensor) -> torch.Tensor:
            raise RuntimeError("canary")

    _ask(made)
    before = dict(device.reached)
    with pytest.raises(RuntimeError, match="canary"):
        made.submit("down_proj", Fails(), torch.ones(1, K), torch.empty(1, N))
    _ask(made)
    assert device.reached == before
