"""A step's flat batch: prefill chunks and decode tokens of several sequences, one row a token."""

from __future__ import annotations

from collections.abc import Sequence as Rows
from dataclasses import dataclass

import torch

from tee_side.kv_cache import KVCache


@dataclass(frozen=True, slots=True)
class Chunk:
    """The rows of one sequence in a step: the next tokens behind what its cache holds."""

    cache: KVCache
    rows: slice
    # The sequence's length once all of its pending ids have run: RoPE may depend on it, and must
    # not depend on how the engine cuts a prompt.
    known_length: int

    @property
    def tokens(self) -> int:
        """Number of rows."""
        return int(self.rows.stop - self.rows.start)

    @property
    def context(self) -> int:
        """Tokens that the last row can look at, itself included."""
        return self.cache.length + self.tokens


@dataclass(frozen=True, slots=True)
class Batch:
    """`token_ids_T`: int64 [T]; `output_rows`: rows whose logits are wanted, in order."""

    token_ids_T: torch.Tensor
    chunks: tuple[Chunk, ...]
    output_rows: tuple[int, ...]

    @staticmethod
    def of(parts: Rows[tuple[KVCache, Rows[int], int]]) -> Batch:
        """Lay (cache, next token ids, how many pending ids are left for later) side by side."""
        token_ids: list[int] = []
        chunks: list[Chunk] = []
        output_rows: list[int] = []
        for cache, ids, left in parts:
            start = len(token_ids)
            token_ids.extend(ids)
            chunks.append(
                Chunk(cache, slice(start, len(token_ids)), cache.length + len(ids) + left)
            )
            if left == 0:
                output_rows.append(len(token_ids) - 1)
        return Batch(torch.tensor(token_ids, dtype=torch.int64), tuple(chunks), tuple(output_rows))

    def commit(self) -> None:
        """Make the rows that this step wrote into the caches count."""
        for chunk in self.chunks:
            chunk.cache.commit(chunk.tokens)
