"""Tests of memory that is used again, and never while somebody looks at it."""

from __future__ import annotations

from collections.abc import Callable

import numpy
import pytest
import torch

from protocol import memory_pool
from protocol.memory_pool import KEPT_BLOCKS, MemoryPool

MEBIBYTE = 2**20


def _address(view: memoryview) -> int:
    return int(numpy.frombuffer(view, numpy.uint8).ctypes.data)


def test_memory_is_used_again_once_nobody_views_it() -> None:
    pool = MemoryPool()
    first = pool.take(MEBIBYTE)
    address = _address(first)
    assert pool.kept_bytes == 0
    del first
    assert pool.kept_bytes == MEBIBYTE
    assert _address(pool.take(MEBIBYTE - 5)) == address


VIEWS: dict[str, Callable[[memoryview], object]] = {
    "slice": lambda memory: memory[8:],
    "slice of a slice": lambda memory: memory[8:][8:],
    "cast": lambda memory: memory[8:].cast("I"),
    "torch": lambda m: torch.frombuffer(m[8:], dtype=torch.int32).reshape(2, -1)[1:],
    "numpy": lambda memory: numpy.frombuffer(memory[8:], numpy.uint8)[8:][8:],
}


@pytest.mark.parametrize("kind", VIEWS)
def test_memory_is_not_used_again_while_any_view_lives(kind: str) -> None:
    pool = MemoryPool()
    memory = pool.take(MEBIBYTE)
    memory[:] = bytes([7]) * MEBIBYTE
    view = VIEWS[kind](memory)
    del memory
    assert pool.kept_bytes == 0
    other = pool.take(MEBIBYTE)
    other[:] = bytes([9]) * MEBIBYTE
    assert 9 not in numpy.asarray(view).view(numpy.uint8)
    del view
    assert pool.kept_bytes == MEBIBYTE


def test_size_is_what_was_asked_for_and_writable() -> None:
    pool = MemoryPool()
    for size in (1, 65_536, 65_537, 3 * MEBIBYTE):
        memory = pool.take(size)
        assert memory.nbytes == size
        memory[-1] = 1


def test_memory_begins_at_a_multiple_of_64() -> None:
    pool = MemoryPool()
    for _ in range(2):
        taken = [pool.take(size) for size in (1, 65_536, 65_537, 3 * MEBIBYTE)]
        assert [_address(memory) % 64 for memory in taken] == [0] * 4
        del taken


def test_what_is_kept_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = MemoryPool()
    small = [pool.take(1000) for _ in range(KEPT_BLOCKS + 3)]
    del small
    assert pool.kept_bytes == KEPT_BLOCKS * 65_536
    monkeypatch.setattr(memory_pool, "KEPT_BYTES", 3 * MEBIBYTE)
    pool = MemoryPool()
    large = [pool.take(MEBIBYTE) for _ in range(5)]
    del large
    assert pool.kept_bytes == 3 * MEBIBYTE
    del pool


def test_a_large_block_is_not_taken_for_little() -> None:
    pool = MemoryPool()
    large = pool.take(8 * MEBIBYTE)
    del large
    little = pool.take(MEBIBYTE)
    assert pool.kept_bytes == 8 * MEBIBYTE
    del little
    assert pool.kept_bytes == 9 * MEBIBYTE
    fitting = pool.take(7 * MEBIBYTE)
    assert pool.kept_bytes == MEBIBYTE
    del fitting


def test_what_was_not_used_for_longest_goes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_pool, "KEPT_BYTES", 4 * MEBIBYTE)
    pool = MemoryPool()
    old = pool.take(MEBIBYTE)
    new = pool.take(4 * MEBIBYTE)
    del old
    assert pool.kept_bytes == MEBIBYTE
    del new
    assert pool.kept_bytes == 4 * MEBIBYTE


def test_memory_outlives_its_pool() -> None:
    pool = MemoryPool()
    memory = pool.take(1000)
    del pool
    memory[:] = bytes(1000)
    del memory
