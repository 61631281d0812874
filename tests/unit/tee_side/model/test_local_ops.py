"""The light operators, against what their formulas say one number at a time."""

from __future__ import annotations

import cmath
import gc
import math

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from tee_side.model import local_ops
from tee_side.model.local_ops import (
    apply_rope,
    attention,
    causal_mask,
    residual,
    rms_norm,
    silu_mul,
)
from tests.kit.rows import each_row
from tsqp.lab.research.operators import softmax


def _random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def test_rms_norm_divides_each_row_by_its_root_mean_square() -> None:
    h, weight = _random(5, 12), _random(12, seed=1)
    expected = []
    for row in h.tolist():
        root = math.sqrt(sum(x * x for x in row) / 12 + 0.01)
        expected.append([x / root * w for x, w in zip(row, weight.tolist(), strict=True)])
    torch.testing.assert_close(rms_norm(h, weight, 0.01), torch.tensor(expected))


def test_rms_norm_keeps_epsilon_for_a_row_of_zeros() -> None:
    assert torch.equal(rms_norm(torch.zeros(1, 4), torch.ones(4), 1e-6), torch.zeros(1, 4))


def test_rms_norm_in_bfloat16_computes_in_float32_and_rounds_before_the_weight() -> None:
    h, weight = _random(7, 64).bfloat16(), _random(64, seed=1).bfloat16()
    inner = rms_norm(h.float(), torch.ones(64), 1e-6).bfloat16()
    actual = rms_norm(h, weight, 1e-6)
    assert actual.dtype == torch.bfloat16
    assert torch.equal(actual, weight * inner)


def test_rms_norm_of_values_whose_squares_overflow_float16_is_finite() -> None:
    h = torch.full((1, 8), 60000.0, dtype=torch.float16)
    torch.testing.assert_close(
        rms_norm(h, torch.ones(8, dtype=torch.float16), 1e-6),
        torch.ones(1, 8, dtype=torch.float16),
    )


def test_silu_mul_is_gate_times_its_sigmoid_times_up() -> None:
    gate, up = _random(3, 5), _random(3, 5, seed=1)
    expected = [
        [g / (1 + math.exp(-g)) * u for g, u in zip(gates, ups, strict=True)]
        for gates, ups in zip(gate.tolist(), up.tolist(), strict=True)
    ]
    before = up.clone()
    torch.testing.assert_close(silu_mul(gate, up), torch.tensor(expected))
    assert torch.equal(up, before)


