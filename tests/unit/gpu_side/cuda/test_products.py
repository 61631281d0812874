"""Products as graphs, on a stand-in for the device: what is captured, replayed, copied and used."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

from gpu_side.cuda import products
from gpu_side.cuda.products import GRAPH_ROWS, Products
from tests.unit.gpu_side.cuda.device import Device

K, N = 5, 3
WEIGHT = torch.arange(15.0).view(N, K)


def _products(device: Device, spin_us: float = 0.0) -> Products:
    stand_in: Any = device
    return Products(stand_in, (K * 4, N * 4), spin_us)


def _by_weight(rows: torch.Tensor) -> torch.Tensor:
    return rows @ WEIGHT.t()


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


@pytest.mark.parametrize("rows", [4, 40])
def test_registered_memory_is_used_in_place(rows: int) -> None:
    device = Device()
    made = _products(device)
    segment = torch.zeros(rows * (K + N))
    given, result = segment[: rows * K].view(rows, K), segment[rows * K :].view(rows, N)
    assert made.register(segment.data_ptr(), segment.nbytes)
    device.done = False
    for value in (1.0, 2.0, 3.0):
        given.fill_(value)
        made.submit("o_proj", _by_weight, given, result)
        # Written by the device, before we have looked.
        assert torch.equal(result, _by_weight(given))
    assert device.attempts == (rows == 4)


def test_memory_without_room_for_more_rows_is_not_used_in_place() -> None:
    device = Device()
    made = _products(device)
    segment = torch.full((4 * (K + N),), 7.0)
    made.register(segment.data_ptr(), segment.nbytes)
    given, result = segment[: 3 * K].view(3, K), segment[3 * K : 3 * (K + N)].view(3, N)
    for _ in range(2):
        made.submit("o_proj", _by_weight, given, result).ends_ns()
        assert torch.equal(result, _by_weight(given))
    assert torch.equal(segment[3 * (K + N) :], torch.full((K + N,), 7.0))


def test_memory_that_the_driver_refuses_is_copied() -> None:
    device = Device(registers=False)
    made = _products(device)
    given = torch.ones(1, K)
    assert not made.register(given.data_ptr(), given.nbytes)
    _ask(made)


def test_graphs_over_memory_that_goes_are_forgotten() -> None:
    device = Device()
    made = _products(device)
    given, result = torch.ones(1, K), torch.empty(1, N)
    for memory in (given, result):
        made.register(memory.data_ptr(), memory.nbytes)
    for _ in range(2):
        made.submit("o_proj", _by_weight, given, result).ends_ns()
        _ask(made)
    assert device.attempts == 2
    made.unregister(given.data_ptr(), given.nbytes)
    assert device.waits == 1
    for _ in range(2):
        made.submit("o_proj", _by_weight, given, result).ends_ns()
        _ask(made)
    assert device.attempts == 3


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

    def fails(rows: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("canary")

    _ask(made)
    before = dict(device.reached)
    with pytest.raises(RuntimeError, match="canary"):
        made.submit("down_proj", fails, torch.ones(1, K), torch.empty(1, N))
    _ask(made)
    assert device.reached == before
