"""How many threads an operator gets.

Waking a second thread costs some 20 to 60 microseconds where threads sleep between two operators
(they have to: the service may compute on the same processor), which is more than a light operator
of a decoded token takes. So a small step runs on one thread, and asks for all of them where there
is much to read: a weight, or a long context's keys. Switching takes a fifth of a microsecond.
"""

from __future__ import annotations

from types import TracebackType

import torch

# Rows of a step up to which one thread is faster for everything but the weights' own products and
# attention to a long context.
ONE_THREAD_ROWS = 16

# Multiplications of one product of attention, rows x heads x head dim x context, from which all
# threads serve it in a small step, too: one row of 32 heads of 64 and 2,048 tokens. While the other
# core is idle, two threads take 1.3 of the time of one for 512 tokens, 0.8 for 2,048, 0.6 for
# 4,096.
LARGE_ATTENTION = 2**22


class threads:  # noqa: N801 - reads as a function of what the block gets
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


def attention_threads(multiplications: int, most: int) -> int:
    """Return how many threads one product of attention gets: all `most` where it is large."""
    return max(torch.get_num_threads(), most if multiplications >= LARGE_ATTENTION else 1)
