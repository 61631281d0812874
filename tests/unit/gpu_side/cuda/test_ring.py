"""The GPU's kernels equal int64 arithmetic modulo 2^32 in Triton's interpreter, and compile."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from gpu_side.cuda.products import Job
from gpu_side.cuda.tiles import Tile, tiles_for
from protocol.errors import KernelError
from protocol.integer import exact_product

ring = pytest.importorskip("gpu_side.cuda.ring", reason="Triton is not installed")

LOW, HIGH = -(2**31), 2**31 - 1
# The ends of int32, -128 in every digit, 127 in every digit, and one more than that.
EXTREMES = (LOW, HIGH, 0x7F7F7F80, 0x7F7F7F7F, 0x7F7F7F7F + 1, -1)


def _random(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    bounds = torch.iinfo(dtype)
    return torch.randint(bounds.min, bounds.max + 1, shape).to(dtype)


# Around the numbers of rows of a tile, and in test-more all of them.
EDGES = {1, 2, 3, 7, 8, 9, 15, 16, 17, 31, 32, 33}


@pytest.mark.parametrize(
    "rows", [pytest.param(n, marks=[pytest.mark.more] * (n not in EDGES)) for n in range(1, 34)]
)
def test_every_tile_is_exact_for_any_number_of_rows(rows: int) -> None:
    elements, weight = _random(torch.int32, rows, 45), _random(torch.int8, 37, 45)
    assert torch.equal(ring.every_tile(elements, weight), exact_product(elements, weight))


@pytest.mark.each_value
@pytest.mark.parametrize("rows", [1, 5, 33])
@pytest.mark.parametrize("shape", [(1, 2), (19, 37), (70, 300), (64, 128), (130, 1025)])
def test_every_tile_is_exact_for_any_matrix(rows: int, shape: tuple[int, int]) -> None:
    elements, weight = _random(torch.int32, rows, shape[1]), _random(torch.int8, *shape)
    assert torch.equal(ring.every_tile(elements, weight), exact_product(elements, weight))


@pytest.mark.each_value
@pytest.mark.parametrize("rows", [2, 7, 40])
@pytest.mark.parametrize("value", EXTREMES)
def test_extreme_values_wrap_as_the_ring_does(rows: int, value: int) -> None:
    elements = torch.full((rows, 1030), value).to(torch.int32)
    for entry in (-128, 127):
        weight = torch.full((9, 1030), entry, dtype=torch.int8)
        assert torch.equal(ring.every_tile(elements, weight), exact_product(elements, weight))


def test_rows_of_a_fused_matrix_are_multiplied_where_they_lie() -> None:
    elements, fused = _random(torch.int32, 3, 64), _random(torch.int8, 50, 64)
    part = fused[20:37]
    assert torch.equal(ring.every_tile(elements, part), exact_product(elements, part))


def _job(room: int) -> Job:
    table, told = (torch.zeros(3, dtype=torch.int64) for _ in range(2))
    flag = torch.zeros(1, dtype=torch.int32)
    return Job(table, flag, told, torch.full((room,), 99, dtype=torch.int32))


@pytest.mark.parametrize("tile", [*tiles_for(1), *tiles_for(32)], ids=str)
def test_a_job_is_done_where_it_lies_and_touches_nothing_beside_it(tile: Tile) -> None:
    K, N, bucket = 45, 37, 4
    weight, job = _random(torch.int8, N, K), _job(bucket * K)
    # Of one request after the other, as a graph repeats them: fewer rows after more.
    for rows in (4, 3, 1):
        elements, room = _random(torch.int32, rows, K), torch.full((bucket + 1, N), -7).int()
        result = room[:rows]
        job.tell(elements, result)
        assert not job.is_done
        ring.do_job(job, bucket, weight, tile)
        assert job.is_done
        assert torch.equal(result, exact_product(elements, weight))
        assert (room[rows:] == -7).all()
        assert job.told[2] == 0


def test_a_job_that_leaves_no_flag_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ring, "do_job", lambda *_: None)
    with pytest.raises(KernelError, match="got no flag"):
        ring.every_tile(_random(torch.int32, 1, 8), _random(torch.int8, 4, 8))


def test_tiles_that_differ_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = ring.ring_product
    monkeypatch.setattr(
        ring, "ring_product", lambda x, w, tile: plain(x, w, tile) + (tile.inner == 1024)
    )
    with pytest.raises(KernelError, match="got different numbers for"):
        ring.every_tile(_random(torch.int32, 1, 8), _random(torch.int8, 4, 8))


@pytest.mark.more
def test_the_kernels_compile_for_gpus_that_are_not_here(tmp_path: Path) -> None:
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path)}
    environment.pop("TRITON_INTERPRET")
    command = [sys.executable, "-m", "tests.unit.gpu_side.cuda.compiled"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    lines = [line.split(", ") for line in done.stdout.splitlines()]
    used = {(rows, instruction.split(".")[0]) for _, rows, _, instruction, _ in lines}
    plain = {("1", "none"), ("fetch", "none")}
    assert used == plain | {("16", "mma"), ("64", "mma"), ("64", "wgmma")}
    assert all("s32.s8.s8" in instruction for *_, instruction, _ in lines if instruction != "none")
    # All threads have stored their part of the result; one counts the block, for the whole system
    # to see what came before; then it stores the count and the flag.
    ended = "atom.global.sys.acq_rel.add bar.sync st.global.b64 st.global.wt.b32"
    in_place = [line for line in lines if line[2] == "True" and line[1] != "fetch"]
    assert [line[-1] for line in in_place] == [ended] * 7
