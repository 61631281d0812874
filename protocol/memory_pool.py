"""Memory for large messages, used again once no view of the previous message is left.

Fresh memory of a megabyte costs more than to receive a megabyte: the kernel hands it out page by
page and fills it with zeros. `malloc` gives it back to the kernel and asks for it again whenever
two messages are alive at a time.

What that costs: a message holds a whole block, of up to four times its size, as long as a
byte of it is viewed. And an unused block is not cleared: what the last messages held, masked
activations and the results that came back for them, stays in memory until it is overwritten or the
pool goes, up to `KEPT_BYTES` of it.
"""

from __future__ import annotations

import weakref
from collections import deque
from typing import Any

import numpy

# What lies here unused, at most.
KEPT_BYTES = 64 * 1024 * 1024
KEPT_BLOCKS = 16
_GRAIN_BYTES = 64 * 1024
# Where a block begins: numpy's own memory begins at a multiple of 16.
_ALIGNMENT = 64
# A block may be this many times larger than what it is taken for.
_MAX_WASTE = 4


class MemoryPool:
    """Hands out writable memory that comes back by itself, when its last view is gone."""

    def __init__(self) -> None:
        self._free: list[Any] = []
        # What came back since; the last view may go on another thread than the one that takes.
        self._returned: deque[Any] = deque()
        # Kept, because a weak reference calls back only while it is alive itself.
        self._lent: dict[int, weakref.ref[Any]] = {}

    @property
    def kept_bytes(self) -> int:
        """Bytes that lie here unused."""
        self._collect()
        return sum(block.nbytes for block in self._free)

    def take(self, size: int) -> memoryview:
        """Return `size` bytes (at least one) with anything in them, at a multiple of 64.

        They stay valid as long as a view of them lives: a memoryview, or a tensor made of one.
        Raises MemoryError.
        """
        block = self._find(size)
        # An object of its own: every view of the memory that goes out refers to it, and only those.
        loan = block[:size]
        key = id(loan)

        def returned(_: object) -> None:
            del self._lent[key]
            self._returned.append(block)

        self._lent[key] = weakref.ref(loan, returned)
        return memoryview(loan)

    def _collect(self) -> None:
        """Take in what came back; what was not used for longest goes first."""
        while self._returned:
            self._free.append(self._returned.popleft())
        kept = sum(block.nbytes for block in self._free)
        while len(self._free) > KEPT_BLOCKS or kept > KEPT_BYTES:
            kept -= self._free.pop(0).nbytes

    def _find(self, size: int) -> Any:
        self._collect()
        for index in range(len(self._free) - 1, -1, -1):
            if size <= self._free[index].nbytes <= _MAX_WASTE * max(size, _GRAIN_BYTES):
                return self._free.pop(index)
        whole = size + -size % _GRAIN_BYTES
        memory = numpy.empty(whole + _ALIGNMENT, numpy.uint8)
        start = -memory.ctypes.data % _ALIGNMENT
        return memory[start : start + whole]
