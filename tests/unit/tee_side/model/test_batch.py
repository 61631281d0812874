"""A flat batch and how it is cut; the KV cache counts what was committed, and no more."""

import errno
import mmap
import weakref
from pathlib import Path
from unittest.mock import Mock

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from protocol.errors import LimitError
from protocol.model.config import ModelConfig, read_config
from tee_side.model import batch as batch_module
from tee_side.model import local_ops
from tee_side.model.batch import Batch, Chunk, KVCache, Take, kv_bytes
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
        (c.cache, c.rows, c.start, c.tokens, c.known_length, c.behind) for c in batch.chunks
    ] == [
        (first, slice(0, 3), 0, 3, 3, 0),
        (second, slice(3, 4), 7, 1, 8, 0),
        (third, slice(4, 6), 2, 2, 13, 0),
    ]
    assert batch.output_rows == (2, 3)
    # Guesses are rows of their own, that see what decoding alone would.
    one, two = _caches(config, 6, 2)
    batch = Batch.of([Take(one, [9, 4, 7], 0, drafts=2), Take(two, [1, 2], 3)])
    assert [(c.cache, c.rows, c.start, c.tokens, c.known_length) for c in batch.chunks] == [
        (one, slice(0, 1), 6, 1, 7),
        (one, slice(1, 2), 7, 1, 8),
        (one, slice(2, 3), 8, 1, 9),
        (two, slice(3, 5), 2, 2, 7),
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


def _rows(count: int, seed: int) -> torch.Tensor:
    return torch.randn(count, 2, 16, generator=torch.Generator().manual_seed(seed))


def _append(cache: KVCache, layer: int, k_TKC: torch.Tensor, *, behind: int = 0) -> None:
    rows = slice(0, len(k_TKC))
    batch = Batch(torch.empty(0), (Chunk(cache, rows, 0, behind),), ())
    cache.reserve(layer, len(k_TKC), behind)
    local_ops.append(k_TKC, -k_TKC, batch, layer)


def test_what_was_committed_stays_and_the_rest_is_written_over(config: ModelConfig) -> None:
    """Layer by layer, and as views of the cache; another one begins with it."""
    cache, other = (KVCache(config, 10, torch.float32) for _ in range(2))
    first, lost, second = _rows(3, 0), _rows(4, 1), _rows(2, 2)
    for layer in range(3):
        _append(cache, layer, first + layer)
    cache.commit(3)
    _append(cache, 1, lost)
    before, _ = cache.up_to(1, 7)
    assert cache.length == 3
    for layer in range(3):
        _append(cache, layer, second)
        keys, values = cache.up_to(layer, 5)
        assert torch.equal(keys, torch.cat((first + layer, second)).transpose(0, 1))
        assert torch.equal(values, -keys)
        assert (keys.data_ptr() == before.data_ptr()) == (layer == 1)
    other.copy_from(cache, 2)
    assert [other.up_to(layer, 10)[0][:, 1:].any() for layer in range(3)] == [True] * 3
    assert all(torch.equal(other.up_to(n, 2)[1], cache.up_to(n, 2)[1]) for n in range(3))
    assert not any(x_LKSC[:, :, 2:].any() for x_LKSC in other.memory)
    # One that has ended meanwhile begins with nothing.
    other.release()
    other.copy_from(cache, 2)
    assert (other.length, other.memory) == (2, ())


def test_rows_behind_others_that_are_not_there_yet_are_refused(config: ModelConfig) -> None:
    """It would look at keys that nobody has written, which look like any others."""
    cache = KVCache(config, 10, torch.float32)

    def reserve(layer: int, count: int, behind: int, most: int | None = None) -> None:
        if most is None:
            cache.reserve(layer, count, behind)
            return
        with pytest.raises(IndexError, match=f"behind {behind} others, expected at most {most}"):
            cache.reserve(layer, count, behind)

    reserve(0, 1, behind=3, most=0)
    reserve(0, 3, behind=0)
    reserve(1, 1, behind=3, most=0)  # of another layer
    reserve(0, 1, behind=4, most=3)
    reserve(0, 4, behind=3)
    # It failed. Repeated, its first part is shorter, and what is behind it is the old step's.
    reserve(0, 2, behind=0)
    reserve(0, 1, behind=3, most=2)
    cache.begin_step()
    reserve(0, 1, behind=1, most=0)
    # What was committed is nothing to stand behind.
    for layer in range(3):
        reserve(layer, 3, behind=0)
    cache.commit(3)
    reserve(0, 1, behind=1, most=0)


def test_a_full_cache_refuses_more_rows(config: ModelConfig) -> None:
    """One row is the dangerous case: assigned to an empty slice, torch would drop it silently."""
    cache = KVCache(config, 4, torch.float32)
    cache.reserve(0, 4)
    refused = pytest.raises(IndexError, match="got 5 tokens, expected at most 4")
    with refused:
        cache.reserve(0, 1, behind=4)
    cache.commit(4)
    with refused:
        cache.reserve(0, 1)


def test_memory_that_the_machine_refuses_is_a_limit(
    config: ModelConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it could have at another time is worth a retry."""

    def refused(capacity: int) -> bool:
        with pytest.raises(LimitError, match="KV memory, which the machine refuses") as caught:
            KVCache(config, capacity, torch.float32)
        return caught.value.retryable

    assert [refused(10**12), refused(10**18)] == [False, False]
    full = Mock(side_effect=OSError(errno.ENOMEM, "Cannot allocate memory"))
    monkeypatch.setattr(batch_module.mmap, "mmap", full)
    assert refused(10)


def test_four_fifths_of_what_is_available_are_for_keys_and_values(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch_module, "_MEMORY", tmp_path / "meminfo")
    (tmp_path / "meminfo").write_text("MemTotal:  9000 kB\nMemAvailable:  1000 kB\n")
    assert batch_module.available_kv_bytes() == 800 * 1024
    (tmp_path / "meminfo").write_text("MemTotal:  9000 kB\n")
    assert batch_module.available_kv_bytes() == int(batch_module._machine_bytes() * 0.8)


def test_its_memory_is_its_own_and_goes_with_the_last_view(
    config: ModelConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its size is known before it is made. On the heap, caches that come and go leave holes."""
    made: list[weakref.ref[mmap.mmap]] = []

    class Watched(mmap.mmap):
        def __init__(self, _descriptor: int, size: int, *_: object) -> None:
            made.append(weakref.ref(self))
            sizes.append(size)

    sizes: list[int] = []
    monkeypatch.setattr(batch_module.mmap, "mmap", Watched)
    cache = KVCache(config, 10, torch.bfloat16)
    assert cache.nbytes == kv_bytes(config, 10, torch.bfloat16) == sum(sizes) == 3840
    views = [cache.up_to(layer, 10) for layer in range(3)]
    cache.commit(10)
    cache.release()
    assert (cache.length, cache.nbytes) == (10, 0)
    with pytest.raises(IndexError):
        cache.reserve(0, 0)
    assert [one() is None for one in made] == [False, False]
    del views
    assert [one() is None for one in made] == [True, True]
