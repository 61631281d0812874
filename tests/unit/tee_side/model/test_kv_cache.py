"""The KV cache counts what was committed and forgets what was not."""

from __future__ import annotations

import mmap
import weakref

import pytest
import torch

from protocol.model.config import ModelConfig, read_config
from tee_side.model import kv_cache
from tee_side.model.kv_cache import KVCache, kv_bytes
from tests.kit.model import Models


@pytest.fixture(scope="module")
def config(saved_model: Models) -> ModelConfig:
    return read_config(saved_model("llama").directory)


def _rows(count: int, seed: int) -> torch.Tensor:
    return torch.randn(count, 2, 16, generator=torch.Generator().manual_seed(seed))


def test_what_was_committed_stays_and_the_rest_is_written_over(config: ModelConfig) -> None:
    """Layer by layer, and as views of the cache."""
    cache = KVCache(config, 10, torch.float32)
    first, lost, second = _rows(3, 0), _rows(4, 1), _rows(2, 2)
    for layer in range(3):
        cache.append(layer, first + layer, -first)
    cache.commit(3)
    before, _ = cache.append(1, lost, lost)
    assert cache.length == 3
    for layer in range(3):
        keys, values = cache.append(layer, second, -second)
        assert torch.equal(keys, torch.cat((first + layer, second)).transpose(0, 1))
        assert torch.equal(values, -torch.cat((first, second)).transpose(0, 1))
        assert (keys.data_ptr() == before.data_ptr()) == (layer == 1)


def test_rows_behind_others_that_are_not_there_yet_are_refused(config: ModelConfig) -> None:
    """It would look at keys that nobody has written, which look like any others."""
    cache = KVCache(config, 10, torch.float32)

    def append(layer: int, count: int, behind: int, most: int | None = None) -> None:
        if most is None:
            cache.append(layer, _rows(count, 0), _rows(count, 0), behind=behind)
            return
        with pytest.raises(IndexError, match=f"behind {behind} others, expected at most {most}"):
            cache.append(layer, _rows(count, 0), _rows(count, 0), behind=behind)

    append(0, 1, behind=3, most=0)
    append(0, 3, behind=0)
    append(1, 1, behind=3, most=0)  # of another layer
    append(0, 1, behind=4, most=3)
    append(0, 4, behind=3)
    # It failed. Repeated, its first part is shorter, and what is behind it is the old step's.
    append(0, 2, behind=0)
    append(0, 1, behind=3, most=2)
    cache.begin_step()
    append(0, 1, behind=1, most=0)
    # What was committed is nothing to stand behind.
    for layer in range(3):
        append(layer, 3, behind=0)
    cache.commit(3)
    append(0, 1, behind=1, most=0)


def test_a_full_cache_refuses_more_rows(config: ModelConfig) -> None:
    """One row is the dangerous case: assigned to an empty slice, torch would drop it silently."""
    cache, full = KVCache(config, 4, torch.float32), _rows(4, 0)
    cache.append(0, full, full)
    refused = pytest.raises(IndexError, match="got 5 tokens, expected at most 4")
    with refused:
        cache.append(0, _rows(1, 1), _rows(1, 1), behind=4)
    cache.commit(4)
    with refused:
        cache.append(0, _rows(1, 1), _rows(1, 1))


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
    monkeypatch.setattr(kv_cache.mmap, "mmap", Watched)
    cache = KVCache(config, 10, torch.bfloat16)
    assert (
        cache.nbytes
        == kv_bytes(config, 10, torch.bfloat16)
        == sum(sizes)
        == 2 * 3 * 2 * 10 * 16 * 2
    )
    rows = _rows(10, 0).to(torch.bfloat16)
    views = [cache.append(layer, rows, rows) for layer in range(3)]
    cache.commit(10)
    cache.release()
    assert (cache.length, cache.nbytes) == (10, 0)
    with pytest.raises(IndexError):
        cache.append(0, rows, rows)
    assert [one() is None for one in made] == [False, False]
    del views
    assert [one() is None for one in made] == [True, True]
