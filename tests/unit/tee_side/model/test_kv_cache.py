"""The KV cache counts what was committed and forgets what was not."""

from __future__ import annotations

import errno
import mmap
import re
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import pytest
import torch

from protocol.errors import LimitError
from protocol.model.config import ModelConfig, read_config
from tee_side.model import kv_cache
from tee_side.model.kv_cache import KVCache, available_kv_bytes, kv_bytes
from tests.kit.model import SavedModel
from tests.kit.rows import each_row


@pytest.fixture(scope="module")
def config(saved_model: Callable[..., SavedModel]) -> ModelConfig:
    return read_config(saved_model("llama").directory)


def _rows(count: int, seed: int) -> torch.Tensor:
    return torch.randn(count, 2, 16, generator=torch.Generator().manual_seed(seed))


# ------------------------------------------------------------------------------- rows of a step


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


def test_a_step_in_parts_gives_what_one_at_once_does(config: ModelConfig) -> None:
    """Layer by layer, the later part behind the earlier, which sees what it saw before."""
    cut, whole = (KVCache(config, 10, torch.float32) for _ in range(2))
    for cache in (cut, whole):
        for layer in range(3):
            cache.append(layer, _rows(2, 9), _rows(2, 9))
        cache.commit(2)
    rows = _rows(5, 0)
    for layer in range(3):
        expected = whole.append(layer, rows + layer, -rows)
        first = cut.append(layer, rows[:3] + layer, -rows[:3])
        second = cut.append(layer, rows[3:] + layer, -rows[3:], behind=3)
        assert all(torch.equal(f, e[:, :5]) for f, e in zip(first, expected, strict=True))
        assert all(torch.equal(s, e) for s, e in zip(second, expected, strict=True))
    assert cut.length == 2
    cut.commit(5)
    keys, _ = cut.append(1, _rows(1, 3), _rows(1, 3))
    assert torch.equal(keys[:, 2:7], (rows + 1).transpose(0, 1))


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


@each_row("rows", [1, 2])
def test_a_full_cache_refuses_more_rows(config: ModelConfig, rows: int) -> None:
    """One row is the dangerous case: assigned to an empty slice, torch would drop it silently."""
    cache, full = KVCache(config, 4, torch.float32), _rows(4, 0)
    cache.append(0, full, full)
    refused = pytest.raises(IndexError, match=f"got {4 + rows} tokens, expected at most 4")
    with refused:
        cache.append(0, _rows(rows, 1), _rows(rows, 1), behind=4)
    cache.commit(4)
    with refused:
        cache.append(0, _rows(rows, 1), _rows(rows, 1))


# -------------------------------------------------------------------------------------- memory


def test_memory_that_the_machine_refuses_is_worth_retrying_where_it_has_as_much(
    config: ModelConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(LimitError) as caught:
        KVCache(config, 10**12, torch.float32)
    size = kv_bytes(config, 10**12, torch.float32) / 2**20
    assert caught.value.got == f"a request that needs {size:.1f} MiB for 1000000000000 tokens"
    assert re.search(r"of \d+\.\d MiB that it has", caught.value.where)
    assert re.search(r"less: \d+\.\d MiB are available", caught.value.expected)
    assert not caught.value.retryable

    def refuse(*_: object) -> NoReturn:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    monkeypatch.setattr("tee_side.model.kv_cache.mmap.mmap", refuse)
    with pytest.raises(LimitError) as caught:
        KVCache(config, 10, torch.float32)
    assert caught.value.retryable


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
    for dtype in (torch.float32, torch.bfloat16):
        cache = KVCache(config, 10, dtype)
        size = 2 * 3 * 2 * 10 * 16 * dtype.itemsize
        assert cache.nbytes == kv_bytes(config, 10, dtype) == sum(sizes) == size
        rows = _rows(10, 0).to(dtype)
        views = [cache.append(layer, rows, rows) for layer in range(3)]
        cache.commit(10)
        cache.release()
        assert (cache.length, cache.nbytes) == (10, 0)
        with pytest.raises(IndexError):
            cache.append(0, rows, rows)
        assert [one() is None for one in made] == [False, False]
        del views
        assert [one() is None for one in made] == [True, True]
        made.clear()
        sizes.clear()


def test_four_fifths_of_the_available_memory_are_for_keys_and_values(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of all memory, where nobody says what is available."""
    real, file = available_kv_bytes(), tmp_path / "meminfo"
    file.write_text("MemTotal:  999999 kB\nMemFree: 5 kB\nMemAvailable:    1000 kB\nCached: 1 kB\n")
    monkeypatch.setattr(kv_cache, "_MEMORY", file)
    assert available_kv_bytes() == 1000 * 1024 * 8 // 10
    file.unlink()
    assert available_kv_bytes() >= real > 0
