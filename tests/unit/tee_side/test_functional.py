"""The light operators, against what their formulas say one number at a time."""

from __future__ import annotations

import cmath
import math

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from tee_side.functional import apply_rope, causal_mask, rms_norm, silu_mul, softmax


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
    torch.testing.assert_close(silu_mul(gate, up), torch.tensor(expected))


def test_rope_rotates_each_pair_of_halves_by_its_angle() -> None:
    tokens, heads, size = 4, 3, 8
    x, angles = _random(tokens, heads, size), _random(tokens, size // 2, seed=1)
    doubled = angles.repeat(1, 2)
    actual = apply_rope(x, doubled.cos(), doubled.sin())
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
        angles = (position * inv_freq).repeat(1, 2)
        return apply_rope(x, angles.cos(), angles.sin())

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
