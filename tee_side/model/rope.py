"""cos and sin tables for the positions of a chunk."""

from __future__ import annotations

from typing import TypeAlias

import torch

from protocol.model.config import ModelConfig
from protocol.model.rope import rope_frequencies
from tee_side.model.batch import Batch

Table: TypeAlias = tuple[torch.Tensor, torch.Tensor]

# Positions by which a table grows.
_STEP = 1024


class Rope:
    """cos and sin of the positions of a step, computed in float32.

    With `dynamic` and `longrope` the frequencies depend on how long the sequence has become. As in
    transformers, keys that are already cached keep the rotation they were written with. With the
    others they are kept for all positions so far: to compute those of a token takes 0.17 ms.
    """

    def __init__(self, config: ModelConfig) -> None:
        self._config = config
        self._by_length = config.rope.rope_type in ("dynamic", "longrope")
        self._frequencies = rope_frequencies(config)
        self._kept: dict[torch.dtype, Table] = {}

    def of_batch(self, batch: Batch, dtype: torch.dtype) -> Table:
        """Return cos [T, 1, C] and half of sin [T, 1, C / 2], its two halves being the same."""
        tables = [
            self.cos_sin(chunk.start, chunk.context, chunk.known_length, dtype)
            for chunk in batch.chunks
        ]
        if len(tables) == 1:
            return tables[0]
        cos_T1C, sin_T1c = (torch.cat(parts) for parts in zip(*tables, strict=True))
        return cos_T1C, sin_T1c

    def cos_sin(self, start: int, end: int, length: int, dtype: torch.dtype) -> Table:
        """Return the same for positions `start` to `end - 1` of a sequence of `length` tokens."""
        if self._by_length:
            return _table(*rope_frequencies(self._config, length), start, end, dtype)
        kept = self._kept.get(dtype)
        if kept is None or kept[0].shape[0] < end:
            kept = _table(*self._frequencies, 0, end + -end % _STEP, dtype)
            self._kept[dtype] = kept
        cos_P1C, sin_P1c = kept
        return cos_P1C[start:end], sin_P1c[start:end]


def _table(
    inv_freq_c: torch.Tensor, scaling: float, start: int, end: int, dtype: torch.dtype
) -> Table:
    positions_T = torch.arange(start, end, dtype=torch.float32)
    angles_T1c = torch.outer(positions_T, inv_freq_c).unsqueeze(1)
    cos_T1c, sin_T1c = ((x * scaling).to(dtype) for x in (angles_T1c.cos(), angles_T1c.sin()))
    return cos_T1c.repeat(1, 1, 2), sin_T1c
