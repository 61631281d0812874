"""The KV cache counts what was committed and forgets what was not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from protocol.errors import PromptError
from protocol.model.config import ModelConfig, read_config
from tee_side.kv_cache import KVCache
from tests.support import SavedModel


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
    with pytest.raises(PromptError, match="no memory for 1000000000000 tokens"):
        KVCache(config, 10**12, torch.float32)
