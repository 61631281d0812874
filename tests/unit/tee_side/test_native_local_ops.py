"""Compiled local operators of every variant against torch's, which `test_local_ops` judges."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from protocol import native
from tee_side.model import local_ops
from tee_side.native import local_ops as compiled_ops
from tests.kit.kernels import KERNELS, using_kernels

# How far sums in another order may be apart, and one rounding more, relative to the largest value.
STEPS = {torch.float32: 4e-6, torch.bfloat16: 2**-7}

VARIANTS = [name for name in KERNELS if name != "torch"]
pytestmark = pytest.mark.skipif(not VARIANTS, reason="no compiler built the kernels")


@pytest.fixture(params=VARIANTS)
def variant(request: pytest.FixtureRequest) -> Iterator[str]:
    with using_kernels(request.param):
        yield request.param


def _random(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    return (2 * torch.randn(shape)).to(dtype)


def _near(found: torch.Tensor, right: torch.Tensor) -> bool:
    assert (found.shape, found.dtype) == (right.shape, right.dtype)
    bound = STEPS[right.dtype] * float(right.abs().max())
    return bool(((found.double() - right.double()).abs() <= bound).all())


@pytest.mark.parametrize("dtype", STEPS)
@pytest.mark.parametrize("features", [2, 30, 96, 1000])
def test_rows_are_those_of_torch(variant: str, dtype: torch.dtype, features: int) -> None:
    # A part of a fused product, whose rows are further apart than they are long.
    h, up = _random(dtype, 5, 2 * features + 6)[:, :-6].chunk(2, dim=1)
    gain = _random(dtype, features)
    assert _near(compiled_ops.rms_norm(h, gain, 1e-5), local_ops.rms_norm(h, gain, 1e-5))
    assert _near(compiled_ops.silu_mul(h, up), local_ops.silu_mul(h.clone(), up))
    heads = h.unflatten(1, (1, features))
    cos = _random(dtype, 5, 1, features // 2).repeat(1, 1, 2)
    sin = _random(dtype, 5, 1, features // 2)
    assert _near(compiled_ops.apply_rope(heads, cos, sin), local_ops.apply_rope(heads, cos, sin))
    stream = h.contiguous()
    right = stream + up
    assert compiled_ops.residual(stream, up) is stream
    assert torch.equal(stream, right)


@pytest.mark.each_value
@pytest.mark.parametrize("dtype", STEPS)
@pytest.mark.parametrize("shape", [(6, 2, 16), (8, 1, 40), (4, 4, 18), (2, 2, 64)])
@pytest.mark.parametrize("window", [None, 1, 70, 600])
@pytest.mark.parametrize("context", [1, 64, 65, 512, 513, 1100])
@pytest.mark.parametrize("tokens", [1, 3, 17, 130])
def test_attention_is_that_of_torch(
    variant: str, tokens: int, context: int, window: int | None, shape: Any, dtype: torch.dtype
) -> None:
    (heads, shared, size), context = shape, max(context, tokens)
    q = _random(dtype, tokens, heads, size)
    k, v = _random(dtype, 2, shared, context + 9, size)[:, :, :context].unbind(0)
    found = compiled_ops.attention(q, k, v, window)
    assert _near(found, local_ops.attention(q, k, v, window))
    # A row's bits do not depend on the rows before it in its chunk, nor on threads.
    last = compiled_ops.attention(q[-1:], k, v, window)
    assert torch.equal(last, found[-1:])
    native.set_threads(3)
    try:
        assert torch.equal(compiled_ops.attention(q, k, v, window), found)
    finally:
        native.set_threads(1)


@pytest.mark.parametrize("dtype", STEPS)
@pytest.mark.parametrize("context", [5, 700])
@pytest.mark.parametrize("broken", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_is_not_hidden(
    variant: str, broken: float, context: int, dtype: torch.dtype
) -> None:
    q = _random(dtype, 2, 2, 16)
    k, v = _random(dtype, 2, 2, context, 16).unbind(0)
    # One row's query: none of its scores is a number. One key: of its segment, one score is none.
    q[0, 0, 3] = broken
    k[1, 0] = torch.nan
    found = compiled_ops.attention(q, k, v, None).unflatten(1, (2, 16))
    assert found[0, 0].isnan().all()
    assert found[1, 0].isfinite().all()
    assert found[:, 1].isnan().all()


def test_keys_are_written_where_they_belong(variant: str) -> None:
    for dtype in STEPS:
        cache, rows = torch.zeros(2, 9, 6, dtype=dtype), _random(dtype, 3, 2 * 6 + 4)
        x = rows[:, :12].unflatten(1, (2, 6))
        compiled_ops.append(x, cache, 4)
        right = torch.zeros_like(cache)
        right[:, 4:7] = x.transpose(0, 1)
        assert torch.equal(cache, right)
