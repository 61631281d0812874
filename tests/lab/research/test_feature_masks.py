"""Masks of features and of noise: bound to their randomness, of the size that was asked for."""

import math
from itertools import repeat

import pytest
import torch

from protocol.errors import MaskError
from protocol.model.checkpoint import light_tensors, linear_tensors
from protocol.model.config import ModelConfig, read_config
from tee_side.protect.masks.mask import Factors
from tee_side.protect.randomness import Randomness
from tests.kit.model import Models
from tsqp.lab.research import feature_masks as masks
from tsqp.lab.research.draws import integers, orthogonal, permutation, signs
from tsqp.lab.research.row_masks import FloatNoise
from tsqp.mask_kinds import FeatureMask, FeatureSite, KeyedTransform

MASKS = [
    masks.FeaturePermutation(),
    masks.FeaturePermutation(block=5),
    masks.FeatureRotation(),
    masks.FeatureRotation(block=7),
    masks.FeatureRotation(block=16),
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


def _served(transform: KeyedTransform, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """What the server answers: it has the transformed weights in float32."""
    (sent,) = transform.mask(x, Randomness()).sent
    return sent @ transform.weight(weight.double()).float().t()


@pytest.mark.parametrize("mask", MASKS, ids=IDS)
def test_each_module_has_a_map_of_its_own_and_keeps_its_rows(mask: FeatureMask) -> None:
    site = _site("gate_up_proj")
    x, transform = _input(site, 3), mask.transform(site)
    gate = _randn(sum(site.outputs), site.in_features, seed=4)[:97] / site.in_features**0.5
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
        masks.FeatureRotation().transform(_site("qkv_proj", gain=gain))


@pytest.mark.parametrize("operator", SITES)
def test_noise_has_the_deviation_that_was_asked_for(operator: str) -> None:
    site = _site(operator)
    x = _input(site, 2000)
    (noisy,) = masks.FeatureRotation(sigma=0.5).transform(site).mask(x, Randomness(bytes(32))).sent
    (clean,) = masks.FeatureRotation().transform(_site(operator)).mask(x, Randomness()).sent
    size = clean.square().mean(-1).sqrt()[:, None] if site.gain is None else 1
    noise = (noisy - clean) / size
    # 100,000 draws or more: four deviations of their mean and of their deviation.
    assert noise.std().item() == pytest.approx(0.5, rel=0.01)
    assert noise.mean().item() == pytest.approx(0, abs=0.0065)
    assert noise.std(0).min() > 0.45


def test_rows_are_cut_to_the_length_that_epsilon_is_stated_for() -> None:
    site = _site("qkv_proj")
    transform = masks.FeatureRotation(sigma=1e-6).transform(site)
    (sent,) = transform.mask(3 * _input(site, 4), Randomness()).sent
    assert sent.norm(dim=-1).max() <= 50**0.5 * (1 + 1e-4)
    (shorter,) = transform.mask(0.5 * _input(site, 4), Randomness()).sent
    assert torch.allclose(shorter.norm(dim=-1), torch.full((4,), 0.5 * 50**0.5), rtol=1e-4)


def _hockey_stick(mu: float, epsilon: float) -> float:
    """delta at epsilon by integration of max(0, p - e^epsilon q), p = N(mu, 1), q = N(0, 1)."""
    t = torch.linspace(-14.0, mu + 14, 2_000_001, dtype=torch.float64)
    p = torch.exp(-((t - mu) ** 2) / 2)
    q = torch.exp(epsilon - t**2 / 2)
    return float(torch.trapezoid((p - q).clamp(min=0), t) / math.sqrt(2 * math.pi))


@pytest.mark.parametrize("delta", [1e-2, 1e-9])
@pytest.mark.parametrize("mu", [0.05, 3.0, 12.0])
def test_epsilon_is_the_smallest_one(mu: float, delta: float) -> None:
    epsilon = masks.gaussian_epsilon(mu, delta)
    assert _hockey_stick(mu, epsilon) == pytest.approx(delta, rel=1e-4)
    assert _hockey_stick(mu, 0.999 * epsilon) > delta


MASK = FloatNoise(sigma=4.0)


def _noise(rows: int, features: int, mask: FloatNoise = MASK) -> torch.Tensor:
    return mask.draw(Randomness(bytes(32)).ring(rows, features))


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


def test_noise_is_as_large_as_was_asked_for_and_the_last_bits_of_the_input_do_not_cross() -> None:
    """As they would if r had fewer bits than x."""
    for sigma in (0.5, 4.0):
        # 131,072 numbers: four standard errors are 0.8 %.
        r_TI = _noise(256, 512, FloatNoise(sigma=sigma))
        assert float(r_TI.std()) == pytest.approx(sigma, rel=0.008)
    x_TI = torch.rand(64, 512, generator=torch.Generator().manual_seed(0))
    (sent,) = MASK.mask(x_TI, Factors(_noise(64, 512), torch.zeros(64, 3))).sent
    for bits in range(2, 16):
        step = 2.0**-bits
        # The distance of their remainders, around the circle.
        apart = ((sent - x_TI) / step).frac().abs()
        same = torch.minimum(apart, 1 - apart) < 0.01
        assert float(same.double().mean()) < 0.05, bits


KEY = bytes(range(32))


def test_signs_integers_and_permutations_are_equally_likely(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    drawn = signs(Randomness(KEY), 200, 200)
    assert set(drawn.unique().tolist()) == {-1, 1}
    assert abs(float(drawn.float().mean())) < 5 / math.sqrt(drawn.numel())
    counts = torch.bincount(integers(Randomness(KEY), 7, 7000), minlength=7)
    assert len(counts) == 7
    # Within 5 sigma of its mean, with 6 degrees of freedom.
    assert abs(float(((counts - 1000.0) ** 2 / 1000).sum()) - 6) < 5 * math.sqrt(12)
    generator = Randomness(KEY)
    orders = torch.stack([permutation(generator, 4) for _ in range(12_000)])
    counts = orders.unique(dim=0, return_counts=True)[1]
    assert len(counts) == 24
    assert abs(float(((counts - 500.0) ** 2 / 500).sum()) - 23) < 5 * math.sqrt(46)

    # One is drawn again on a collision: how a sort breaks ties is not random.
    draws = [torch.tensor([5, 3, 5]), torch.tensor([2, -9, 1])]
    monkeypatch.setattr(generator, "elements", lambda shape, dtype: draws.pop(0))
    assert permutation(generator, 3).tolist() == [1, 2, 0]


def test_rotations_have_no_preferred_sign() -> None:
    """Without the sign fix the diagonal of LAPACK's Q leans to one side, and det is constant."""
    generator = Randomness(KEY)
    turns = torch.stack([orthogonal(generator, 3) for _ in range(2000)])
    assert torch.allclose(turns @ turns.mT, torch.eye(3, dtype=torch.float64), atol=1e-13)
    assert float(turns.mean(0).abs().max()) < 5 / math.sqrt(3 * 2000)
    assert abs(float(torch.linalg.det(turns).mean())) < 5 / math.sqrt(2000)


@pytest.fixture
def config(saved_model: Models) -> ModelConfig:
    return read_config(saved_model("qwen3").directory)


def test_what_can_be_shuffled_is_and_each_layer_by_itself(config: ModelConfig) -> None:
    # A layer whose tensors say where each of their values came from.
    shapes = light_tensors(config) | linear_tensors(config)
    prefix = "model.layers.0."
    own = {n.removeprefix(prefix): s for n, s in shapes.items() if n.startswith(prefix)}
    plain = {n: torch.arange(math.prod(s)).double().view(s) for n, s in own.items()}
    keyed, again, other = (
        masks.SegmentPermutation().keyed(config, Randomness(key)) for key in (KEY, KEY, b"o" * 32)
    )
    first, second = keyed.layer(0, plain), keyed.layer(1, plain)
    same, apart = again.layer(0, plain), other.layer(0, plain)
    for name, tensor in plain.items():
        assert not torch.equal(first[name], tensor), name
        assert torch.equal(first[name], second[name]) == name.endswith("layernorm.weight"), name
        assert torch.equal(same[name], first[name])
        assert not torch.equal(apart[name], first[name])
    assert not torch.equal(first["self_attn.rope_order"], second["self_attn.rope_order"])
    gate, up = (first[f"mlp.{name}_proj.weight"] for name in ("gate", "up"))
    assert torch.equal(gate, up)
    # Of heads, only what is within them moves.
    C = config.head_dim
    values_OD = first["self_attn.v_proj.weight"]
    origin_O = values_OD.amin(1) // config.hidden_size
    assert torch.equal(origin_O // C, torch.arange(len(origin_O)) // C)
    assert not torch.equal(origin_O[:C] % C, origin_O[C : 2 * C] % C)


def test_noise_is_fresh_of_the_deviation_asked_for_and_rotated_with_the_rows(
    config: ModelConfig,
) -> None:
    keyed = masks.SegmentRotation(sigma=0.5).keyed(config, Randomness(KEY))
    quiet = masks.SegmentRotation().keyed(config, Randomness(KEY))
    h_TD = torch.randn(400, config.hidden_size, generator=torch.Generator().manual_seed(0))
    randomness = Randomness(KEY)
    (first,), (second,) = (keyed.mask(h_TD, repeat(randomness)).sent for _ in range(2))
    (rotated,) = quiet.mask(h_TD, repeat(randomness)).sent
    assert (first - rotated).std().item() == pytest.approx(0.5, rel=0.02)
    assert (first - rotated).mean().item() == pytest.approx(0, abs=0.02)
    assert not torch.equal(first, second)
    assert rotated.norm(dim=1) == pytest.approx(h_TD.norm(dim=1), rel=1e-5)
