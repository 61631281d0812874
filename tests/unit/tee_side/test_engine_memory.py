"""What the engine says of its memory, where sequences end together and another thread asks."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tee_side.engine.engine import Engine, EngineSettings
from tee_side.engine.prefix_pool import MIN_TOKENS, PrefixPool
from tee_side.engine.request import Request
from tee_side.model.kv_cache import KVCache
from tests.kit.model import SavedModel, Tee, assemble, token_ids

Models = Callable[..., SavedModel]


@pytest.fixture(scope="module")
def tee(saved_model: Models) -> Tee:
    return assemble(saved_model("llama").directory)


@pytest.mark.parametrize("samples", [1, 2, 3, 6])
def test_memory_comes_back_when_all_samples_end_in_one_step(tee: Tee, samples: int) -> None:
    engine = Engine(tee.model, tee.lanes, EngineSettings())
    engine.admit(Request(prompt_ids=tuple(token_ids(6)), max_new_tokens=3, samples=samples))
    assert engine.kv_bytes > 0
    while engine.running:
        engine.step()
    assert engine.kv_bytes == 0


def test_prefixes_may_change_while_their_memory_is_counted(tee: Tee) -> None:
    pool = PrefixPool()

    class Changing(KVCache):
        """Has another thread keep another cache while its size is asked for."""

        watched: bool

        @property
        def nbytes(self) -> int:
            if self.watched:
                self.watched = False
                pool.keep(("another", ""), range(MIN_TOKENS), _filled(tee, KVCache))
            return self.size

        @nbytes.setter
        def nbytes(self, size: int) -> None:
            self.size = size
            self.watched = False

    changing = _filled(tee, Changing)
    pool.keep(("one", ""), range(MIN_TOKENS), changing)
    pool.keep(("other", ""), range(MIN_TOKENS), _filled(tee, KVCache))
    changing.watched = True  # type: ignore[attr-defined]
    assert pool.nbytes == 2 * changing.nbytes > 0
    assert pool.nbytes == 3 * changing.nbytes


def _filled(tee: Tee, kind: type[KVCache]) -> KVCache:
    cache = kind(tee.model.config, MIN_TOKENS, tee.model.dtype)
    cache.length = MIN_TOKENS
    return cache
