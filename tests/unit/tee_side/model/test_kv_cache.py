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


@pytest.fixture(scope="module")
def config(saved_model: Callable[..., SavedModel]) -> ModelConfig:
    return read_config(saved_model("llama").directory)


def _rows(count: int, seed: int) -> torch.Tensor:
    return torch.randn(count, 2, 16, generator=torch.Generator().manual_seed(seed))


def test_appended_rows_come_back_per_head_behind_what_is_there(config: ModelConfig) -> None:
    cache = KVCache(config, 10, torch.float32)
    first, second = _rows(3, 0), _rows(2, 1)
    for layer in range(3):
        cache.append(layer, first + layer, -first)
    cache.commit(3)
    keys, values = cache.append(1, second, -second)
    assert torch.equal(keys, torch.cat((first + 1, second)).transpose(0, 1))
    assert torch.equal(values, -torch.cat((first, second)).transpose(0, 1))


def test_rows_that_were_not_committed_are_written_over(config: ModelConfig) -> None:
    cache = KVCache(config, 10, torch.float32)
    cache.append(0, _rows(4, 0), _rows(4, 0))
    again = _rows(2, 1)
    keys, values = cache.append(0, again, again)
    assert cache.length == 0
    assert torch.equal(keys, again.transpose(0, 1))
    assert torch.equal(values, again.transpose(0, 1))


def test_layers_do_not_share_rows(config: ModelConfig) -> None:
    cache = KVCache(config, 2, torch.float32)
    for layer in range(3):
        cache.append(layer, torch.full((2, 2, 16), float(layer)), torch.zeros(2, 2, 16))
    cache.commit(1)
    assert [
        float(cache.append(layer, _rows(1, 0), _rows(1, 0))[0][0, 0, 0]) for layer in range(3)
    ] == [0.0, 1.0, 2.0]


def test_what_append_returns_views_the_cache_and_is_not_a_copy(config: ModelConfig) -> None:
    cache = KVCache(config, 4, torch.float32)
    keys, _ = cache.append(0, _rows(2, 0), _rows(2, 0))
    again, _ = cache.append(0, _rows(3, 1), _rows(3, 1))
    assert keys.data_ptr() == again.data_ptr()


@pytest.mark.parametrize("rows", [1, 2])
def test_a_full_cache_refuses_more_rows(config: ModelConfig, rows: int) -> None:
    """One row is the dangerous case: assigned to an empty slice, torch would drop it silently."""
    cache = KVCache(config, 2, torch.float32)
    cache.append(0, _rows(2, 0), _rows(2, 0))
    cache.commit(2)
    with pytest.raises(IndexError):
        cache.append(0, _rows(rows, 1), _rows(rows, 1))


def test_more_than_the_machine_has_is_refused(config: ModelConfig) -> None:
    with pytest.raises(LimitError) as caught:
        KVCache(config, 10**12, torch.float32)
    size = kv_bytes(config, 10**12, torch.float32) / 2**20
    assert caught.value.got == f"a request that needs {size:.1f} MiB for 1000000000000 tokens"
    assert re.search(r"of \d+\.\d MiB that it has", caught.value.where)
    assert re.search(r"less: \d+\.\d MiB are available", caught.value.expected)
    assert not caught.value.retryable


