"""Products in the ring Z_2^32 by int8 weights as one kernel each, in Triton.

    direct     x w, added up in int32. For few rows: it reads each weight once, and is done by then.
    digits     x = d_0 + 256 d_1 + 256^2 d_2 + 256^3 d_3 with signed digits (`protocol.integer`),
               each multiplied on int8 tensor cores, then shifted and added.

A request of few rows is done in place (`do_job`): `_fetch` reads the rows from host memory, once,
and the product goes straight to where its reply lies. The last block to end writes a flag there for
the host. No kernel waits for anything, and none reads an address that a client wrote.

Both are exact for every int32: its additions, multiplications and shifts wrap, which is what the
ring wants. Only the tensor cores' sums may saturate (`mma.sync` does): that of one digit must fit
int32, and does up to `MAX_IN_FEATURES`.

Run by Triton's interpreter and compiled for sm_80 and sm_90, never run on a GPU. Triton is imported
here alone: it comes with torch for CUDA, and is not installed beside torch for a CPU.
"""

from functools import partial

import torch
import triton
import triton.language as tl

from gpu_side.cuda.device import GRAPH_ROWS, InPlaceJob, Tile, tiles_for
from protocol.errors import KernelError

# Words that a block of `_fetch` reads.
_FETCHED = 1024
# 0x80808080: added it makes every digit unsigned, xor-ed afterwards signed again.
_BALANCE = tl.constexpr(0x80808080 - 2**32)


@triton.jit
def _fetch(
    table: tl.tensor, told: tl.tensor, x: tl.tensor, K: tl.tensor, WORDS: tl.constexpr
) -> None:
    """Store in x [T, K] the rows of a job, and tell the product about it; grid (blocks of T K)."""
    at = tl.program_id(0) * WORDS + tl.arange(0, WORDS)
    rows = tl.load(table + 2)
    there = at < rows * K
    source = tl.load(table).to(tl.pointer_type(tl.int32))
    tl.store(x + at, tl.load(source + at, mask=there), mask=there)
    if tl.program_id(0) == 0:
        tl.store(told, tl.load(table + 1))
        tl.store(told + 1, rows)


@triton.jit
def _end(told: tl.tensor, flag: tl.tensor) -> None:
    """Count this block as ended. The last one says so, when the result of all is to be seen."""
    tl.debug_barrier()
    blocks = tl.num_programs(0) * tl.num_programs(1)
    if tl.atomic_add(told + 2, 1, sem="acq_rel", scope="sys") == blocks - 1:
        tl.store(told + 2, 0)
        tl.store(flag, 1, cache_modifier=".wt")


# Both products: y is where the result goes; where IN_PLACE, what `_fetch` has told, in which its
# address is. Grid (blocks of N, blocks of T). WHOLE: INNER divides K.


@triton.jit
def _direct(  # noqa: PLR0917
    x: tl.tensor,
    w: tl.tensor,
    y: tl.tensor,
    flag: tl.tensor,
    K: tl.tensor,
    N: tl.tensor,
    OUTPUTS: tl.constexpr,
    INNER: tl.constexpr,
    WHOLE: tl.constexpr,
    IN_PLACE: tl.constexpr,
) -> None:
    """Store y [T, N] = x [T, K] w [N, K]^T, a row a block."""
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
    if IN_PLACE:
        result = tl.load(y).to(tl.pointer_type(tl.int32))
        tl.store(result + row * N + n, sums_N, mask=(n < N) & (row < tl.load(y + 1)))
        _end(y, flag)
    else:
        tl.store(y + row * N + n, sums_N, mask=n < N)


@triton.jit
def _digits(  # noqa: PLR0917
    x: tl.tensor,
    w: tl.tensor,
    y: tl.tensor,
    flag: tl.tensor,
    T: tl.tensor,
    K: tl.tensor,
    N: tl.tensor,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    INNER: tl.constexpr,
    WHOLE: tl.constexpr,
    IN_PLACE: tl.constexpr,
) -> None:
    """Store y [T, N] = x [T, K] w [N, K]^T."""
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
    y_at = t[:, None].to(tl.int64) * N + n[None, :]
    if IN_PLACE:
        result = tl.load(y).to(tl.pointer_type(tl.int32))
        tl.store(result + y_at, y_TN, mask=(t[:, None] < tl.load(y + 1)) & there_1N)
        _end(y, flag)
    else:
        tl.store(y + y_at, y_TN, mask=there_T1 & there_1N)


