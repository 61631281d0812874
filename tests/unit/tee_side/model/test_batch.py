"""A flat batch, and how it is cut into micro-batches."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from protocol.model.config import ModelConfig, read_config
from tee_side.model.batch import Batch, Take
from tee_side.model.kv_cache import KVCache
from tests.kit.model import Models


@pytest.fixture(scope="module")
def config(saved_model: Models) -> ModelConfig:
    return read_config(saved_model("llama").directory)


def _caches(config: ModelConfig, *lengths: int) -> list[KVCache]:
    caches = []
    for length in lengths:
        caches.append(KVCache(config, 64, torch.float32))
        caches[-1].commit(length)
    return caches


def test_rows_stand_side_by_side_and_the_last_of_a_complete_sequence_has_logits(
    config: ModelConfig,
) -> None:
    first, second, third = _caches(config, 0, 7, 2)
    batch = Batch.of([(first, [1, 2, 3], 0), (second, [4], 0), (third, [5, 6], 9)])
    assert batch.token_ids_T.tolist() == [1, 2, 3, 4, 5, 6]
    assert batch.token_ids_T.dtype == torch.int64
    assert [
        (c.cache, c.rows, c.start, c.context, c.known_length, c.behind) for c in batch.chunks
    ] == [
        (first, slice(0, 3), 0, 3, 3, 0),
        (second, slice(3, 4), 7, 8, 8, 0),
        (third, slice(4, 6), 2, 4, 13, 0),
    ]
    assert batch.output_rows == (2, 3)
    # Guesses are rows of their own, that see what decoding alone would.
    one, two = _caches(config, 6, 2)
    batch = Batch.of([Take(one, [9, 4, 7], 0, drafts=2), Take(two, [1, 2], 3)])
    assert [(c.cache, c.rows, c.start, c.context, c.known_length) for c in batch.chunks] == [
        (one, slice(0, 1), 6, 7, 7),
        (one, slice(1, 2), 7, 8, 8),
        (one, slice(2, 3), 8, 9, 9),
        (two, slice(3, 5), 2, 4, 7),
    ]
    assert batch.output_rows == (0, 1, 2)
    # Rows that are read are counted from the first of their sequence.
    taken = [Take(one, [9], 0), Take(two, [1, 2, 3], 2, read=range(1, 3))]
    batch = Batch.of([*taken, Take(first, [5, 6], 0, read=range(1, 2), logits=False)])
    assert (batch.output_rows, batch.read_rows) == ((0,), (2, 3, 5))
    assert [part.read_rows for part in batch.split(2)] == [(2,), (0, 2)]


@given(
    lengths=st.lists(st.tuples(st.integers(1, 12), st.integers(0, 9), st.booleans()), min_size=1),
    parts=st.integers(1, 9),
    again=st.integers(1, 3),
)
def test_the_parts_are_the_batch_in_order(
    config: ModelConfig, lengths: list[tuple[int, int, bool]], parts: int, again: int
) -> None:
    """Whatever is cut: every row once, with the position, the RoPE and the logits that it had."""
    caches = _caches(config, *(held for _, held, _ in lengths))
    asked = [
        (cache, [100 * number + row for row in range(rows)], 0 if complete else 7)
        for number, (cache, (rows, _, complete)) in enumerate(zip(caches, lengths, strict=True))
    ]
    batch = Batch.of(asked)

    def seen(one: Batch) -> list[tuple[int, int, int, int, bool]]:
        found = []
        for chunk in one.chunks:
            for row in range(chunk.rows.start, chunk.rows.stop):
                position = chunk.start + row - chunk.rows.start
                token = int(one.token_ids_T[row])
                whose = caches.index(chunk.cache)
                found.append((token, whose, position, chunk.known_length, row in one.output_rows))
        return found

    cut = batch.split(parts)
    sizes = [len(part.token_ids_T) for part in cut]
    assert len(cut) == min(parts, len(batch.token_ids_T))
    assert max(sizes) - min(sizes) <= 1
    # Parts can be cut again.
    for found in (cut, [piece for part in cut for piece in part.split(again)]):
        assert [row for part in found for row in seen(part)] == seen(batch)
        for part in found:
            # Chunks cover the rows without a gap, and a part's last row sees what it saw before.
            starts = [c.rows.start for c in part.chunks]
            assert starts == [0, *[c.rows.stop for c in part.chunks[:-1]]]
            assert part.chunks[-1].rows.stop == len(part.token_ids_T)
            assert all(c.context == c.start + c.tokens for c in part.chunks)
