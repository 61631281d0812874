"""Masks of features and of noise: bound to their randomness, of the size that was asked for."""

from __future__ import annotations

import math

import pytest
import torch

from protocol.errors import MaskError
from tee_side.protect.masks.mask import Factors, FeatureMask, FeatureSite, KeyedTransform
from tee_side.protect.randomness import Randomness
from tsqp.lab.research.feature_permutation import FeaturePermutation
from tsqp.lab.research.feature_rotation import FeatureRotation
from tsqp.lab.research.float_noise import FloatNoise
from tsqp.lab.research.privacy import gaussian_epsilon

MASKS = [
    FeaturePermutation(),
    FeaturePermutation(block=5),
    FeatureRotation(),
    FeatureRotation(block=7),
    FeatureRotation(block=16),
]
# q/k/v with grouped heads, o, gate/up and down of a model whose sizes no block divides.
SITES = {
    "qkv_proj": (50, (96, 32, 32), True),
    "o_proj": (96, (50,), False),
    "gate_up_proj": (50, (97, 97), True),
    "down_proj": (97, (50,), False),
}
IDS = [f"{mask.name}-{mask.block}" for mask in MASKS]


def _randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def _site(operator: str, key: int = 1, gain: torch.Tensor | None = None) -> FeatureSite:
    in_features, outputs, normed = SITES[operator]
    if gain is None and normed:
        gain = 1 + 0.3 * _randn(in_features, seed=9)
    return FeatureSite(in_features, outputs, gain, Randomness(bytes([key]) * 32))


def _input(site: FeatureSite, rows: int) -> torch.Tensor:
    """Rows as an RMSNorm gives them, or of no particular norm where there is none."""
    x = _randn(rows, site.in_features, seed=3)
    if site.gain is None:
        return x * torch.linspace(0.1, 3, rows)[:, None]
    return site.gain * x / x.square().mean(-1, keepdim=True).sqrt()


def _weight(site: FeatureSite) -> torch.Tensor:
    return _randn(sum(site.outputs), site.in_features, seed=4) / site.in_features**0.5