def ring_product(elements: torch.Tensor, weight: torch.Tensor, tile: Tile) -> torch.Tensor:
    """Return elements @ weight^T mod 2^32, computed in such tiles.

    `elements`: int32 [T, K], any values; `weight`: int8 [N, K], both contiguous and on the device.
    Returns int32 [T, N]. K is at most `MAX_IN_FEATURES`, which `check_integers` has made sure of.
    """
    product = torch.empty(len(elements), len(weight), dtype=torch.int32, device=elements.device)
    _multiply(elements, weight, tile, product, product, in_place=False)
    return product


def do_job(job: InPlaceJob, rows: int, weight: torch.Tensor, tile: Tile) -> None:
    """Compute the product of a job of at most so many rows where it lies, then set its flag.

    `weight` as in `ring_product`; the job's rows int32 [T, K], its result int32 [T, N].
    """
    elements = fetched_rows(job, rows, weight)
    grid = (triton.cdiv(elements.numel(), _FETCHED),)
    _fetch[grid](job.table, job.told, elements, elements.shape[1], _FETCHED)
    _multiply(elements, weight, tile, job.told, job.flag, in_place=True)


def fetched_rows(job: InPlaceJob, rows: int, weight: torch.Tensor) -> torch.Tensor:
    """Return where a job's rows are once they are on the device, [rows, K]."""
    K = weight.shape[1]
    return job.fetched[: rows * K].view(rows, K)


def _multiply(
    elements: torch.Tensor,
    weight: torch.Tensor,
    tile: Tile,
    y: torch.Tensor,
    flag: torch.Tensor,
    *,
    in_place: bool,
) -> None:
    (rows, K), N = elements.shape, len(weight)
    blocks, whole = triton.cdiv(N, tile.outputs), K % tile.inner == 0
    threads = {"num_warps": tile.warps, "num_stages": tile.stages}
    to = elements, weight, y, flag
    if tile.rows == 1:
        _direct[blocks, rows](*to, K, N, tile.outputs, tile.inner, whole, in_place, **threads)
    else:
        grid = blocks, triton.cdiv(rows, tile.rows)
        _digits[grid](*to, rows, K, N, *tile[:3], whole, in_place, **threads)


def every_tile(elements: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return the product as all tiles that may be chosen for it compute it. Raises KernelError.

    Few rows also in place.
    """
    tiles = tiles_for(len(elements))
    first, *others = (ring_product(elements, weight, tile) for tile in tiles)
    if len(elements) <= GRAPH_ROWS[-1]:
        others += (_in_place(elements, weight, tile) for tile in tiles)
    KernelError.unless(
        all(torch.equal(first, other) for other in others),
        f"int8 products on {elements.device}",
        f"different numbers for {list(elements.shape)} by {list(weight.shape)}",
        "the same from kernels of all tiles",
    )
    return first


def _in_place(elements: torch.Tensor, weight: torch.Tensor, tile: Tile) -> torch.Tensor:
    device = elements.device
    on_cuda = device.type == "cuda"
    host = partial(torch.zeros, pin_memory=on_cuda)
    told = torch.zeros(3, dtype=torch.int64, device=device)
    table, flag = host(3, dtype=torch.int64), host(1, dtype=torch.int32)
    job = InPlaceJob(table, flag, told, torch.empty_like(elements).view(-1))
    rows = host(elements.shape, dtype=torch.int32).copy_(elements)
    result = host(len(elements), len(weight), dtype=torch.int32)
    job.tell(rows, result)
    do_job(job, len(elements), weight, tile)
    if on_cuda:
        torch.cuda.synchronize(device)
    KernelError.unless(job.is_done, f"int8 products on {device}", "no flag", "one at the end")
    return result.to(device)
