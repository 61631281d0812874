"""Targets that compute: every compiled variant on bytes of the other side, against torch.

A case is two bytes, which choose what is around them, and elements as a message brings them: any
bits, at any address. What differs from torch in one bit is a finding.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import torch

from protocol import native
from protocol.errors import KernelError
from protocol.integer import ring_product
from tee_side.native import sites
from tests.fuzz.engine import Case, Target
from tests.fuzz.mutate import Mutator
from tests.kit.kernels import KERNELS

_BIAS, _PAD, _BF16, _WRONG, _ODD, _SCALE = 1, 2, 4, 8, 16, 32
_RING = 2**31


class DiffersError(Exception):
    """A variant gave other bits than torch."""


def _seeds() -> list[Case]:
    drawn = random.Random(0)
    extremes = b"\x80\x7f\x7f\x7f\x00\x00\x00\x80\xff\xff\xff\xff\x7f\x7f\x7f\x7f" * 8
    return [
        *((bytes((3, flags)) + drawn.randbytes(3 * 4 * 37),) for flags in range(0, 64, 5)),
        *((bytes((rows, _PAD)) + extremes,) for rows in range(1, 5)),
    ]


def _mutate(mutator: Mutator, case: Case, other: Case) -> Case:
    if mutator.chance(0.3):
        return (case[0][:2] + bytes(mutator.choose.randbytes(mutator.below(1500))),)
    return (mutator.bytes(case[0]),)


def _elements(case: Case) -> tuple[int, torch.Tensor]:
    """Return the flags and int32 [rows, columns], which lie where the case has them."""
    (data,) = case
    if len(data) < 2 or not 1 <= data[0] <= 40:
        raise KernelError("case", got="no size", expected="1 to 40 rows")
    rows, flags = data[0], data[1]
    columns = (len(data) - 2) // (4 * rows)
    if columns < 2:
        raise KernelError("case", got="too few elements", expected="2 columns or more")
    shift = 1 if flags & _ODD else 0
    memory = bytearray(shift) + data[2 : 2 + 4 * rows * columns]
    return flags, torch.frombuffer(memory, dtype=torch.int32, offset=shift).view(rows, columns)


@contextmanager
def _back_to(variant: str) -> Iterator[None]:
    try:
        yield
    finally:
        native.use(variant)


@cache
def _drawn(columns: int) -> tuple[torch.Tensor, ...]:
    """Return what belongs to so many outputs: vectors, factors, biases, a pad; and a weight."""
    generator = torch.Generator().manual_seed(columns)
    vectors = torch.randint(-_RING, _RING, (2, columns), generator=generator).int()
    factor, bias = torch.rand(2, columns, generator=generator).unbind(0)
    pad = torch.randint(-_RING, _RING, (40, columns), generator=generator).int()
    weight = torch.randint(-128, 128, (19, columns), generator=generator).to(torch.int8)
    return vectors, factor, bias, pad, weight


def _reply(case: Case) -> str:
    """Take a service's product apart: the pad away, the check, the scale and the bias."""
    flags, y = _elements(case)
    rows, columns = y.shape
    vectors, factor, bias_32, pad, _ = _drawn(columns)
    dtype = torch.bfloat16 if flags & _BF16 else torch.float32
    bias = bias_32.to(dtype) if flags & _BIAS else None
    scale = torch.arange(1, rows + 1) / 7 if flags & _SCALE else None
    u = pad[:rows].contiguous() if flags & _PAD else None
    aligned = y.clone()
    plain = aligned if u is None else aligned - u
    out = plain * (factor if scale is None else scale[:, None])
    out = (out if scale is None else out * factor).to(dtype)
    right = out if bias is None else out + bias
    expected, expected_of_y = (x.long() @ vectors.long().t() for x in (plain, aligned))
    if flags & _WRONG:
        expected[-1, 1] += 1
        expected_of_y[0, 0] -= 1
    with _back_to(native.choice().variant):
        for name in KERNELS[1:]:
            native.use(name)
            unchecked = sites.decode(y, u, scale, factor, bias, dtype)
            found = sites.decode(y, u, scale, factor, bias, dtype, vectors, expected)
            holds = sites.same(y, vectors, expected_of_y)
            if unchecked is None or not torch.equal(unchecked, right):
                raise DiffersError(f"{name} decodes other numbers")
            if (found is None) != bool(flags & _WRONG) or holds == bool(flags & _WRONG):
                raise DiffersError(f"{name} checks otherwise")
            if found is not None and not torch.equal(found, right):
                raise DiffersError(f"{name} decodes other numbers")
    return f"reply {dtype} {flags % 64} {min(rows, 3)} rows {columns % 16 and 'odd'}"


def _request(case: Case) -> str:
    """Multiply elements of a request, as a service does."""
    _, elements = _elements(case)
    rows, columns = elements.shape
    weight = _drawn(columns)[-1]
    right = (elements.clone().long() @ weight.long().t()).int()
    with _back_to(native.choice().variant):
        for name in KERNELS:
            native.use(name)
            if not torch.equal(ring_product(elements, weight), right):
                raise DiffersError(f"{name} multiplies to other numbers")
    return f"request {min(rows, 17)} rows {columns % 64 and 'odd'}"


KERNEL_TARGETS = (
    Target("kernels-reply", _seeds, _mutate, _reply, (KernelError,), 0.5),
    Target("kernels-request", _seeds, _mutate, _request, (KernelError,), 0.5),
)
