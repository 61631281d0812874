"""cos and sin of a Segment's positions, in the order in which a head's pairs stand."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeAlias

import torch

from gpu_side.segment_parts import Part
from protocol.model.config import ModelConfig
from protocol.model.rope import rope_frequencies

# cos and sin [T, 1, 1, C / 2]: both halves of a head have the same.
Table: TypeAlias = tuple[torch.Tensor, torch.Tensor]
# Positions by which a table grows.
_STEP = 1024


class SegmentRope:
    """Tables of positions, computed in float32 as in transformers.

    With `dynamic` and `longrope` the frequencies depend on how long a sequence is; keys that are
    cached keep the rotation that they were written with. With others a table is kept.
    """

    def __init__(self, config: ModelConfig, device: torch.device, dtype: torch.dtype) -> None:
        self._config, self._device, self._dtype = config, device, dtype
        self._by_length = config.rope.rope_type in ("dynamic", "longrope")
        self._kept: Table | None = None

    def of_parts(self, parts: Iterable[Part]) -> Table:
        """Return the tables of the rows of these parts."""
        tables = [self._of_part(part.start, part.start + part.rows, part.length) for part in parts]
        if len(tables) == 1:
            return tables[0]
        cos, sin = (torch.cat(column) for column in zip(*tables, strict=True))
        return cos, sin

    def _of_part(self, start: int, end: int, length: int) -> Table:
        if self._by_length:
            return self._table(start, end, length)
        if self._kept is None or len(self._kept[0]) < end:
            self._kept = self._table(0, end + -end % _STEP, length)
        cos, sin = self._kept
        return cos[start:end], sin[start:end]

    def _table(self, start: int, end: int, length: int) -> Table:
        inv_freq, scaling = rope_frequencies(self._config, length)
        positions = torch.arange(start, end, dtype=torch.float32)
        angles = torch.outer(positions, inv_freq)[:, None, None]
        cos, sin = (
            (x * scaling).to(self._device, self._dtype) for x in (angles.cos(), angles.sin())
        )
        return cos, sin


def reordered(table: Table, order: torch.Tensor | None) -> Table:
    """Return the tables for heads whose pairs stand in another order, [T, K, 1, C / 2].

    `order`: int64 [K, C / 2], which pair of RoPE (i, i + C / 2) stands at each place.
    """
    if order is None:
        return table
    cos, sin = (x[:, 0, 0][:, order].unsqueeze(2) for x in table)
    return cos, sin


def rotate(x: torch.Tensor, table: Table) -> torch.Tensor:
    """Rotate every pair (i, i + C / 2) of `x` [T, K, G, C] by its angle."""
    cos, sin = table
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
