"""Products in the ring Z_2^32 by int8 weights as one kernel each, in Triton.

    direct     x w, added up in int32. For few rows: it reads each weight once, and is done by then.
    digits     x = d_0 + 256 d_1 + 256^2 d_2 + 256^3 d_3 with signed digits (`protocol.integer`),
               each multiplied on int8 tensor cores, then shifted and added.

Both are exact for every int32: its additions, multiplications and shifts wrap, which is what the
ring wants. Only the tensor cores' sums may saturate (`mma.sync` does): that of one digit must fit
int32, and does up to `MAX_IN_FEATURES`.

Run by Triton's interpreter and compiled for sm_80 and sm_90, never run on a GPU. Triton is imported
here alone: it comes with torch for CUDA, and is not installed beside torch for a CPU.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from gpu_side.cuda.tiles import Tile, tiles_for
from protocol.errors import KernelError

# 0x80808080: added it makes every digit unsigned, xor-ed afterwards signed again.
_BALANCE = tl.constexpr(0x80808080 - 2**32)


@triton.jit
def _direct(
    x: tl.tensor,
    w: tl.tensor,
    y: tl.tensor,
    K: tl.tensor,
    N: tl.tensor,
    OUTPUTS: tl.constexpr,
    INNER: tl.constexpr,
    WHOLE: tl.constexpr,
) -> None:
    """Store y [T, N] = x [T, K] w [N, K]^T; grid (blocks of N, T). WHOLE: INNER divides K."""
    n = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    row = tl.program_id(1).to(tl.int64)
    k = tl.arange(0, INNER)
    x_K = x + row * K + k
    w_NK = w + n[:, None].to(tl.int64) * K + k[None, :]
    there_N1 = n[:, None] < N
    sums_N = tl.zeros([OUTPUTS], tl.int32)
    for start in range(0, K, INNER):
        if WHOLE:
            x_part = tl.load(x_K + start)
            w_part = tl.load(w_NK + start, mask=there_N1, other=0)
        else:
            left = k < K - start
            x_part = tl.load(x_K + start, mask=left, other=0)
            w_part = tl.load(w_NK + start, mask=there_N1 & left[None, :], other=0)
        sums_N += tl.sum(w_part.to(tl.int32) * x_part[None, :], 1)
    tl.store(y + row * N + n, sums_N, mask=n < N)


@triton.jit
def _digits(  # noqa: PLR0917
    x: tl.tensor,
    w: tl.tensor,
    y: tl.tensor,
    T: tl.tensor,
    K: tl.tensor,
    N: tl.tensor,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    INNER: tl.constexpr,
    WHOLE: tl.constexpr,
) -> None:
    """Store y [T, N] = x [T, K] w [N, K]^T; grid (blocks of N, of T). WHOLE: INNER divides K."""
    n = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    t = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    k = tl.arange(0, INNER)
    x_TK = x + t[:, None].to(tl.int64) * K + k[None, :]
    w_KN = w + n[None, :].to(tl.int64) * K + k[:, None]
    there_T1, there_1N = t[:, None] < T, n[None, :] < N
    sums_0 = tl.zeros([ROWS, OUTPUTS], tl.int32)
    sums_1 = tl.zeros([ROWS, OUTPUTS], tl.int32)
    sums_2 = tl.zeros([ROWS, OUTPUTS], tl.int32)
    sums_3 = tl.zeros([ROWS, OUTPUTS], tl.int32)
    for start in range(0, K, INNER):
        if WHOLE:
            x_part = tl.load(x_TK + start, mask=there_T1, other=0)
            w_part = tl.load(w_KN + start, mask=there_1N, other=0)
        else:
            left = k < K - start
            x_part = tl.load(x_TK + start, mask=there_T1 & left[None, :], other=0)
            w_part = tl.load(w_KN + start, mask=there_1N & left[:, None], other=0)
        # Narrowing keeps the low byte.
        signed = (x_part + _BALANCE) ^ _BALANCE
        sums_0 = tl.dot(signed.to(tl.int8), w_part, sums_0, out_dtype=tl.int32)
        sums_1 = tl.dot((signed >> 8).to(tl.int8), w_part, sums_1, out_dtype=tl.int32)
        sums_2 = tl.dot((signed >> 16).to(tl.int8), w_part, sums_2, out_dtype=tl.int32)
        sums_3 = tl.dot((signed >> 24).to(tl.int8), w_part, sums_3, out_dtype=tl.int32)
    y_TN = sums_0 + (sums_1 << 8) + (sums_2 << 16) + (sums_3 << 24)
    y_at = y + t[:, None].to(tl.int64) * N + n[None, :]
    tl.store(y_at, y_TN, mask=there_T1 & there_1N)


def ring_product(elements: torch.Tensor, weight: torch.Tensor, tile: Tile) -> torch.Tensor:
    """Return elements @ weight^T mod 2^32, computed in such tiles.

    `elements`: int32 [T, K], any values; `weight`: int8 [N, K], both contiguous and on the device.
    Returns int32 [T, N]. K is at most `MAX_IN_FEATURES`, which `check_integers` has made sure of.
    """
    (rows, K), N = elements.shape, weight.shape[0]
    product = torch.empty(rows, N, dtype=torch.int32, device=elements.device)
    blocks, whole = triton.cdiv(N, tile.outputs), K % tile.inner == 0
    threads = {"num_warps": tile.warps, "num_stages": tile.stages}
    if tile.rows == 1:
        _direct[blocks, rows](
            elements, weight, product, K, N, tile.outputs, tile.inner, whole, **threads
        )
    else:
        _digits[blocks, triton.cdiv(rows, tile.rows)](
            elements, weight, product, rows, K, N, *tile[:3], whole, **threads
        )
    return product


def every_tile(elements: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return the product as all tiles that may be chosen for it compute it. Raises KernelError."""
    first, *others = (ring_product(elements, weight, tile) for tile in tiles_for(len(elements)))
    if not all(torch.equal(first, other) for other in others):
        raise KernelError(
            f"int8 products on {elements.device}",
            got=f"different numbers for {list(elements.shape)} by {list(weight.shape)}",
            expected="the same from kernels of all tiles",
        )
    return first
