"""The compiled kernels of both sides, and which instruction set they use.

`pip install` compiles them where there is a C++ compiler. Without one, torch computes the same:
integers bit for bit, floats within a few units in their last place. The best *variant* that this
processor has is used, once it has given what the portable one gives (`differs`).

Kernels take addresses. `protocol.integer`, `protocol.keystream`, `tee_side.native` and
`tee_side.protect.masking` check what they pass.
"""

import functools
import importlib
import importlib.util
import logging
import os
import struct
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import sha256
from itertools import product
from pathlib import Path
from typing import Any

import numpy
import torch

from protocol.errors import KernelError

log = logging.getLogger("protocol")

AUTO, TORCH = "auto", "torch"
PORTABLE = "portable"
# Attention in bfloat16, relative to the largest of all outputs: the weights of a row are rounded to
# 8 bits, and so is the output.
ATTENTION_BOUND = 2**-6

# Elements of which every digit is the lowest, and the highest, behind their number of digits.
_EXTREMES = (
    (1, -128, 127),
    (2, -32896, 32639),
    (3, -8421504, 8355711),
    (4, 0x7F7F7F80, 0x7F7F7F7F),
)
_RING = 2**31
# Of elements of AES-256-CTR as OpenSSL makes them.
_DRAWN = bytes.fromhex("159ab21eac65e55ac891dca3f8ecd420b5c9500b898b75918e8a32f8c797cad7")

# What a kernel gave, and how far another variant may be from it.
Result = tuple[torch.Tensor, float]

# How long a thread that helped looks for more to do before it sleeps: less than it takes to wake
# one up, so that it costs little where the service computes on the same processor.
SPIN_US = 20

# Types of activations that kernels are compiled for, by their numbers in kernels.h.
FLOATS = {torch.float32: 0, torch.bfloat16: 1}

# `Stream` of kernels.h: int32 elements of AES-256-CTR, little endian, from the `element`-th after
# the counter block high | low (128 bits, big endian) on.
STREAM = numpy.dtype([("key", "V32"), ("high", "u8"), ("low", "u8"), ("element", "u8")])


def load(name: str) -> tuple[Any, str]:
    """Import a compiled module by its name: itself and "", or None and what is wrong with it.

    None and "" where there is none.
    """
    found = importlib.util.find_spec(name)
    if found is None or found.origin is None:
        return None, ""
    try:
        if not _is_whole(Path(found.origin)):
            return None, "cut short, or no library"
        return importlib.import_module(name), ""
    except OSError:
        return None, "cannot be read"
    except ImportError:  # its text is the system's: a loader that quotes the file
        return None, "built for another processor or system"


def _is_whole(path: Path) -> bool:
    """Say whether an ELF file is as long as its header says: one cut short kills its process."""
    with path.open("rb") as file:
        head = file.read(64)
    if len(head) < 64 or not head.startswith(b"\x7fELF\x02"):
        return False
    sections, size, count = struct.unpack_from("=40xQ10x2H", head)
    return bool(path.stat().st_size >= sections + size * count)


# `unusable`: what is wrong with a library that is there; "" for nothing, or none.
library: Any
library, unusable = load("protocol.native._native")


@dataclass(frozen=True)
class Choice:
    """Which kernels run. `variant`: "torch", or an instruction set.

    `refused`: variants that this processor has and that gave other results than the portable one.
    """

    variant: str
    refused: tuple[str, ...]

    @property
    def compiled(self) -> bool:
        """Whether compiled kernels run."""
        return self.variant != TORCH


_chosen: Choice | None = None


def use(kernels: str = AUTO) -> Choice:
    """Choose which kernels run: "auto" for the best there are, "torch", or an instruction set.

    Takes some 50 ms, to try them. Raises KernelError for what this process cannot use.
    """
    global _chosen  # noqa: PLW0603 - one for the process, as the processor is
    _chosen = _choose(kernels)
    if library is None:
        fields = {"uses": "torch, which is slower", **({"library": unusable} if unusable else {})}
        log.warning("no_compiled_kernels", extra={"fields": fields})
    return _chosen


def choice() -> Choice:
    """Return which kernels run: what `use` chose, or else the best there are."""
    return _chosen or use()


def _choose(wanted: str) -> Choice:
    found: list[str] = [] if library is None else library.variants()
    if wanted == TORCH or (wanted == AUTO and not found):
        return Choice(TORCH, ())
    known = wanted == AUTO or wanted in found
    expected = f"one of {', '.join([AUTO, TORCH, *found])}"
    KernelError.unless(known, "kernels", repr(wanted), expected)
    refused: list[str] = []
    for name in reversed(found) if wanted == AUTO else [wanted]:
        if not differs(library, name):
            library.use(name)
            return Choice(name, tuple(refused))
        refused.append(name)
    raise KernelError(f"kernels {wanted}", "wrong results", "those of the portable ones")


