"""How the exact product is cut into blocks: a short list for each number of rows, and a choice.

Which of a list is fastest depends on the matrix and the GPU, so each shape tries them once. The
lists are those of a prototype on an H100.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from gpu_side.event_log import log

# Up to so many rows, reading the weights takes longer than multiplying without tensor cores.
DIRECT_ROWS = 4
# Products of more rows choose as those of this many.
_MOST_ROWS = 512


class Tile(NamedTuple):
    """What one block of threads computes: `rows` x `outputs`, `inner` input features at a time.

    One row: int32 multiplications and additions. More: digits, on tensor cores. `warps`, `stages`:
    of threads, and of loads under way.
    """

    rows: int
    outputs: int
    inner: int
    warps: int
    stages: int = 2


_DIRECT = (Tile(1, 16, 256, 4), Tile(1, 8, 512, 4), Tile(1, 4, 1024, 4), Tile(1, 8, 1024, 8))
_FEW = (Tile(16, 32, 128, 4, 4), Tile(16, 64, 128, 4, 3))
# Four accumulators of 32 registers a thread: larger tiles spill.
_MANY = (Tile(64, 64, 128, 4, 3), Tile(32, 128, 128, 4, 3), Tile(128, 64, 64, 8, 3))


def tiles_for(rows: int) -> Sequence[Tile]:
    """Return the tiles that a product of so many rows chooses from."""
    return _DIRECT if rows <= DIRECT_ROWS else _FEW if rows <= 32 else _MANY


def bucket(rows: int) -> int:
    """Return the number of rows that stands for this one: the next power of two, 512 at most."""
    return min(1 << (rows - 1).bit_length(), _MOST_ROWS)


class TileChoices:
    """Chooses a tile for each shape once. `time_us`: says how long what it is given takes."""

    def __init__(self, time_us: Callable[[Callable[[], object]], float]) -> None:
        self._time_us = time_us
        self._chosen: dict[tuple[int, int, int], Tile] = {}

    def choose(
        self, rows: int, in_features: int, out_features: int, run: Callable[[Tile], object]
    ) -> Tile:
        """Return the fastest tile. `run`: computes the product, for the first of its shape only."""
        key = (in_features, out_features, bucket(rows))
        if (tile := self._chosen.get(key)) is None:
            took_us = {tile: self._time_us(partial(run, tile)) for tile in tiles_for(rows)}
            tile = self._chosen[key] = min(took_us, key=took_us.__getitem__)
            log.info(
                "tile",
                in_features=in_features,
                out_features=out_features,
                rows=key[-1],
                tile="x".join(map(str, tile)),
                us=round(took_us[tile], 1),
            )
        return tile