def test_what_the_machine_could_have_is_worth_retrying(
    config: ModelConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> NoReturn:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    monkeypatch.setattr("tee_side.model.kv_cache.mmap.mmap", refuse)
    with pytest.raises(LimitError) as caught:
        KVCache(config, 10, torch.float32)
    assert caught.value.retryable


@pytest.mark.parametrize(("dtype", "size"), [(torch.float32, 4), (torch.bfloat16, 2)])
def test_its_size_is_known_before_it_is_made(
    config: ModelConfig, dtype: torch.dtype, size: int
) -> None:
    assert kv_bytes(config, 10, dtype) == 2 * 3 * 2 * 10 * 16 * size
    cache = KVCache(config, 10, dtype)
    keys, values = cache.append(0, _rows(10, 0).to(dtype), _rows(10, 0).to(dtype))
    assert cache.nbytes == kv_bytes(config, 10, dtype) == 3 * (keys.nbytes + values.nbytes)


def test_its_memory_is_its_own_and_goes_with_the_last_view(
    config: ModelConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the heap, caches that come and go leave holes."""
    made: list[weakref.ref[mmap.mmap]] = []

    class Watched(mmap.mmap):
        def __init__(self, *_: object) -> None:
            made.append(weakref.ref(self))

    monkeypatch.setattr(kv_cache.mmap, "mmap", Watched)
    cache = KVCache(config, 10, torch.float32)
    views = [cache.append(layer, _rows(10, 0), _rows(10, 1)) for layer in range(3)]
    pages = [one() for one in made]
    assert sum(len(one) for one in pages if one is not None) == cache.nbytes
    start = torch.frombuffer(pages[0], dtype=torch.float32).data_ptr()  # type: ignore[arg-type]
    assert views[0][0].data_ptr() == start
    del pages
    cache.release()
    assert [one() is None for one in made] == [False, False]
    del views
    assert [one() is None for one in made] == [True, True]


def test_released_it_keeps_its_length_and_no_memory(config: ModelConfig) -> None:
    cache = KVCache(config, 10, torch.float32)
    for layer in range(3):
        cache.append(layer, _rows(4, 0), _rows(4, 0))
    cache.commit(4)
    cache.release()
    assert (cache.length, cache.nbytes) == (4, 0)
    with pytest.raises(IndexError):
        cache.append(0, _rows(1, 0), _rows(1, 0))


def test_four_fifths_of_the_available_memory_are_for_keys_and_values(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "meminfo"
    file.write_text("MemTotal:  999999 kB\nMemFree: 5 kB\nMemAvailable:    1000 kB\nCached: 1 kB\n")
    monkeypatch.setattr(kv_cache, "_MEMORY", file)
    assert available_kv_bytes() == 1000 * 1024 * 8 // 10


def test_where_nobody_says_what_is_available_it_is_of_all_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = available_kv_bytes()
    monkeypatch.setattr(kv_cache, "_MEMORY", tmp_path / "none")
    assert available_kv_bytes() >= real > 0


# ---------------------------------------------------------------- parts of one step in a row


def test_rows_behind_others_of_the_same_step_stand_behind_them(config: ModelConfig) -> None:
    """As a step that is cut in two does it: layer by layer, the later part behind the earlier."""
    cut, whole = (KVCache(config, 10, torch.float32) for _ in range(2))
    for cache in (cut, whole):
        for layer in range(3):
            cache.append(layer, _rows(2, 9), _rows(2, 9))
        cache.commit(2)
    rows = _rows(5, 0)
    for layer in range(3):
        expected = whole.append(layer, rows + layer, -rows)
        first = cut.append(layer, rows[:3] + layer, -rows[:3])
        assert all(torch.equal(f, e[:, :5]) for f, e in zip(first, expected, strict=True))
        second = cut.append(layer, rows[3:] + layer, -rows[3:], behind=3)
        assert all(torch.equal(s, e) for s, e in zip(second, expected, strict=True))
    assert cut.length == 2
    cut.commit(5)
    keys, _ = cut.append(1, _rows(1, 3), _rows(1, 3))
    assert torch.equal(keys[:, 2:7], (rows + 1).transpose(0, 1))


def test_what_the_earlier_part_sees_does_not_change_when_the_later_is_written(
    config: ModelConfig,
) -> None:
    cache = KVCache(config, 10, torch.float32)
    keys, values = cache.append(0, _rows(3, 0), _rows(3, 1))
    before = keys.clone(), values.clone()
    cache.append(0, _rows(4, 2), _rows(4, 3), behind=3)
    assert torch.equal(keys, before[0])
    assert torch.equal(values, before[1])


def test_rows_behind_others_that_are_not_there_yet_are_refused(config: ModelConfig) -> None:
    """Per layer: it would look at keys that nobody has written, which look like any others."""
    cache = KVCache(config, 10, torch.float32)
    with pytest.raises(IndexError, match="behind 3 others, expected at most 0"):
        cache.append(0, _rows(1, 0), _rows(1, 0), behind=3)
    cache.append(0, _rows(3, 0), _rows(3, 0))
    with pytest.raises(IndexError, match="behind 3 others, expected at most 0"):
        cache.append(1, _rows(1, 0), _rows(1, 0), behind=3)
    with pytest.raises(IndexError, match="behind 4 others, expected at most 3"):
        cache.append(0, _rows(1, 0), _rows(1, 0), behind=4)
    cache.append(0, _rows(1, 0), _rows(1, 0), behind=3)


def test_what_was_committed_is_nothing_to_stand_behind(config: ModelConfig) -> None:
    cache = KVCache(config, 10, torch.float32)
    for layer in range(3):
        cache.append(layer, _rows(3, 0), _rows(3, 0))
    cache.commit(3)
    with pytest.raises(IndexError, match="behind 1 others, expected at most 0"):
        cache.append(0, _rows(1, 0), _rows(1, 0), behind=1)


def test_a_step_that_is_repeated_stands_behind_its_own_rows(config: ModelConfig) -> None:
    cache = KVCache(config, 10, torch.float32)
    cache.append(0, _rows(3, 0), _rows(3, 0))
    cache.append(0, _rows(4, 1), _rows(4, 1), behind=3)
    # It failed. Repeated, its first part is shorter, and what is behind it is the old step's.
    cache.append(0, _rows(2, 2), _rows(2, 2))
    with pytest.raises(IndexError, match="behind 3 others, expected at most 2"):
        cache.append(0, _rows(1, 3), _rows(1, 3), behind=3)
    keys, _ = cache.append(0, _rows(1, 3), _rows(1, 3), behind=2)
    assert torch.equal(keys, torch.cat((_rows(2, 2), _rows(1, 3))).transpose(0, 1))


@pytest.mark.parametrize("rows", [1, 2])
def test_a_full_cache_refuses_rows_behind_others(config: ModelConfig, rows: int) -> None:
    cache = KVCache(config, 4, torch.float32)
    cache.append(0, _rows(4, 0), _rows(4, 0))
    with pytest.raises(IndexError, match=f"got {4 + rows} tokens, expected at most 4"):
        cache.append(0, _rows(rows, 1), _rows(rows, 1), behind=4)