def compiled_for(dtype: torch.dtype) -> bool:
    """Say whether compiled kernels run for activations of a dtype."""
    return dtype in FLOATS and choice().compiled


class _Pool(int):
    """The address of threads that share the kernels of one thread; freed in its own process.

    Whatever becomes of the thread's attribute, it lives as long as the call that it was passed to.
    """

    def __init__(self, _address: int) -> None:
        self.process = os.getpid()

    def __del__(self) -> None:
        # In a forked child none of its threads runs, and to wait for them would never end. At the
        # interpreter's end there is no `os` any more.
        if os and self.process == os.getpid():
            library.pool_free(self)


class _Own(threading.local):
    """What a thread has to itself: `pool`, made when it is first asked for."""

    @functools.cached_property
    def pool(self) -> _Pool:
        return _Pool(library.pool_new(_threads, SPIN_US))


def set_up(kernels: str | None, threads: int | None) -> None:
    """Choose this process's kernels and their threads, torch's too; None: as it is.

    Raises KernelError as `use` does.
    """
    if kernels is not None:
        use(kernels)
    if threads is not None:
        torch.set_num_threads(threads)
        set_threads(threads)


def threads() -> int:
    """Return how many threads share the kernels of one thread, itself included."""
    return _threads


def usable_cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0))


def set_threads(count: int) -> None:
    """Let every thread's kernels use so many threads, itself included, from now on."""
    global _threads, own
    if count != _threads:
        _threads, own = count, _Own()


_threads = usable_cores()
own = _Own()


def _forget_pools() -> None:
    """In a forked child none of their threads runs: make others."""
    global own  # noqa: PLW0603
    own = _Own()


os.register_at_fork(after_in_child=_forget_pools)


@functools.cache  # a processor does not change its mind
def differs(library: Any, variant: str) -> bool:
    """Say whether a variant gives other results than the portable one; leaves it in use.

    Every kernel is tried, in milliseconds. Integers must be the same bit for bit: instructions of
    some processors saturate half way. Floats must be the same, too, but for attention in bfloat16,
    where a variant has instructions that round otherwise: there within `ATTENTION_BOUND`.
    """
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


