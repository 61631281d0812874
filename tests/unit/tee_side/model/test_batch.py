"""A flat batch, and how it is cut into micro-batches."""

from __future__ import annotations

from collections.abc import Callable

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from protocol.model.config import ModelConfig, read_config
from tee_side.model.batch import Batch, Take
from tee_side.model.kv_cache import KVCache
from tests.kit.model import SavedModel


@pytest.fixture(scope="module")
def config(saved_model: Callable[..., SavedModel]) -> ModelConfig:
    return read_config(saved_model("llama").directory)


def _caches(config: ModelConfig, *lengths: int) -> list[KVCache]:
    """Return caches that hold so many tokens already."""
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
    assert [(c.cache, c.rows) for c in batch.chunks] == [
        (first, slice(0, 3)),
        (second, slice(3, 4)),
        (third, slice(4, 6)),
    ]
    assert [(c.start, c.context, c.known_length, c.behind) for c in batch.chunks] == [
        (0, 3, 3, 0),
        (7, 8, 8, 0),
        (2, 4, 13, 0),
    ]
    assert batch.output_rows == (2, 3)


def test_a_long_prompt_is_cut_into_parts_that_follow_each_other(config: ModelConfig) -> None:
    (cache,) = _caches(config, 5)
    first, second, third = Batch.of([(cache, list(range(10)), 0)]).split(3)
    assert [part.token_ids_T.tolist() for part in (first, second, third)] == [
        [0, 1, 2],
        [3, 4, 5],
        [6, 7, 8, 9],
    ]
    chunks = [chunk for part in (first, second, third) for chunk in part.chunks]
    assert [(c.rows, c.behind, c.start, c.context, c.known_length) for c in chunks] == [
        (slice(0, 3), 0, 5, 8, 15),
        (slice(0, 3), 3, 8, 11, 15),
        (slice(0, 4), 6, 11, 15, 15),
    ]
    assert {id(c.cache) for c in chunks} == {id(cache)}
    assert [part.output_rows for part in (first, second, third)] == [(), (), (3,)]


def test_sequences_are_kept_whole_where_the_cut_falls_between_them(config: ModelConfig) -> None:
    caches = _caches(config, 4, 8, 1, 3)
    batch = Batch.of([(cache, [number], 0) for number, cache in enumerate(caches)])
    first, second = batch.split(2)
    assert [c.cache for c in first.chunks] == caches[:2]
    assert [c.cache for c in second.chunks] == caches[2:]
    assert [c.rows for c in second.chunks] == [slice(0, 1), slice(1, 2)]
    assert first.output_rows == second.output_rows == (0, 1)


def test_a_cut_inside_the_second_of_two_sequences(config: ModelConfig) -> None:
    one, two = _caches(config, 6, 2)
    first, second = Batch.of([(one, [9], 0), (two, [1, 2, 3, 4, 5], 3)]).split(2)
    assert [(c.cache, c.rows, c.behind) for c in first.chunks] == [
        (one, slice(0, 1), 0),
        (two, slice(1, 3), 0),
    ]
    assert [(c.cache, c.rows, c.behind, c.start) for c in second.chunks] == [
        (two, slice(0, 3), 2, 4)
    ]
    assert (first.output_rows, second.output_rows) == ((0,), ())


def test_a_part_that_was_cut_can_be_cut_again(config: ModelConfig) -> None:
    (cache,) = _caches(config, 1)
    _, second = Batch.of([(cache, list(range(8)), 0)]).split(2)
    third, fourth = second.split(2)
    assert [(c.behind, c.start) for part in (third, fourth) for c in part.chunks] == [
        (4, 5),
        (6, 7),
    ]
    assert fourth.output_rows == (1,)


def test_there_are_no_more_parts_than_rows(config: ModelConfig) -> None:
    (cache,) = _caches(config, 0)
    parts = Batch.of([(cache, [1, 2, 3], 0)]).split(9)
    assert [part.token_ids_T.tolist() for part in parts] == [[1], [2], [3]]


def test_one_part_is_the_whole(config: ModelConfig) -> None:
    batch = Batch.of([(cache, [1, 2], 0) for cache in _caches(config, 3, 0)])
    (part,) = batch.split(1)
    assert torch.equal(part.token_ids_T, batch.token_ids_T)
    assert (part.chunks, part.output_rows) == (batch.chunks, batch.output_rows)


@given(
    lengths=st.lists(st.tuples(st.integers(1, 12), st.integers(0, 9), st.booleans()), min_size=1),
    parts=st.integers(1, 9),
)
def test_the_parts_are_the_batch_in_order(
    config: ModelConfig, lengths: list[tuple[int, int, bool]], parts: int
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
    assert [row for part in cut for row in seen(part)] == seen(batch)
    sizes = [len(part.token_ids_T) for part in cut]
    assert len(cut) == min(parts, len(batch.token_ids_T))
    assert max(sizes) - min(sizes) <= 1
    for part in cut:
        # Chunks cover the rows without a gap, and a part's last row sees what it saw in the whole.
        assert [c.rows.start for c in part.chunks] == [0, *[c.rows.stop for c in part.chunks[:-1]]]
        assert part.chunks[-1].rows.stop == len(part.token_ids_T)
        assert all(c.context == c.start + c.tokens for c in part.chunks)
    logits = [row for part in cut for row in part.output_rows]
    assert len(logits) == len(batch.output_rows)


def test_laying_out_and_cutting_a_batch_counts_nothing(config: ModelConfig) -> None:
    one, two = _caches(config, 6, 2)
    batch = Batch.of([(one, [9], 0), (two, [1, 2, 3, 4, 5], 3)])
    batch.split(3)
    assert (one.length, two.length) == (6, 2)


def test_guesses_are_rows_of_their_own_that_see_what_decoding_alone_would(
    config: ModelConfig,
) -> None:
    one, two = _caches(config, 6, 2)
    batch = Batch.of([Take(one, [9, 4, 7], 0, drafts=2), Take(two, [1, 2], 3)])
    assert [(c.cache, c.rows, c.start, c.context, c.known_length) for c in batch.chunks] == [
        (one, slice(0, 1), 6, 7, 7),
        (one, slice(1, 2), 7, 8, 8),
        (one, slice(2, 3), 8, 9, 9),
        (two, slice(3, 5), 2, 4, 7),
    ]
    assert batch.output_rows == (0, 1, 2)


def test_rows_that_are_read_are_counted_from_the_first_of_their_sequence(
    config: ModelConfig,
) -> None:
    one, two, three = _caches(config, 6, 2, 0)
    taken = [Take(one, [9], 0), Take(two, [1, 2, 3], 2, read=range(1, 3))]
    batch = Batch.of([*taken, Take(three, [5, 6], 0, read=range(1, 2), logits=False)])
    assert (batch.output_rows, batch.read_rows) == ((0,), (2, 3, 5))
    assert [part.read_rows for part in batch.split(2)] == [(2,), (0, 2)]
