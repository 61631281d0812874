"""How many threads an operator gets.

Waking a second thread costs some 20 to 60 microseconds where threads sleep between two operators
(they have to: the service may compute on the same processor), which is more than a light operator
of a decoded token takes. So a small step runs on one thread, and asks for all of them where there
is a whole matrix to read. Switching takes a fifth of a microsecond.
"""

from __future__ import annotations

from types import TracebackType

import torch

# Rows of a step up to which one thread is faster for everything but the weights' own products.
ONE_THREAD_ROWS = 16


class _Threads:
    """A context in which torch has `count` threads."""

    __slots__ = ("_before", "_count")

    def __init__(self, count: int) -> None:
        self._count = count
        self._before = count

    def __enter__(self) -> None:
        self._before = torch.get_num_threads()
        torch.set_num_threads(self._count)

    def __exit__(
        self,
        _kind: type[BaseException] | None,
        _error: BaseException | None,
        _traceback: TracebackType | None,
    ) -> None:
        torch.set_num_threads(self._before)


def threads(count: int) -> _Threads:
    """Return a context in which torch has that many threads."""
    return _Threads(count)