def _served(transform: KeyedTransform, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """What the server answers: it has the transformed weights in float32."""
    (sent,) = transform.mask(x, Randomness()).sent
    return sent @ transform.weight(weight.double()).float().t()


@pytest.mark.parametrize("mask", MASKS, ids=IDS)
def test_each_module_has_a_map_of_its_own_and_keeps_its_rows(mask: FeatureMask) -> None:
    site = _site("gate_up_proj")
    x, transform = _input(site, 3), mask.transform(site)
    gate = _weight(site)[:97]
    alike = _served(transform, x, torch.cat([gate, gate]))
    assert (alike[:, :97] - alike[:, 97:]).abs().max() > 0.5
    # With up at zero, nothing of gate may turn up in up's place.
    alone = _served(transform, x, torch.cat([gate, torch.zeros_like(gate)]))
    assert alone[:, 97:].abs().max() == 0
    assert alone[:, :97].norm().item() == pytest.approx((x @ gate.t()).norm().item(), rel=1e-5)


@pytest.mark.parametrize("bad", [0.0, math.nan, math.inf])
def test_a_gain_that_cannot_be_folded_is_refused(bad: float) -> None:
    gain = torch.zeros(50)
    gain[7] = bad
    with pytest.raises(MaskError, match="gain: got"):
        FeatureRotation().transform(_site("qkv_proj", gain=gain))


@pytest.mark.parametrize("operator", SITES)
def test_noise_has_the_deviation_that_was_asked_for(operator: str) -> None:
    site = _site(operator)
    x = _input(site, 2000)
    (noisy,) = FeatureRotation(sigma=0.5).transform(site).mask(x, Randomness(bytes(32))).sent
    (clean,) = FeatureRotation().transform(_site(operator)).mask(x, Randomness()).sent
    size = clean.square().mean(-1).sqrt()[:, None] if site.gain is None else 1
    noise = (noisy - clean) / size
    # 100,000 draws or more: four deviations of their mean and of their deviation.
    assert noise.std().item() == pytest.approx(0.5, rel=0.01)
    assert noise.mean().item() == pytest.approx(0, abs=0.0065)
    assert noise.std(0).min() > 0.45


def test_rows_are_cut_to_the_length_that_epsilon_is_stated_for() -> None:
    site = _site("qkv_proj")
    transform = FeatureRotation(sigma=1e-6).transform(site)
    (sent,) = transform.mask(3 * _input(site, 4), Randomness()).sent
    assert sent.norm(dim=-1).max() <= 50**0.5 * (1 + 1e-4)
    (shorter,) = transform.mask(0.5 * _input(site, 4), Randomness()).sent
    assert torch.allclose(shorter.norm(dim=-1), torch.full((4,), 0.5 * 50**0.5), rtol=1e-4)


def _hockey_stick(mu: float, epsilon: float) -> float:
    """delta at epsilon by integration of max(0, p - e^epsilon q), p = N(mu, 1), q = N(0, 1)."""
    t = torch.linspace(-14.0, mu + 14, 2_000_001, dtype=torch.float64)
    p = torch.exp(-((t - mu) ** 2) / 2)
    q = torch.exp(epsilon - t**2 / 2)
    excess = torch.trapezoid((p - q).clamp(min=0), t) / math.sqrt(2 * math.pi)
    return float(excess)


@pytest.mark.parametrize("delta", [1e-2, 1e-9])
@pytest.mark.parametrize("mu", [0.05, 3.0, 12.0])
def test_epsilon_is_the_smallest_one(mu: float, delta: float) -> None:
    epsilon = gaussian_epsilon(mu, delta)
    assert _hockey_stick(mu, epsilon) == pytest.approx(delta, rel=1e-4)
    assert _hockey_stick(mu, 0.999 * epsilon) > delta


MASK = FloatNoise(sigma=4.0)


def _noise(rows: int, features: int) -> torch.Tensor:
    return MASK.draw(Randomness(bytes(32)).ring(rows, features))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_what_is_sent_is_the_number_of_its_dtype_nearest_to_the_sum(dtype: torch.dtype) -> None:
    """An r rounded before would add an error that u does not take away."""
    x_TI = torch.randn(64, 512, generator=torch.Generator().manual_seed(0)).to(dtype)
    r_TI = _noise(64, 512)
    (sent,) = MASK.mask(x_TI, Factors(r_TI, torch.zeros(64, 3))).sent
    assert sent.dtype == dtype
    exact = x_TI.double() + r_TI.double()
    error = (sent.double() - exact).abs()
    # Half a unit in the last place, and what the sum's own rounding to float32 may add to it.
    limit = (torch.finfo(dtype).eps / 2 + 2**-23) * exact.abs() + 2**-23
    assert bool((error <= limit).all())


def test_the_last_bits_of_the_input_do_not_cross() -> None:
    """As they would if r had fewer bits than x."""
    x_TI = torch.rand(64, 512, generator=torch.Generator().manual_seed(0))
    (sent,) = MASK.mask(x_TI, Factors(_noise(64, 512), torch.zeros(64, 3))).sent
    for bits in range(2, 16):
        step = 2.0**-bits
        # The distance of their remainders, around the circle.
        apart = ((sent - x_TI) / step).frac().abs()
        same = torch.minimum(apart, 1 - apart) < 0.01
        assert float(same.double().mean()) < 0.05, bits


@pytest.mark.parametrize("sigma", [0.5, 4.0])
def test_noise_has_the_standard_deviation_that_was_asked_for(sigma: float) -> None:
    r_TI = FloatNoise(sigma=sigma).draw(Randomness(bytes(32)).ring(256, 512))
    # 131,072 numbers: four standard errors are 0.8 %.
    assert float(r_TI.std()) == pytest.approx(sigma, rel=0.008)
