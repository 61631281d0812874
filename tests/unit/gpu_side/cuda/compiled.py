"""Compiles the kernels for GPUs that need not be here, and prints what they are made of.

A line each: the capability, how many rows or `fetch`, whether it works in place, the instruction of
tensor cores, and what follows the result and a barrier of the block. A process of its own, without
Triton's interpreter, which the tests run in.
"""

from __future__ import annotations

import re
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from gpu_side.cuda import ring
from gpu_side.cuda.tiles import Tile, tiles_for

POINTERS = {"x": "*i32", "w": "*i8", "y": "*i32", "flag": "*i32", "told": "*i64", "table": "*i64"}
ORDER = re.compile(r"st\.global\S*|bar\.sync|atom\.global\.sys\.acq_rel\.add")


def compiled(kernel: Any, constants: dict[str, int], capability: int, **options: int) -> str:
    """Return the PTX."""
    names = kernel.arg_names
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
    return str(made.asm["ptx"])


def show(capability: int, what: object, in_place: bool, ptx: str) -> None:
    products = re.findall(r"(?:wgmma\.mma_async|mma\.sync)[\w.]*", ptx)
    order = " ".join(ORDER.findall(ptx))
    # Of the result, before the barrier; of the count and of the flag, behind it.
    ends = re.search(r"st\.global\S* bar\.sync (atom.*)", order)
    ended = ends.group(1) if ends else "none"
    print(capability, what, in_place, products[0] if products else "none", ended, sep=", ")


def show_tile(tile: Tile, rows: int, capability: int, in_place: bool) -> None:
    kernel: Any = ring._direct if tile.rows == 1 else ring._digits
    constants = {"ROWS": tile.rows, "OUTPUTS": tile.outputs, "INNER": tile.inner, "WHOLE": True}
    constants["IN_PLACE"] = in_place
    threads = {"num_warps": tile.warps, "num_stages": tile.stages}
    show(capability, rows, in_place, compiled(kernel, constants, capability, **threads))


for rows in (1, 16, 64):
    for tile in tiles_for(rows):
        show_tile(tile, rows, 90, False)
        if rows < 64:
            show_tile(tile, rows, 90, True)
show_tile(tiles_for(16)[0], 16, 80, True)
for capability in (80, 90):
    show(capability, "fetch", True, compiled(ring._fetch, {"WORDS": ring._FETCHED}, capability))
