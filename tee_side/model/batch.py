"""A step's flat batch: prefill chunks and decode tokens of several sequences, one row a token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

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


class Take(NamedTuple):
    """What a step takes of one sequence.

    `ids`: its next token ids; `left`: how many pending ones are left for later. With none left the
    logits behind the last one are wanted, and those behind each of the `drafts` last, which are
    guesses: every one is a row that sees what decoding it alone would see. `read`: rows whose
    hidden states are wanted, counted from the first.
    """

    cache: KVCache
    ids: Sequence[int]
    left: int
    drafts: int = 0
    read: range = range(0)
    logits: bool = True


@dataclass(frozen=True, slots=True)
class Batch:
    """`token_ids_T`: int64 [T]; `output_rows`: rows whose logits are wanted, in order.

    `read_rows`: rows whose hidden states are.
    """

    token_ids_T: torch.Tensor
    chunks: tuple[Chunk, ...]
    output_rows: tuple[int, ...]
    read_rows: tuple[int, ...] = ()

    @staticmethod
    def of(parts: Sequence[tuple[KVCache, Sequence[int], int] | Take]) -> Batch:
        """Lay what is taken of each sequence side by side."""
        token_ids: list[int] = []
        chunks: list[Chunk] = []
        output_rows: list[int] = []
        read_rows: list[int] = []
        for cache, ids, left, drafts, read, logits in (Take(*part) for part in parts):
            start = len(token_ids)
            token_ids.extend(ids)
            known, end = len(ids) - drafts, len(token_ids)
            rows = slice(start, start + known)
            chunks.append(Chunk(cache, rows, cache.length + known + left))
            for behind in range(known, len(ids)):
                row = start + behind
                one = Chunk(cache, slice(row, row + 1), cache.length + behind + 1, behind)
                chunks.append(one)
            if left == 0 and logits:
                output_rows += range(end - 1 - drafts, end)
            read_rows += (start + row for row in read)
        ids_T = torch.tensor(token_ids, dtype=torch.int64)
        return Batch(ids_T, tuple(chunks), tuple(output_rows), tuple(read_rows))

    @property
    def wanted_rows(self) -> list[int]:
        """The rows whose logits are wanted, then those whose hidden states are."""
        return [*self.output_rows, *self.read_rows]

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
        output_rows, read_rows = (
            tuple(row - first for row in rows if first <= row < last)
            for rows in (self.output_rows, self.read_rows)
        )
        return Batch(self.token_ids_T[first:last], tuple(chunks), output_rows, read_rows)
