"""A small step runs on one thread; whole matrices get all of them; nobody else notices."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from tee_side import functional
from tee_side.local_operators import LocalOperators
from tee_side.threads import ONE_THREAD_ROWS, threads
from tests.support import SavedModel, assemble, token_ids

Models = Callable[..., SavedModel]


@pytest.fixture(autouse=True)
def three() -> Iterator[None]:
    """Three threads, whatever the machine has, and what was there before afterwards."""
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


def test_inside_the_block_there_are_as_many_as_it_says() -> None:
    with threads(1):
        assert torch.get_num_threads() == 1
        with threads(2):
            assert torch.get_num_threads() == 2
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == 3


def test_an_error_leaves_the_block_as_it_was_found() -> None:
    with pytest.raises(KeyError), threads(1):
        raise KeyError
    assert torch.get_num_threads() == 3


def test_a_block_that_is_entered_twice_finds_what_was_there_each_time() -> None:
    block = threads(1)
    for outside in (3, 2):
        torch.set_num_threads(outside)
        with block:
            assert torch.get_num_threads() == 1
        assert torch.get_num_threads() == outside


def _noting(monkeypatch: pytest.MonkeyPatch) -> dict[str, set[int]]:
    """Note with how many threads light operators and the weights' own products are computed."""
    found: dict[str, set[int]] = {"light": set(), "weights": set()}
    rms_norm = functional.rms_norm

    def light(*arguments: Any) -> torch.Tensor:
        found["light"].add(torch.get_num_threads())
        return rms_norm(*arguments)

    def product(inner: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            found["weights"].add(torch.get_num_threads())
            return inner(*arguments)

        return call

    init = LocalOperators.__init__

    def noted(self: LocalOperators, *arguments: Any, **settings: Any) -> None:
        init(self, *arguments, **settings)
        self._products = {site: product(inner) for site, inner in self._products.items()}
        self._lm_head = product(self._lm_head) if self._lm_head is not None else None

    monkeypatch.setattr(functional, "rms_norm", light)
    monkeypatch.setattr(LocalOperators, "__init__", noted)
    return found


@pytest.mark.parametrize(
    ("rows", "light"), [(1, 1), (ONE_THREAD_ROWS, 1), (ONE_THREAD_ROWS + 1, 3)]
)
@pytest.mark.parametrize("policy", ["tee-only", "shielded"])
def test_a_small_step_leaves_threads_to_the_weights(
    saved_model: Models, policy: str, rows: int, light: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = _noting(monkeypatch)
    tee = saved_model("llama").tee(policy)
    for seen in found.values():
        seen.clear()  # of making the calibration
    tee.logits(token_ids(rows))
    assert found == {"light": {light}, "weights": {3}}
    assert torch.get_num_threads() == 3


def test_a_step_that_fails_gives_the_threads_back(
    saved_model: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    tee = assemble(saved_model("llama").directory)

    def fail(*_: object) -> torch.Tensor:
        raise MemoryError

    monkeypatch.setattr(functional, "rms_norm", fail)
    with pytest.raises(MemoryError):
        tee.logits(token_ids(2))
    assert torch.get_num_threads() == 3


def test_the_number_of_threads_does_not_change_a_result(saved_model: Models) -> None:
    """Of a model whose products are large enough to be divided."""
    model = saved_model("llama", hidden_size=768, intermediate_size=1536, num_hidden_layers=1)
    few = model.tee("shielded").logits(token_ids(4))
    with threads(1):
        one = model.tee("shielded").logits(token_ids(4))
    assert torch.equal(few, one)
