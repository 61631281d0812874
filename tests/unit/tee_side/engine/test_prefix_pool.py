"""Whose keys and values are found again, how many of them, and which go first."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from protocol.model.config import ModelConfig, read_config
from tee_side.engine.prefix_pool import PrefixPool
from tee_side.model.kv_cache import KVCache, kv_bytes
from tests.kit.model import Models

MINE = ("me", "")
IDS = list(range(100, 140))


@pytest.fixture(scope="module")
def config(saved_model: Models) -> ModelConfig:
    return read_config(saved_model("llama").directory)


def _cache(config: ModelConfig, ids: Sequence[int] = ()) -> KVCache:
    """Return a cache whose keys say which tokens they are of."""
    cache = KVCache(config, 60, torch.float32)
    if ids:
        shape = (len(ids), config.num_key_value_heads, config.head_dim)
        rows = torch.tensor(ids, dtype=torch.float32)[:, None, None].expand(shape).contiguous()
        for layer in range(config.num_hidden_layers):
            cache.append(layer, rows, rows + 0.5)
        cache.commit(len(ids))
    return cache


def _kept(pool: PrefixPool, config: ModelConfig, *texts: Sequence[int]) -> list[KVCache]:
    caches = [_cache(config, ids) for ids in texts]
    for ids, cache in zip(texts, caches, strict=True):
        pool.keep(MINE, [*ids, 7], cache)  # the last token is never in a cache
    return caches


def _bytes(config: ModelConfig, tokens: int) -> int:
    return kv_bytes(config, tokens, torch.float32)


def test_nothing_is_found_of_another_owner_or_salt(config: ModelConfig) -> None:
    pool, cache = PrefixPool(), _cache(config)
    _kept(pool, config, IDS)
    for other in (("you", ""), ("me", "salt"), ("", "me"), ("", "")):
        assert pool.fill(other, IDS, cache) == cache.length == 0
        # Nor does what another says take the place of mine.
        pool.keep(other, [*IDS, 1], _cache(config, [*IDS, 1]))
    assert pool.fill(MINE, [*IDS, 1, 2], cache) == 40


def test_room_is_made_by_the_least_recently_used(config: ModelConfig) -> None:
    pool = PrefixPool()
    texts = [[number, *IDS[:19]] for number in range(4)]
    caches = _kept(pool, config, *texts)
    pool.fill(MINE, [*texts[0], 9], _cache(config))  # now the most recently used
    for needed, kept in ((0, "1111"), (_bytes(config, 20) + 1, "1001"), (1, "1000")):
        pool.make_room(needed)
        assert "".join(str(int(cache.nbytes > 0)) for cache in caches) == kept
    pool.make_room(2**62)
    assert pool.nbytes == sum(cache.nbytes for cache in caches) == 0
