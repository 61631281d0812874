"""What a program finds out about this processor when it starts, found out once for all of them.

That takes longer than most tests do, and a processor does not change its mind. The check runs in
full once a process, or once in the process that the others are forked from; and again for other
kernels than it was passed with.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch

from protocol import integer, native

_check = integer.check_kernels


def check_kernels(
    device: torch.device, product: integer.RingProduct = integer.ring_product
) -> None:
    if product is integer.ring_product and device.type == "cpu":
        _passed(native.choice(), torch._int_mm)
    else:
        _check(device, product)


@cache
def _passed(_kernels: native.Choice, _int_mm: Any) -> None:
    """Check what runs now, which the arguments tell apart. What fails is not kept."""
    _check(torch.device("cpu"))


# Every way that kernels can run on this machine.
KERNELS = ("torch", *(native.library.variants() if native.library is not None else ()))


@contextmanager
def using_kernels(name: str) -> Iterator[None]:
    """Run this process's kernels in one of these ways."""
    before = native.choice()
    try:
        native.use(name)
        yield
    finally:
        native.use(before.variant)
