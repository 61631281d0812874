"""The GPU's kernels equal int64 arithmetic modulo 2^32 in Triton's interpreter, and compile.

Left to `make test-slow`: they need Triton, and its interpreter takes minutes. With
TRITON_INTERPRET=0 they run on a GPU, as benchmarks/accelerator.sh has them. As a program, without
the interpreter, this file compiles the kernels and prints a line for each: the capability, how many
rows or `fetch`, whether it works in place, the instruction of tensor cores, and what follows the
result and a barrier of the block.
"""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from gpu_side.cuda.device import InPlaceJob, tiles_for
from gpu_side.kernels import exact_product
from protocol.errors import KernelError
from tests.kit.rows import each_row

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

LOW, HIGH = -(2**31), 2**31 - 1
# The interpreter's memory is the CPU's. What a kernel uses in place is, too, wherever it runs.
ON_GPU = os.environ.get("TRITON_INTERPRET") == "0"
# The ends of int32, -128 in every digit, 127 in every digit, and one more than that.
EXTREMES = (LOW, HIGH, 0x7F7F7F80, 0x7F7F7F7F, 0x7F7F7F7F + 1, -1)


@pytest.fixture
def ring() -> Any:
    return pytest.importorskip("gpu_side.cuda.ring", reason="Triton is not installed")


def _random(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    bounds = torch.iinfo(dtype)
    return _there(torch.randint(bounds.min, bounds.max + 1, shape).to(dtype))


def _there(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.cuda() if ON_GPU else tensor


def _here(*shape: int, dtype: torch.dtype = torch.int64, value: int = 0) -> torch.Tensor:
    return torch.full(shape, value, dtype=dtype, pin_memory=ON_GPU)


def _is_exact(found: torch.Tensor, elements: torch.Tensor, weight: torch.Tensor) -> bool:
    return torch.equal(found.cpu(), exact_product(elements.cpu(), weight.cpu()))


@each_row(
    ("rows", "shape"),
    [
        *((rows, (37, 45)) for rows in range(1, 34)),
        *((5, shape) for shape in ((1, 2), (19, 37), (70, 300), (64, 128), (130, 1025))),
        *((rows, (70, 300)) for rows in (1, 33)),
    ],
)
def test_every_tile_is_exact(ring: Any, rows: int, shape: tuple[int, int]) -> None:
    elements, weight = _random(torch.int32, rows, shape[1]), _random(torch.int8, *shape)
    assert _is_exact(ring.every_tile(elements, weight), elements, weight)
    # Rows of a fused matrix are multiplied where they lie.
    part = weight[len(weight) // 2 :]
    assert _is_exact(ring.every_tile(elements, part), elements, part)


@each_row("value", EXTREMES)
def test_extreme_values_wrap_as_the_ring_does(ring: Any, value: int) -> None:
    for rows in (2, 7, 40):
        elements = _there(torch.full((rows, 1030), value).to(torch.int32))
        for entry in (-128, 127):
            weight = _there(torch.full((9, 1030), entry, dtype=torch.int8))
            assert _is_exact(ring.every_tile(elements, weight), elements, weight)


@each_row("tile", [*tiles_for(1), *tiles_for(32)])
def test_a_job_is_done_where_it_lies_and_touches_nothing_beside_it(ring: Any, tile: Any) -> None:
    K, N, bucket = 45, 37, 4
    told, flag = _there(torch.zeros(3, dtype=torch.int64)), _here(1, dtype=torch.int32)
    fetched = _there(torch.full((bucket * K,), 99, dtype=torch.int32))
    weight, job = _random(torch.int8, N, K), InPlaceJob(_here(3), flag, told, fetched)
    # Of one request after the other, as a graph repeats them: fewer rows after more.
    for rows in (4, 3, 1):
        elements = _here(rows, K, dtype=torch.int32).copy_(_random(torch.int32, rows, K))
        room = _here(bucket + 1, N, dtype=torch.int32, value=-7)
        result = room[:rows]
        job.tell(elements, result)
        assert not job.is_done
        ring.do_job(job, bucket, weight, tile)
        if ON_GPU:
            torch.cuda.synchronize()
        assert job.is_done
        assert _is_exact(result, elements, weight)
        assert (room[rows:] == -7).all()
        assert job.told[2] == 0


def test_kernels_that_err_are_refused(ring: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    given = _random(torch.int32, 1, 8), _random(torch.int8, 4, 8)
    plain = ring.ring_product
    with monkeypatch.context() as patch:
        patch.setattr(
            ring, "ring_product", lambda x, w, tile: plain(x, w, tile) + (tile.inner == 1024)
        )
        with pytest.raises(KernelError, match="got different numbers for"):
            ring.every_tile(*given)
    monkeypatch.setattr(ring, "do_job", lambda *_: None)
    with pytest.raises(KernelError, match="got no flag"):
        ring.every_tile(*given)


def test_the_kernels_compile_for_gpus_that_are_not_here(ring: Any, tmp_path: Path) -> None:
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path)}
    environment.pop("TRITON_INTERPRET", None)
    command = [sys.executable, "-m", "tests.unit.gpu_side.test_ring"]
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


POINTERS = {"x": "*i32", "w": "*i8", "y": "*i32", "flag": "*i32", "told": "*i64", "table": "*i64"}
ORDER = re.compile(r"st\.global\S*|bar\.sync|atom\.global\.sys\.acq_rel\.add")


def _show(kernel: Any, constants: dict[str, int], capability: int, what: object, **options: int):  # type: ignore[no-untyped-def]
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names, in_place = kernel.arg_names, bool(constants.get("IN_PLACE", True))
    constants = {name: value for name, value in constants.items() if name in names}
    pointers = POINTERS | ({"y": "*i64"} if constants.get("IN_PLACE") else {})
    signature = {
        name: "constexpr" if name in constants else pointers.get(name, "i32") for name in names
    }
    aligned = {
        (names.index(name),): [["tt.divisibility", 16]]
        for name in (*POINTERS, "K", "N")
        if name in names
    }
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=aligned)
    made = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    ptx = str(made.asm["ptx"])
    products = re.findall(r"(?:wgmma\.mma_async|mma\.sync)[\w.]*", ptx)
    # Of the result, before the barrier; of the count and of the flag, behind it.
    ends = re.search(r"st\.global\S* bar\.sync (atom.*)", " ".join(ORDER.findall(ptx)))
    shown = products[0] if products else "none", ends.group(1) if ends else "none"
    print(capability, what, in_place, *shown, sep=", ")  # noqa: T201


def main() -> None:
    """Compile all kernels for two generations of GPUs."""
    from gpu_side.cuda import ring

    tiles = [(rows, tile, 90, False) for rows in (1, 16, 64) for tile in tiles_for(rows)]
    tiles += [(rows, tile, 90, True) for rows, tile, _, _ in tiles if rows < 64]
    for rows, tile, capability, in_place in (*tiles, (16, tiles_for(16)[0], 80, True)):
        constants = {"ROWS": tile.rows, "OUTPUTS": tile.outputs, "INNER": tile.inner}
        constants |= {"WHOLE": True, "IN_PLACE": in_place}
        kernel: Any = ring._direct if tile.rows == 1 else ring._digits
        threads = {"num_warps": tile.warps, "num_stages": tile.stages}
        _show(kernel, constants, capability, rows, **threads)
    for capability in (80, 90):
        _show(ring._fetch, {"WORDS": ring._FETCHED}, capability, "fetch")


if __name__ == "__main__":
    main()
