"""A step's flat batch: prefill chunks and decode tokens of several sequences, one row a token."""

from __future__ import annotations

from collections.abc import Sequence as Rows
from dataclasses import dataclass
from itertools import pairwise

import torch

from tee_side.model.kv_cache import KVCache


@dataclass(frozen=True, slots=True)
class Chunk:
    """The rows of one sequence in a step: the next tokens behind what its cache holds.

    `known_length`: the sequence's length once all of its pending ids have run: RoPE may depend on
    it, and must not depend on how the engine cuts a prompt. `behind`: rows of the same sequence
    that are in earlier micro-batches of the same step.
    """

    cache: KVCache
    rows: slice
    known_length: int
    behind: int = 0

    @property
    def tokens(self) -> int:
        """Number of rows."""
        return int(self.rows.stop - self.rows.start)

    def follows(self, layer: int) -> bool:
        """Say whether the rows before these have been written, so that they can be looked at."""
        return self.cache.written(layer) >= self.behind

    @property
    def start(self) -> int:
        """Position of the first row in its sequence."""
        return self.cache.length + self.behind

    @property
    def context(self) -> int:
        """Tokens that the last row can look at, itself included."""
        return self.start + self.tokens


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

    def split(self, parts: int) -> list[Batch]:
        """Cut into consecutive micro-batches of about equal sizes; fewer if there are few rows.

        A sequence that is cut must run in order: the later part looks at the keys of the earlier.
        """
        rows = len(self.token_ids_T)
        parts = min(parts, rows)
        bounds = [rows * part // parts for part in range(parts + 1)]
        return [self._between(*ends) for ends in pairwise(bounds)]

    def _between(self, first: int, last: int) -> Batch:
        chunks = []
        for chunk in self.chunks:
            start, stop = max(first, chunk.rows.start), min(last, chunk.rows.stop)
            if start < stop:
                rows, behind = slice(start - first, stop - first), start - chunk.rows.start
                chunks.append(Chunk(chunk.cache, rows, chunk.known_length, chunk.behind + behind))
        output_rows = tuple(row - first for row in self.output_rows if first <= row < last)
        return Batch(self.token_ids_T[first:last], tuple(chunks), output_rows)

    def commit(self) -> None:
        """Make the rows that this step wrote into the caches count."""
        for chunk in self.chunks:
            chunk.cache.commit(chunk.tokens)
