"""cos and sin tables for the positions of a chunk."""

from __future__ import annotations

import torch

from protocol.model.config import ModelConfig
from protocol.model.rope import rope_frequencies
from tee_side.model.batch import Batch


class Rope:
    """cos and sin of the positions of a step, computed in float32.

    With `dynamic` and `longrope` the frequencies depend on how long the sequence has become. As in
    transformers, keys that are already cached keep the rotation they were written with.
    """

    def __init__(self, config: ModelConfig) -> None:
        self._config = config
        self._by_length = config.rope.rope_type in ("dynamic", "longrope")
        self._frequencies = rope_frequencies(config)

    def of_batch(self, batch: Batch, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cos [T, 1, C] and half of sin [T, 1, C / 2], its two halves being the same."""
        tables = [
            self.cos_sin(chunk.start, chunk.context, chunk.known_length, dtype)
            for chunk in batch.chunks
        ]
        cos_T1C, sin_T1c = (torch.cat(parts) for parts in zip(*tables, strict=True))
        return cos_T1C, sin_T1c

    def cos_sin(
        self, start: int, end: int, length: int, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the same for positions `start` to `end - 1` of a sequence of `length` tokens."""
        inv_freq, scaling = self._frequencies
        if self._by_length:
            inv_freq, scaling = rope_frequencies(self._config, length)
        positions_T = torch.arange(start, end, dtype=torch.float32)
        angles_T1C = torch.outer(positions_T, inv_freq).repeat(1, 2).unsqueeze(1)
        cos_T1C, sin_T1C = ((x * scaling).to(dtype) for x in (angles_T1C.cos(), angles_T1C.sin()))
        return cos_T1C, sin_T1C.chunk(2, dim=-1)[0]
