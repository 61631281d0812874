"""Tries every kernel of a variant against the portable one, in milliseconds, before it is used.

Integers must be the same bit for bit: instructions of some processors saturate half way. Floats
must be the same, too, but for attention in bfloat16, where a variant has instructions that round
otherwise: there within `ATTENTION_BOUND`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

PORTABLE = "portable"

# Attention in bfloat16, relative to the largest of all outputs: the weights of a row are rounded to
# 8 bits, and so is the output.
ATTENTION_BOUND = 2**-6

# Elements of which every digit is the lowest, or the highest, by their number of digits.
_LOWEST_DIGITS = (-128, -32896, -8421504, 0x7F7F7F80)
_HIGHEST_DIGITS = (127, 32639, 8355711, 0x7F7F7F7F)
_RING = 2**31

# What a kernel gave, and how far another variant may be from it.
Result = tuple[torch.Tensor, float]


def differs(library: Any, variant: str) -> bool:
    """Say whether a variant gives other results than the portable one; leaves it in use."""
    if variant == PORTABLE:
        return False
    library.use(PORTABLE)
    right = list(_Trial(library).results())
    library.use(variant)
    found = list(_Trial(library).results())
    return not all(_near(a, b, bound) for (a, bound), (b, _) in zip(right, found, strict=True))


def _near(a: torch.Tensor, b: torch.Tensor, bound: float) -> bool:
    if bound == 0.0:  # as bytes: NaN is the same as itself
        return torch.equal(a.view(torch.uint8), b.view(torch.uint8))
    wide_a, wide_b = a.double(), b.double()
    return bool(((wide_a - wide_b).abs() <= bound * wide_a.abs().max()).all())


class _Trial:
    """One run of all kernels of the variant in use, over random and extreme values."""

    def __init__(self, library: Any) -> None:
        self._library = library
        self._pool = library.pool_new(2, 0)
        self._generator = torch.Generator().manual_seed(0)

    def __del__(self) -> None:
        self._library.pool_free(self._pool)

    def results(self) -> Iterator[Result]:
        yield from self._products()
        for number, dtype in enumerate((torch.float32, torch.bfloat16)):
            yield from self._floats(number, dtype)

    def _call(self, kernel: str, *arguments: Any) -> Any:
        """Call a kernel: a tensor is its address. The pool is the last argument."""
        numbers = (x.data_ptr() if isinstance(x, torch.Tensor) else x for x in arguments)
        return getattr(self._library, kernel)(*numbers, self._pool)

    def _integers(self, bound: int, *shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.randint(-bound, bound, shape, generator=self._generator).to(dtype)

    def _random(self, dtype: torch.dtype, *shape: int, scale: float = 1.0) -> torch.Tensor:
        return (torch.randn(shape, generator=self._generator) * scale).to(dtype)

    def _products(self) -> Iterator[Result]:
        outs, features = 83, 201
        random = self._integers(128, outs, features, dtype=torch.int8)
        for rows in (1, 3, 9, 33):  # few; many; and many where there are tiles for them
            for digits, (low, high) in enumerate(
                zip(_LOWEST_DIGITS, _HIGHEST_DIGITS, strict=True), start=1
            ):
                size = (rows, features)
                for q in (
                    self._integers(min(high, _RING), *size),
                    torch.full(size, low, dtype=torch.int32),
                    torch.full(size, high, dtype=torch.int32),
                ):
                    for weight in (random, torch.full_like(random, -128)):
                        y = torch.empty(rows, outs, dtype=torch.int32)
                        self._call("product", q, *size, digits, weight, features, outs, y)
                        yield y, 0.0

    def _floats(self, number: int, dtype: torch.dtype) -> Iterator[Result]:
        rows, features, outs = size = (5, 150, 70)
        x = self._random(dtype, rows, features, scale=8.0)
        yield from self._sites(number, x)
        x[1], x[3, 7], x[4, 9] = 0.0, torch.nan, torch.inf
        x[2, 0] = torch.finfo(dtype).max
        gain, bias = self._random(dtype, features), self._random(dtype, outs)
        out, y = torch.empty_like(x), torch.empty(rows, outs, dtype=dtype)
        self._call("rms_norm", number, x, features, *size[:2], gain, 1e-5, out)
        yield out.clone(), 0.0
        self._call("silu_mul", number, x, x, features, *size[:2], out)
        yield out.clone(), 0.0
        self._library.residual(number, out.data_ptr(), x.data_ptr(), out.numel())
        yield out, 0.0
        weight = self._integers(128, outs, features, dtype=torch.int8)
        scale = torch.rand(outs, generator=self._generator)
        self._call("linear8", number, x, *size[:2], weight, features, scale, bias, outs, y)
        yield y, 0.0
        for dim in (24, 64):  # of which tiles take the second alone
            yield from self._attention(number, dtype, dim)

    def _sites(self, number: int, x: torch.Tensor) -> Iterator[Result]:
        """Yield what is around a product: x [T, I] to integers and back, with a pad and a check."""
        rows, features = size = tuple(x.shape)
        r, u = self._integers(_RING, *size), self._integers(_RING, *size)
        low, high, vectors = (self._integers(_RING, 2, features) for _ in range(3))
        q, sent = torch.empty_like(r), torch.empty_like(r)
        scales = torch.empty(rows)
        norm = self._call("encode", number, x, *size, 0.0, scales, r, q, sent)
        yield from ((found.clone(), 0.0) for found in (torch.tensor([norm]), scales, q, sent))
        norm = self._call("encode", number, x, *size, 0.003, 0, r, q, sent)
        yield from ((found, 0.0) for found in (torch.tensor([norm]), q, sent))
        expected = torch.empty(rows, 2, dtype=torch.int64)
        self._call("expect", q, *size, low, high, expected)
        yield expected, 0.0
        factor, out = torch.rand(features, generator=self._generator), torch.empty_like(x)
        right = (q.long() @ vectors.long().t()).contiguous()
        for y, pad, own in ((sent, u, 0), (q, 0, scales), (sent, r, 0)):
            holds = self._call("decode", number, y, pad, *size, own, factor, x, out, vectors, right)
            yield torch.tensor([holds]), 0.0
            yield out.clone(), 0.0

    def _attention(self, number: int, dtype: torch.dtype, dim: int) -> Iterator[Result]:
        heads, kv_heads, context = 4, 2, 600
        bound = ATTENTION_BOUND if dtype is torch.bfloat16 else 0.0
        q = self._random(dtype, 3, heads, dim)
        keys, values = (self._random(dtype, kv_heads, context, dim) for _ in range(2))
        cos, sin = self._random(dtype, 3, dim), self._random(dtype, 3, dim // 2)
        turned, stride = torch.empty_like(q), heads * dim
        self._call("rope", number, q, stride, 3, heads, dim, cos, sin, turned)
        yield turned, 0.0
        for rows, window in ((3, 0), (1, 0), (3, 100)):
            out = torch.empty(rows, stride, dtype=dtype)
            sizes = (rows, heads, kv_heads, dim)
            self._call(
                "attention",
                *(number, q, stride, *sizes, keys, values, context, context, window, out),
            )
            yield out, bound
