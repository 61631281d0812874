"""Products in the ring Z_2^32, from the int8 products that processors have.

An element of the ring is held as int32; additions and shifts wrap, which is what the ring wants.
An element splits into four balanced base-256 digits,

    x = d_0 + 256 d_1 + 256^2 d_2 + 256^3 d_3  (mod 2^32),  -128 <= d_i <= 127,

so that a product with int8 weights is one int8 matrix product over the stacked digits (`_int_mm`,
which accumulates in int32) and three shifted additions. Everything here is exact or refused:
`check_kernels` tries a device's products before they are relied on, because int8 instructions of
some processors saturate half way.
"""

from collections.abc import Callable
from typing import TypeAlias

import torch

from protocol import native
from protocol.errors import KernelError
from protocol.native import choice, library

DIGITS = 4
# A product of one digit must fit int32: MAX_IN_FEATURES * 128 * 128 < 2^31.
MAX_IN_FEATURES = 2**31 // (128 * 128) - 1

# From elements and a weight to their product, as `ring_product` does it.
RingProduct: TypeAlias = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

# Added to an element, makes every digit unsigned; xor-ed afterwards, makes it signed again.
_BALANCE = 0x80808080 - 2**32

# A block of rows is as large as keeps its digits and their products in a processor's cache.
_BLOCK_ELEMENTS = 2**23
_MIN_BLOCK_ROWS = 32

# What `check_kernels` tries: sizes that real models and small ones have, odd ones, one row and
# many; values whose digits are all -128 or all 127.
_CHECKED_SHAPES = ((64, 48), (2048, 264), (8192, 24), (37, 19))
_CHECKED_ROWS = (1, 4, 9, 33)
_ALL_DIGITS_LOWEST = 0x7F7F7F80  # -128 (1 + 256 + 256^2 + 256^3) mod 2^32
# The largest value of four balanced digits; what is above it they represent as 2^32 less.
LARGEST_OF_DIGITS = 0x7F7F7F7F


def empty_weight(out_features: int, in_features: int, device: torch.device) -> torch.Tensor:
    """Return an unset int8 [out_features, in_features] in the layout that products are fastest in.

    Compiled kernels and GPUs take the plain one. torch on a CPU, a view of a matrix with
    in_features rows: two to five times as fast for few rows as the other way round.
    """
    if device.type == "cpu" and not choice().compiled:
        return torch.empty(in_features, out_features, dtype=torch.int8).t()
    return torch.empty(out_features, in_features, dtype=torch.int8, device=device)


def to_digits(elements: torch.Tensor, count: int = DIGITS) -> torch.Tensor:
    """Split into balanced base-256 digits, the lowest first.

    `elements`: int32 [T, K]. Returns int8 [count, T, K]. With fewer than four digits the value is
    kept modulo 256^count only: `digits_below` says of a bound how many keep all of it.
    """
    shifted = torch.add(elements, _BALANCE).bitwise_xor_(_BALANCE)
    digits = torch.empty((count, *elements.shape), dtype=torch.int8, device=elements.device)
    digits[0].copy_(shifted)  # a narrowing copy keeps the low byte
    for index in range(1, count):
        digits[index].copy_(shifted.bitwise_right_shift_(8))
    return digits


