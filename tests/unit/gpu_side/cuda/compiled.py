"""Compiles the kernels for GPUs that need not be here, and prints what tensor cores they use.

A process of its own, without Triton's interpreter, which the tests run in.
"""

from __future__ import annotations

import re
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from gpu_side.cuda import ring
from gpu_side.cuda.tiles import Tile, tiles_for

POINTERS = {"x": "*i32", "w": "*i8", "y": "*i32"}


def compiled(tile: Tile, capability: int) -> str:
    kernel: Any = ring._direct if tile.rows == 1 else ring._digits
    constants = {"ROWS": tile.rows, "OUTPUTS": tile.outputs, "INNER": tile.inner, "WHOLE": True}
    names = kernel.arg_names
    signature = {
        name: "constexpr" if name in constants else POINTERS.get(name, "i32") for name in names
    }
    constants = {name: value for name, value in constants.items() if name in names}
    aligned = {(names.index(name),): [["tt.divisibility", 16]] for name in (*POINTERS, "K", "N")}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=aligned)
    options = {"num_warps": tile.warps, "num_stages": tile.stages}
    made = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    instructions = re.findall(r"(?:wgmma\.mma_async|mma\.sync)[\w.]*", made.asm["ptx"])
    return instructions[0] if instructions else "none"


for rows in (1, 16, 64):
    for tile in tiles_for(rows):
        print(rows, compiled(tile, 90))
print(16, compiled(tiles_for(16)[0], 80))
