"""Memory that is used again, and never while anybody looks at it."""

from __future__ import annotations

from collections.abc import Callable

import numpy
import pytest
import torch

from protocol import memory_pool
from protocol.memory_pool import KEPT_BLOCKS, MemoryPool
from tests.kit.rows import each_row

MEBIBYTE = 2**20


def _address(view: memoryview) -> int:
    return int(numpy.frombuffer(view, numpy.uint8).ctypes.data)


VIEWS: dict[str, Callable[[memoryview], object]] = {
    "slice": lambda memory: memory[8:],
    "slice of a slice": lambda memory: memory[8:][8:],
    "cast": lambda memory: memory[8:].cast("I"),
    "torch": lambda m: torch.frombuffer(m[8:], dtype=torch.int32).reshape(2, -1)[1:],
    "numpy": lambda memory: numpy.frombuffer(memory[8:], numpy.uint8)[8:][8:],
}


@each_row("kind", VIEWS)
def test_memory_is_not_used_again_while_any_view_lives(kind: str) -> None:
    pool = MemoryPool()
    memory = pool.take(MEBIBYTE)
    memory[:] = bytes([7]) * MEBIBYTE
    view, address = VIEWS[kind](memory), _address(memory)
    del memory
    assert pool.kept_bytes == 0
    other = pool.take(MEBIBYTE)
    other[:] = bytes([9]) * MEBIBYTE
    assert 9 not in numpy.asarray(view).view(numpy.uint8)
    del view
    assert pool.kept_bytes == MEBIBYTE
    again = pool.take(MEBIBYTE - 5)
    assert _address(again) == address
    del pool  # which memory outlives
    again[:] = bytes(MEBIBYTE - 5)


def test_what_is_kept_is_bounded_and_what_was_not_used_for_longest_goes_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pool = MemoryPool()
    small = [pool.take(1000) for _ in range(KEPT_BLOCKS + 3)]
    del small
    assert pool.kept_bytes == KEPT_BLOCKS * 65_536
    monkeypatch.setattr(memory_pool, "KEPT_BYTES", 4 * MEBIBYTE)
    pool = MemoryPool()
    old, new = pool.take(MEBIBYTE), pool.take(4 * MEBIBYTE)
    del old
    assert pool.kept_bytes == MEBIBYTE
    del new
    assert pool.kept_bytes == 4 * MEBIBYTE


def test_a_large_block_is_not_taken_for_little() -> None:
    pool = MemoryPool()
    large = pool.take(8 * MEBIBYTE)
    del large
    little = pool.take(MEBIBYTE)
    assert pool.kept_bytes == 8 * MEBIBYTE
    fitting = pool.take(7 * MEBIBYTE)
    assert pool.kept_bytes == 0
    del little, fitting
