"""cos and sin tables for the positions of a chunk."""

from __future__ import annotations

import torch

from protocol.model.config import ModelConfig
from protocol.model.rope import rope_frequencies
from tee_side.model.batch import Batch

_MAX_TABLES = 256


class Rope:
    """cos and sin of every position, computed in float32 and kept for the layers of a step.

    With `dynamic` and `longrope` the frequencies depend on how long the sequence has become. As in
    transformers, keys that are already cached keep the rotation they were written with.
    """

    def __init__(self, config: ModelConfig) -> None:
        self._config = config
        self._by_length = config.rope.rope_type in ("dynamic", "longrope")
        self._inv_freq, self._scaling = rope_frequencies(config)
        self._tables: dict[
            tuple[int, int, int, torch.dtype], tuple[torch.Tensor, torch.Tensor]
        ] = {}

    def of_batch(self, batch: Batch, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cos [T, 1, C] and half of sin [T, 1, C / 2], its two halves being the same."""
        tables = [
            self.cos_sin(chunk.start, chunk.context, chunk.known_length, dtype)
            for chunk in batch.chunks
        ]
        cos_TC, sin_TC = (torch.cat(parts) for parts in zip(*tables, strict=True))
        return cos_TC.unsqueeze(1), sin_TC[:, None, : sin_TC.shape[1] // 2]

    def cos_sin(
        self, start: int, end: int, length: int, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cos and sin, each [end - start, C], for positions `start` to `end - 1`."""
        # All layers of a step ask for the same positions of the same sequences.
        key = (start, end, length if self._by_length else 0, dtype)
        if key not in self._tables:
            if len(self._tables) >= _MAX_TABLES:
                self._tables.clear()
            self._tables[key] = self._compute(start, end, length, dtype)
        return self._tables[key]

    def _compute(
        self, start: int, end: int, length: int, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        inv_freq, scaling = self._inv_freq, self._scaling
        if self._by_length:
            inv_freq, scaling = rope_frequencies(self._config, length)
        positions = torch.arange(start, end, dtype=torch.float32)
        angles = torch.outer(positions, inv_freq).repeat(1, 2)
        return (angles.cos() * scaling).to(dtype), (angles.sin() * scaling).to(dtype)
