"""A small step runs on one thread; whole matrices get all of them; nobody else notices."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from protocol.model.config import read_config
from tee_side import threads as module
from tee_side.engine import step
from tee_side.model import local_operators, local_ops
from tee_side.model.layers import Layer, LayerNorms
from tee_side.policy.placement import load_policy
from tee_side.protect.masks.mask import Masked
from tee_side.protect.masks.pad import Pad
from tee_side.protect.sites import IntegerSite
from tee_side.remote.linear import CallSettings
from tee_side.remote.overlap import run
from tee_side.threads import (
    LARGE_ATTENTION,
    LARGE_FACTOR,
    LARGE_TENSOR,
    TorchThreads,
    large_tensor,
)
from tests.support import SavedModel, assemble, token_ids
from tsqp.lab.research import operators
from tsqp.lab.research.operators import product_here

Models = Callable[..., SavedModel]


@pytest.fixture(autouse=True)
def three() -> Iterator[None]:
    """Three threads, whatever the machine has, and what was there before afterwards."""
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


def test_inside_the_block_there_are_as_many_as_it_says() -> None:
    with TorchThreads(1):
        assert torch.get_num_threads() == 1
        with TorchThreads(2):
            assert torch.get_num_threads() == 2
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == 3


def test_an_error_leaves_the_block_as_it_was_found() -> None:
    with pytest.raises(KeyError), TorchThreads(1):
        raise KeyError
    assert torch.get_num_threads() == 3


def test_a_block_that_is_entered_twice_finds_what_was_there_each_time() -> None:
    block = TorchThreads(1)
    for outside in (3, 2):
        torch.set_num_threads(outside)
        with block:
            assert torch.get_num_threads() == 1
        assert torch.get_num_threads() == outside


def _noting(monkeypatch: pytest.MonkeyPatch) -> dict[str, set[int]]:
    """Note with how many threads light operators and the weights' own products are computed."""
    found: dict[str, set[int]] = {"light": set(), "weights": set()}
    rms_norm = local_ops.rms_norm

    def light(*arguments: Any, **bound: Any) -> torch.Tensor:
        found["light"].add(torch.get_num_threads())
        return rms_norm(*arguments, **bound)

    def product(inner: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            found["weights"].add(torch.get_num_threads())
            return inner(*arguments)

        return call

    bound = local_operators.with_all_threads
    monkeypatch.setattr(local_ops, "rms_norm", light)
    monkeypatch.setattr(
        local_operators, "with_all_threads", lambda compute: bound(product(compute))
    )
    return found


@pytest.mark.parametrize(("rows", "light"), [(1, 1), (16, 1), (17, 3)])
@pytest.mark.parametrize("policy", ["tee-only", "shielded"])
def test_a_small_step_leaves_threads_to_the_weights(
    saved_model: Models, policy: str, rows: int, light: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = _noting(monkeypatch)
    tee = saved_model("llama").tee(policy)
    monkeypatch.setattr(step, "ONE_THREAD_ELEMENTS", 16 * tee.model.config.hidden_size)
    for seen in found.values():
        seen.clear()  # of making the calibration
    tee.logits(token_ids(rows))
    assert found == {"light": {light}, "weights": {3}}
    assert torch.get_num_threads() == 3


@pytest.mark.parametrize(("elements", "count"), [(LARGE_TENSOR - 1, 1), (LARGE_TENSOR, 3)])
def test_passes_over_a_large_tensor_are_shared(elements: int, count: int) -> None:
    with TorchThreads(1):
        with large_tensor(elements, 3):
            assert torch.get_num_threads() == count
        assert torch.get_num_threads() == 1


@pytest.mark.parametrize(("elements", "count"), [(LARGE_FACTOR - 1, 1), (LARGE_FACTOR, 3)])
def test_products_with_a_tensor_are_shared_earlier(elements: int, count: int) -> None:
    with TorchThreads(1), large_tensor(elements, 3, heavy=True):
        assert torch.get_num_threads() == count


@pytest.mark.parametrize(("large", "count"), [(1, 3), (2**40, 1)])
@pytest.mark.parametrize("policy", ["row-mix", "tsqp-permuted", "float-noise"])
def test_masks_that_multiply_are_shared_as_products_are(
    saved_model: Models, policy: str, large: int, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also of attention's operands."""
    monkeypatch.setattr(module, "LARGE_FACTOR", large)
    found: set[int] = set()
    tee = saved_model("llama").tee(policy)
    mask = type(next(iter(load_policy(policy).masks)))
    for name in ("mask", "mask_product"):
        if not hasattr(mask, name):
            continue
        inner = getattr(mask, name)

        def noted(*arguments: Any, inner: Any = inner) -> Any:
            found.add(torch.get_num_threads())
            return inner(*arguments)

        monkeypatch.setattr(mask, name, noted)
    tee.logits(token_ids(2))
    assert found == {count}


@pytest.mark.parametrize(("threshold", "count"), [(1, 3), (2**40, 1)])
def test_which_passes_are_shared(
    saved_model: Models, threshold: int, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Exponentials, and all that hides and quantises."""
    monkeypatch.setattr(module, "LARGE_TENSOR", threshold)
    found: dict[str, set[int]] = {}

    def note(owner: Any, name: str) -> None:
        inner = getattr(owner, name)

        def noted(*arguments: Any) -> Any:
            found.setdefault(name, set()).add(torch.get_num_threads())
            return inner(*arguments)

        monkeypatch.setattr(owner, name, noted)

    note(local_ops, "silu_mul")
    note(operators, "softmax")
    note(IntegerSite, "encode")
    note(IntegerSite, "decode")
    note(Pad, "mask")
    mask = Pad.mask

    def noted_unmask(self: Pad, *arguments: Any) -> Masked:
        masked = mask(self, *arguments)

        def unmask(y_TO: torch.Tensor) -> torch.Tensor:
            found.setdefault("unmask", set()).add(torch.get_num_threads())
            return masked.unmask(y_TO)

        return replace(masked, unmask=unmask)

    monkeypatch.setattr(Pad, "mask", noted_unmask)
    tee = saved_model("llama").tee("shielded-prefill")
    sent_scores = saved_model("llama").tee("tsqp")
    found.clear()  # of making the calibration
    tee.logits(token_ids(1))
    sent_scores.logits(token_ids(2))
    names = ("silu_mul", "softmax", "encode", "decode", "mask", "unmask")
    assert found == {name: {count} for name in names}


# Rows, heads, head dim: so many keys are a large context for them.
ROW = (1, 32, 64)
KEYS = LARGE_ATTENTION // (32 * 64)


@pytest.mark.parametrize(
    ("rows", "keys", "window", "count"),
    [
        (1, KEYS - 1, None, 1),
        (1, KEYS, None, 3),
        (4, KEYS // 4, None, 3),
        (4, KEYS // 4 - 1, None, 1),
        # What is outside the window is not read.
        (1, 4 * KEYS, KEYS - 1, 1),
        (1, 4 * KEYS, KEYS, 3),
    ],
)
def test_attention_to_a_long_context_gets_all_threads(
    saved_model: Models,
    rows: int,
    keys: int,
    window: int | None,
    count: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found: list[int] = []
    monkeypatch.setattr(local_ops, "attention", lambda *_: found.append(torch.get_num_threads()))
    config = read_config(saved_model("llama").directory).model_copy(
        update={"sliding_windows": (window,)}
    )
    weight, q, k = torch.ones(1), torch.empty(rows, 32, 64), torch.empty(8, keys, 64)
    layer = Layer.of(0, LayerNorms(weight, weight), config, None)
    with TorchThreads(1):
        layer.attention(q, k, k)
        assert torch.get_num_threads() == 1
    layer.attention(q, k, k)  # in a large step, which has them anyway
    assert found == [count, 3]


async def _asked(call: Awaitable[torch.Tensor]) -> torch.Tensor:
    return await call


@pytest.mark.parametrize(("keys", "count"), [(KEYS - 1, 1), (KEYS, 3)])
def test_so_does_each_of_its_products_alone(
    keys: int, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a policy keeps one of them here."""
    found: list[int] = []
    matmul = torch.matmul

    def noted(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        found.append(torch.get_num_threads())
        return matmul(a, b)

    monkeypatch.setattr(torch, "matmul", noted)
    settings = CallSettings(lambda _layer: [], None, None, 3)
    q, k, p = torch.ones(8, 4, 64), torch.ones(8, keys, 64), torch.ones(8, 4, keys)
    with TorchThreads(1):
        assert run(_asked(product_here("attn_scores", 0, settings)((q, k.mT)))).shape == p.shape
        assert run(_asked(product_here("attn_values", 0, settings)((p, k)))).shape == q.shape
    assert found == [count, count]


def test_the_rest_of_a_small_step_with_a_long_context_stays_on_one_thread(
    saved_model: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "LARGE_ATTENTION", 1)
    found, attended = _noting(monkeypatch), []
    tee = assemble(saved_model("llama").directory)
    attention = local_ops.attention

    def noted(*arguments: Any) -> torch.Tensor:
        attended.append(torch.get_num_threads())
        return attention(*arguments)

    monkeypatch.setattr(local_ops, "attention", noted)
    tee.logits(token_ids(2))
    assert set(attended) == {3}
    assert found["light"] == {1}


def test_a_step_that_fails_gives_the_threads_back(
    saved_model: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> torch.Tensor:
        raise MemoryError

    monkeypatch.setattr(local_ops, "rms_norm", fail)
    tee = assemble(saved_model("llama").directory)
    with pytest.raises(MemoryError):
        tee.logits(token_ids(2))
    assert torch.get_num_threads() == 3


def test_the_number_of_threads_does_not_change_a_result(saved_model: Models) -> None:
    """Of a model whose products are large enough to be divided."""
    model = saved_model("llama", hidden_size=768, intermediate_size=1536, num_hidden_layers=1)
    few = model.tee("shielded").logits(token_ids(4))
    with TorchThreads(1):
        one = model.tee("shielded").logits(token_ids(4))
    assert torch.equal(few, one)