def digits_below(bound: float) -> int:
    """Return how many digits (1 to 4) hold every integer of at most this magnitude."""
    return next(
        (count for count in range(1, DIGITS) if bound <= 127 * ((256**count - 1) // 255)), DIGITS
    )


def ring_product(
    elements: torch.Tensor, weight: torch.Tensor, digits: int = DIGITS
) -> torch.Tensor:
    """Return elements @ weight^T mod 2^32.

    `elements`: int32 [T, K], any values that `digits` digits hold; `weight`: int8 [N, K], best from
    `empty_weight`. Returns int32 [T, N]. How long it takes does not depend on the values. Raises
    KernelError where K is above MAX_IN_FEATURES.
    """
    (rows, K), N = elements.shape, weight.shape[0]
    # With one in_feature the two layouts of a weight cannot be told apart, and `_int_mm` errs.
    if not 2 <= K <= MAX_IN_FEATURES:
        raise KernelError("int8 product", f"{K} in_features", f"2 to {MAX_IN_FEATURES}")
    out = torch.empty(rows, N, dtype=torch.int32, device=elements.device)
    if elements.device.type == "cpu" and weight.stride(1) == 1 and choice().compiled:
        elements = elements.contiguous()
        library.product(
            *(elements.data_ptr(), rows, K, digits),
            *(weight.data_ptr(), weight.stride(0), N),
            *(out.data_ptr(), native.own.pool),
        )
        return out
    # Equal blocks, and one scratch for all of them: fresh memory for each costs as much as a fifth
    # of the product. The last block may be smaller.
    most = max(_MIN_BLOCK_ROWS, _BLOCK_ELEMENTS // (digits * max(K, N)))
    size = -(-rows // -(-rows // most)) if rows else 1
    scratch: torch.Tensor | None = None
    for start in range(0, rows, size):
        block = slice(start, start + size)
        stacked = to_digits(elements[block], digits).flatten(0, 1)
        products = int8_product(
            stacked, weight, None if scratch is None else scratch[: stacked.shape[0]]
        )
        scratch = products if scratch is None else scratch
        # The sum of 256^i of_digits[i], from the highest on.
        of_digits = products.view(digits, -1, N)
        for index in range(digits - 1, 0, -1):
            of_digits[index - 1].add_(of_digits[index], alpha=256)
        out[block] = of_digits[0]
    return out


def int8_product(
    rows: torch.Tensor, weight: torch.Tensor, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Return rows @ weight^T as this processor multiplies int8.

    `rows`: int8 [M, K]; `weight`: int8 [N, K]. Returns int32 [M, N], in `out` where it is given.
    """
    return torch._int_mm(rows, weight.t(), out=out)


def check_kernels(device: torch.device, product: RingProduct = ring_product) -> None:
    """Compare the device's products with exact ones, for the shapes and values that break first.

    `product`: what computes `ring_product` there. Takes a fraction of a second. Raises KernelError
    at the first product that differs: int8 instructions of some processors saturate, and a ring
    that saturates is no ring.
    """
    generator = torch.Generator().manual_seed(0)

    def random(dtype: torch.dtype, *shape: int) -> torch.Tensor:
        bounds = torch.iinfo(dtype)
        return torch.randint(bounds.min, bounds.max + 1, shape, generator=generator).to(dtype)

    for in_features, out_features in _CHECKED_SHAPES:
        for value in (None, -128, 127):
            shape = (out_features, in_features)
            weight = empty_weight(*shape, device)
            weight.copy_(random(torch.int8, *shape) if value is None else torch.full(shape, value))
            # Each layout has kernels of its own: weights of layers, and the LM head's.
            for laid_out in (weight, weight.contiguous()):
                for count in _CHECKED_ROWS:
                    rows = (count, in_features)
                    for elements in (
                        random(torch.int32, *rows),
                        torch.full(rows, _ALL_DIGITS_LOWEST, dtype=torch.int32),
                        torch.full(rows, LARGEST_OF_DIGITS, dtype=torch.int32),
                    ):
                        _check_product(elements.to(device), laid_out, product)


def _check_product(elements: torch.Tensor, weight: torch.Tensor, product: RingProduct) -> None:
    # Sums below 2^53 are exact in float64, whose products do not share the instructions on trial.
    exact_weight = weight.cpu().double().t()
    exact = (elements.cpu().double() @ exact_weight).long().to(torch.int32)
    right = torch.equal(product(elements, weight).cpu(), exact)
    if product is ring_product:
        # One digit alone as well: few rows have kernels of their own, too.
        digit = to_digits(elements, 1)[0]
        exact_digit = (digit.double() @ exact_weight).long().to(torch.int32)
        right &= torch.equal(int8_product(digit, weight), exact_digit)
    KernelError.unless(
        right,
        f"int8 products on {elements.device}",
        f"wrong numbers for {list(elements.shape)} by {list(weight.shape)}",
        "those of exact arithmetic",
    )