# alpha_p, alpha_n, beta and eps.
_XIELU = torch.tensor([0.8, 1.3, 0.5, -1e-6])


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
        yield self._drawn()
        for number, dtype in enumerate((torch.float32, torch.bfloat16)):
            yield from self._floats(number, dtype)

    def _call(self, kernel: str, *arguments: Any) -> Any:
        """Call a kernel: a tensor is its address. The pool is the last argument."""
        numbers = (x.data_ptr() if isinstance(x, torch.Tensor) else x for x in arguments)
        return getattr(self._library, kernel)(*numbers, self._pool)

    def _written(
        self, kernel: str, *arguments: Any, to: torch.Tensor, bound: float = 0.0
    ) -> Result:
        """Call a kernel whose last argument but the pool is the tensor that it writes."""
        self._call(kernel, *arguments, to)
        return to.clone(), bound

    def _integers(self, bound: int, *shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.randint(-bound, bound, shape, generator=self._generator).to(dtype)

    def _random(self, dtype: torch.dtype, *shape: int, scale: float = 1.0) -> torch.Tensor:
        return (torch.randn(shape, generator=self._generator) * scale).to(dtype)

    def _products(self) -> Iterator[Result]:
        outs, features = 83, 201
        random = self._integers(128, outs, features, dtype=torch.int8)
        weights = (random, torch.full_like(random, -128))
        # Few, 8 together as well; many; and many where there are tiles for them.
        for rows, (digits, low, high) in product((1, 3, 8, 9, 33), _EXTREMES):
            size = (rows, features)
            elements = (
                self._integers(min(high, _RING), *size),
                torch.full(size, low, dtype=torch.int32),
                torch.full(size, high, dtype=torch.int32),
            )
            for q, weight in product(elements, weights):
                y = torch.empty(rows, outs, dtype=torch.int32)
                shape = (*size, digits, weight, features, outs)
                yield self._written("product", q, *shape, to=y)

    def _drawn(self) -> Result:
        """Draw rows that are sums of two streams: their SHA-256, as it has to be without AES."""
        streams = numpy.zeros((5, 2), STREAM)
        streams["key"], streams["high"], streams["low"] = bytes(range(32)), 2**64 - 1, (7 << 32, 2)
        streams["element"] = numpy.arange(5)[:, None]
        drawn = torch.empty(5, 301, dtype=torch.int32)
        draws = self._call("draw", torch.from_numpy(streams.view(numpy.uint8)), 5, 2, 301, drawn)
        digest = sha256(drawn.numpy().tobytes()).digest() if draws else _DRAWN
        return torch.frombuffer(bytearray(digest), dtype=torch.uint8), 0.0

    def _floats(self, number: int, dtype: torch.dtype) -> Iterator[Result]:
        rows, features, outs = size = (5, 150, 70)
        x = self._random(dtype, rows, features, scale=8.0)
        x[1] = 0.0
        yield from self._sites(number, x)
        x[3, 7], x[4, 9] = torch.nan, torch.inf
        x[2, 0] = torch.finfo(dtype).max
        gain, bias = self._random(dtype, features), self._random(dtype, outs)
        out, y = torch.empty_like(x), torch.empty(rows, outs, dtype=dtype)
        for centred, shift in ((0, 0), (1, gain)):
            asked = (number, x, features, *size[:2], gain, shift, 1e-5, centred)
            yield self._written("norm", *asked, to=out)
        for kind, up in ((0, x), (1, x), (2, 0), (3, 0)):
            of = (number, kind, x, up, features, *size[:2], _XIELU)
            yield self._written("activate", *of, to=out)
        self._library.residual(number, out.data_ptr(), x.data_ptr(), 0.7, out.numel())
        yield out, 0.0
        weight = self._integers(128, outs, features, dtype=torch.int8)
        scale = torch.rand(outs, generator=self._generator)
        for digits, largest in enumerate((127.0, 32_639.0, 2.0**22, 2.0**30), start=1):
            rows_of = (number, x, *size[:2], largest, digits, weight, features, scale)
            finite = self._call("linear", *rows_of, bias if digits % 2 else 0, outs, y)
            yield from ((y.clone(), 0.0), (torch.tensor([finite]), 0.0))
        for dim in (24, 64):  # of which tiles take the second alone
            yield from self._attention(number, dtype, dim)

    def _sites(self, number: int, x: torch.Tensor) -> Iterator[Result]:
        """Yield what is around a product: x [T, I] to integers and back, with a pad and a check."""
        rows, features = size = tuple(x.shape)
        r, u = self._integers(_RING, *size), self._integers(_RING, *size)
        low, high, vectors = (self._integers(_RING, 2, features) for _ in range(3))
        q, sent, drawn = (torch.empty_like(r) for _ in range(3))
        scales, expected = torch.empty(rows), torch.zeros(rows, 2, dtype=torch.int64)
        for pad, of, to in ((0, (0, 0, 0), q), (r, (low, high, expected), sent)):
            asked = (number, x, *size, 32_639.0, scales, pad, 0, 0, *of, to)
            yield torch.tensor([self._call("encode", *asked)]), 0.0
            yield from ((found.clone(), 0.0) for found in (scales, to, expected))
        # Drawn where it is added, by a variant that draws.
        streams, added = torch.arange(rows * STREAM.itemsize).to(torch.uint8), q.clone()
        if self._call("draw", streams, rows, 1, features, drawn.zero_()):
            asked = (number, x, *size, 32_639.0, scales, 0, streams, 1, low, high, expected, added)
            scales.zero_(), expected.zero_()
            self._call("encode", *asked)
        yield from ((found.clone(), 0.0) for found in (added - drawn, scales, expected))
        for upper in (high, 0):
            yield self._written("expect", q, *size, low, upper, to=expected)
        factor, out = torch.rand(features, generator=self._generator), torch.empty_like(x)
        right = (q.long() @ vectors.long().t()).contiguous()
        for y, pad in ((sent, u), (q, 0), (sent, r)):
            asked = (number, y, pad, *size, scales, factor, x, out, vectors, right)
            yield torch.tensor([self._call("decode", *asked)]), 0.0
            yield out.clone(), 0.0

    def _attention(self, number: int, dtype: torch.dtype, dim: int) -> Iterator[Result]:
        heads, kv_heads, context = 4, 2, 600
        bound = ATTENTION_BOUND if dtype is torch.bfloat16 else 0.0
        q = self._random(dtype, 3, heads, dim)
        keys, values = (self._random(dtype, 2, kv_heads, context, dim) for _ in range(2))
        cos, sin = self._random(dtype, 3, dim), self._random(dtype, 3, dim // 2)
        turned, stride = torch.empty_like(q), heads * dim
        for part, neighbours in ((dim, 0), (dim // 2, 1)):
            turning = (number, q, stride, 3, heads, dim, part, neighbours, cos, sin)
            yield self._written("rope", *turning, to=turned)
        for rows, window, cap in ((3, 0, 0.0), (1, 0, 0.0), (3, 100, 0.0), (3, 0, 2.0)):
            out = torch.empty(rows, stride, dtype=dtype)
            of = torch.tensor([0, rows, keys.data_ptr(), values.data_ptr(), context, context])
            asked = (number, q, stride, heads, kv_heads, dim, of, 1, 1, window, 0.2, cap)
            yield self._written("attention", *asked, to=out, bound=bound)
