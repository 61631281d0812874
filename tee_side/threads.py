"""How many threads an operator gets.

Waking a second thread costs some 20 to 100 microseconds where threads sleep between two operators
(they have to: the service may compute on the same processor), which is more than a light operator
takes. So most steps run on one thread, and ask for all of them where there is much to read or to
compute: a weight, attention, passes over wide tensors. Switching takes a fifth of a microsecond.
"""

from __future__ import annotations

from types import TracebackType

import torch

# Elements of a step's hidden states up to which one thread is faster for RMSNorm, RoPE, the cache
# and the residual stream: 512 rows of 2,048, where RMSNorm takes 0.56 ms on one and 0.6 to 0.8 on
# two threads; for 128 rows it is 0.17 and 0.35.
ONE_THREAD_ELEMENTS = 2**20

# Elements of a tensor from which all threads share passes over it that compute more, exponentials
# or roundings: 64 rows of 8,192, 0.55 ms of SiLU on one thread.
LARGE_TENSOR = 2**19

# Likewise where it is multiplied by a matrix or factorised: more than 16 rows of 2,048.
LARGE_FACTOR = 2**15 + 1

# Multiplications of one product of attention, rows x heads x head dim x context, from which all
# threads serve it in a small step, too: one row of 32 heads of 64 and 2,048 tokens. While the other
# core is idle, two threads take 1.3 of the time of one for 512 tokens, 0.8 for 2,048, 0.6 for
# 4,096.
LARGE_ATTENTION = 2**22


class AsBefore:
    """A context that changes nothing, and enters no Python frame: there are hundreds a token.

    `"".format` takes any arguments and returns an empty text, which keeps an error as it is.
    """

    __enter__ = __exit__ = staticmethod("".format)


# One for all calls.
_AS_BEFORE = AsBefore()


class TorchThreads:
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


def large_attention(multiplications: int, most: int) -> TorchThreads | AsBefore:
    """Return a context for one product of attention: with `most` threads where it is large."""
    return TorchThreads(most) if multiplications >= LARGE_ATTENTION else _AS_BEFORE


def large_tensor(elements: int, most: int, heavy: bool = False) -> TorchThreads | AsBefore:
    """Return a context for work on a tensor: with `most` threads where it has many elements.

    `heavy`: products or factorisations, not only passes over it.
    """
    large = elements >= (LARGE_FACTOR if heavy else LARGE_TENSOR)
    return TorchThreads(most) if large else _AS_BEFORE