def _cos_sin(angles_Tc: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what rotates by these angles, one a pair: cos [T, 1, C] and sin [T, 1, C / 2]."""
    return angles_Tc.repeat(1, 2).cos().unsqueeze(1), angles_Tc.sin().unsqueeze(1)


def test_rope_rotates_each_pair_of_halves_by_its_angle() -> None:
    tokens, heads, size = 4, 3, 8
    x, angles = _random(tokens, heads, size), _random(tokens, size // 2, seed=1)
    actual = apply_rope(x, *_cos_sin(angles))
    for t in range(tokens):
        for h in range(heads):
            for i in range(size // 2):
                pair = complex(x[t, h, i], x[t, h, i + size // 2])
                turned = pair * cmath.exp(1j * float(angles[t, i]))
                assert float(actual[t, h, i]) == pytest.approx(turned.real, abs=1e-5)
                assert float(actual[t, h, i + size // 2]) == pytest.approx(turned.imag, abs=1e-5)


def test_rope_makes_scores_depend_on_distance_only() -> None:
    q, k = _random(1, 1, 8), _random(1, 1, 8, seed=1)
    inv_freq = torch.tensor([1.0, 0.3, 0.1, 0.01])

    def at(x: torch.Tensor, position: int) -> torch.Tensor:
        return apply_rope(x, *_cos_sin(position * inv_freq[None]))

    near, far = (at(q, 9) * at(k, 4)).sum(), (at(q, 105) * at(k, 100)).sum()
    torch.testing.assert_close(near, far, rtol=0, atol=1e-4)
    assert abs(near - (at(q, 9) * at(k, 3)).sum()) > 1e-3


@given(
    tokens=st.integers(1, 12),
    before=st.integers(0, 12),
    window=st.none() | st.integers(1, 30),
)
def test_causal_mask_hides_the_future_and_what_is_outside_the_window(
    tokens: int, before: int, window: int | None
) -> None:
    context = before + tokens
    expected = [
        [key > query or (window is not None and query - key >= window) for key in range(context)]
        for query in range(before, context)
    ]
    mask = causal_mask(tokens, context, window)
    if mask is None:
        assert not any(any(row) for row in expected)
    else:
        assert mask.tolist() == expected


def test_causal_mask_never_hides_a_token_from_itself() -> None:
    mask = causal_mask(6, 6, 1)
    assert mask is not None
    assert torch.equal(~mask, torch.eye(6, dtype=torch.bool))


def test_softmax_gives_hidden_keys_exactly_nothing() -> None:
    scores = _random(2, 3, 4)
    mask = causal_mask(3, 4, None)
    probs = softmax(scores, mask)
    assert mask is not None
    assert torch.equal(probs == 0, mask.expand(2, 3, 4))
    for head, query in ((0, 0), (1, 1)):
        seen = [math.exp(float(scores[head, query, key])) for key in range(query + 2)]
        expected = torch.tensor([value / sum(seen) for value in seen])
        torch.testing.assert_close(probs[head, query, : query + 2], expected)


def test_softmax_of_bfloat16_scores_is_computed_in_float32() -> None:
    scores = _random(1, 2, 300).bfloat16()
    probs = softmax(scores, None)
    assert probs.dtype == torch.bfloat16
    assert torch.equal(probs, scores.float().softmax(-1).bfloat16())


# ---------------------------------------------------------------------------- attention whole

# What one rounding of an output costs, and of the float32 sums behind it.
STEPS = {torch.float32: 2e-6, torch.bfloat16: 2**-8, torch.float16: 2**-11}


def _attended(
    q_THC: torch.Tensor, k_KSC: torch.Tensor, v_KSC: torch.Tensor, window: int | None
) -> torch.Tensor:
    """Attention in float64, one query head at a time: [T, H * C]."""
    T, H, C = q_THC.shape
    K, S, _ = k_KSC.shape
    query_T1, key_1S = torch.arange(S - T, S)[:, None], torch.arange(S)[None]
    hidden = key_1S > query_T1
    if window is not None:
        hidden |= query_T1 - key_1S >= window
    heads = []
    for head in range(H):
        k_SC, v_SC = (x[head // (H // K)].double() for x in (k_KSC, v_KSC))
        scores = q_THC[:, head].double() @ k_SC.T / math.sqrt(C)
        heads.append(scores.masked_fill(hidden, float("-inf")).softmax(-1) @ v_SC)
    return torch.cat(heads, dim=-1)


def _operands(
    tokens: int, context: int, dtype: torch.dtype, heads: int = 6, shared: int = 2, size: int = 16
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return q, k and v as the forward pass and the cache hand them over: k and v are views."""
    q = (2 * _random(tokens, heads, size)).to(dtype)
    cache = (2 * _random(2, shared, context + 9, size, seed=1)).to(dtype)
    k, v = cache[:, :, :context].unbind(0)
    return q, k, v


@pytest.mark.pairwise
@pytest.mark.parametrize("dtype", STEPS)
@pytest.mark.parametrize("window", [None, 1, 7, 150, 1000])
@pytest.mark.parametrize("before", [0, 1, 40])
@pytest.mark.parametrize("tokens", [1, 3, 16, 17, 128, 130, 300])
def test_attention_is_that_of_each_head_alone(
    tokens: int, before: int, window: int | None, dtype: torch.dtype
) -> None:
    """On either side of the row counts at which it is computed another way."""
    q, k, v = _operands(tokens, before + tokens, dtype)
    actual = attention(q, k, v, window)
    assert (actual.shape, actual.dtype) == ((tokens, 6 * 16), dtype)
    exact = _attended(q, k, v, window)
    # Rounding to the dtype once, of the output; of the probabilities, too, in fused kernels.
    size = max(1.0, float(v.abs().max()))
    assert float((actual.double() - exact).abs().max()) < 2 * STEPS[dtype] * size


@pytest.mark.pairwise
@pytest.mark.parametrize("window", [None, 40, 900, 1024])
@pytest.mark.parametrize("context", [1023, 1024, 1025, 1160])
@pytest.mark.parametrize("tokens", [2, 129])
def test_attention_to_a_long_context_is_that_of_each_head_alone(
    tokens: int, context: int, window: int | None
) -> None:
    """On either side of the context lengths at which the causal bias is another one."""
    q, k, v = _operands(tokens, context, torch.float32)
    torch.testing.assert_close(
        attention(q, k, v, window).double(), _attended(q, k, v, window), rtol=0, atol=1e-5
    )


def _tensor_bytes() -> int:
    gc.collect()
    return sum(x.nbytes for x in gc.get_objects() if type(x) is torch.Tensor)


@pytest.mark.parametrize(("window", "keys"), [(None, 3 * 1024), (1000, 2 * 1024)])
def test_little_is_kept_of_a_long_context(window: int | None, keys: int) -> None:
    """128 rows of the longest, whatever the steps; nothing of a mask."""
    local_ops._causal_bias.cache_clear()
    before = _tensor_bytes()
    for context in (600, 1500, 2500, 3000):
        operands = _operands(300, context, torch.float32)
        attention(*operands, window)
        causal_mask(300, context, window)
    del operands
    assert _tensor_bytes() - before <= 128 * keys * 4


@each_row(("heads", "shared"), [(4, 4), (8, 1), (6, 3), (1, 1)])
@pytest.mark.parametrize("tokens", [1, 5, 40])
def test_query_heads_look_at_the_keys_that_they_share(tokens: int, heads: int, shared: int) -> None:
    q, k, v = _operands(tokens, tokens + 4, torch.float32, heads, shared, size=24)
    torch.testing.assert_close(
        attention(q, k, v, None).double(), _attended(q, k, v, None), rtol=0, atol=1e-5
    )


@pytest.mark.parametrize("tokens", [1, 3, 17, 130])
def test_a_hidden_key_weighs_nothing_whatever_it_is(tokens: int) -> None:
    """Not even where its score or its value is as large as can be."""
    window, context = 20, 200
    q, k, v = _operands(tokens, context, torch.float32)
    expected = attention(q, k, v, window)
    seen = context - tokens - window + 1
    k, v = k.clone(), v.clone()
    k[:, :seen], v[:, :seen] = 1e4, -1e30
    assert torch.equal(attention(q, k, v, window), expected)


@pytest.mark.parametrize("tokens", [1, 4, 17, 130])
def test_attention_leaves_its_operands_as_they_were(tokens: int) -> None:
    operands = _operands(tokens, tokens + 2, torch.float32)
    before = [x.clone() for x in operands]
    attention(*operands, None)
    for x, same in zip(operands, before, strict=True):
        assert torch.equal(x, same)


@pytest.mark.parametrize("dtype", STEPS)
@pytest.mark.parametrize("tokens", [1, 20])
def test_scores_that_overflow_half_precision_are_no_trouble(
    tokens: int, dtype: torch.dtype
) -> None:
    """A sum of 16 products of 300 by 300 is 1.4 million, of which float16 has none."""
    q = torch.full((tokens, 2, 16), 300.0, dtype=dtype)
    k = torch.full((1, tokens + 5, 16), 300.0, dtype=dtype)
    v = torch.full((1, tokens + 5, 16), 0.5, dtype=dtype)
    assert torch.equal(attention(q, k, v, None), torch.full((tokens, 32), 0.5, dtype=dtype))


def test_residual_is_a_sum_in_place() -> None:
    h, y = _random(3, 5), _random(3, 5, seed=1)
    expected = h + y
    total = residual(h, y)
    assert total is h
    assert torch.equal(h, expected)


@pytest.mark.parametrize("dtype", STEPS)
def test_rope_leaves_what_it_rotates_as_it_was(dtype: torch.dtype) -> None:
    """Queries and keys are views of one product."""
    product = _random(4, 2 * 16).to(dtype)
    before = product.clone()
    x = product[:, :16].view(4, 2, 8)
    cos, sin = (table.to(dtype) for table in _cos_sin(_random(4, 4, seed=1)))
    actual = apply_rope(x, cos, sin)
    assert torch.equal(product, before)
    assert actual.dtype == dtype
    exact = apply_rope(x.double(), cos.double(), sin.double())
    assert float((actual.double() - exact).abs().max()) < 4 * max(STEPS[dtype], 2e-7)
