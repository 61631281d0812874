"""Scales of rows, biases, and a site under pads in two passes; no sum wraps, whatever comes."""

import math
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file, save_file

from protocol.errors import ActivationRangeError, ModelError
from protocol.integer import MAX_IN_FEATURES, ring_product
from protocol.keystream import seeded
from protocol.messages import FUSED_MODULES
from protocol.model.checkpoint import Checkpoint
from protocol.model.config import ModelConfig, read_config
from protocol.model.weights import QuantizedLinear, load_quantized
from tee_side.native import kernels as native_sites
from tee_side.protect import sites as sites_module
from tee_side.protect.masking import PaddedSite
from tee_side.protect.masks.mask import Factors, Pad, Seed
from tee_side.protect.randomness import Randomness
from tee_side.protect.sites import (
    MAX_SUM,
    FloatSite,
    IntegerSite,
    IntegerSites,
    largest_input,
    load_biases,
)
from tee_side.protect.verification import ExactCheck
from tee_side.words import Site
from tests.kit.kernels import KERNELS, using_kernels
from tests.kit.model import SavedModel
from tests.kit.rows import each_row


@pytest.fixture(scope="module")
def model(saved_model: Callable[..., SavedModel]) -> SavedModel:
    return saved_model("qwen2")


@pytest.fixture(scope="module")
def config(model: SavedModel) -> ModelConfig:
    return read_config(model.directory)


@pytest.mark.parametrize("kernels", KERNELS)
@each_row("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_inputs_are_rounded_and_sums_scaled_back(kernels: str, dtype: torch.dtype) -> None:
    weight_scale = torch.tensor([0.5, 0.003, 1e-6])
    # The steps of the rows are 1/2 and 1/4.
    x = torch.tensor([[0.25, 0.75, -0.25, -0.75, 0.26, 3.0, -7.5], [3.75] * 7], dtype=dtype)
    y = torch.tensor([[100, -123_457, MAX_SUM], [0, 1, -MAX_SUM]], dtype=torch.int32)
    with using_kernels(kernels):
        site = IntegerSite(weight_scale, None, dtype, 15)
        encoded, scale_T1 = site.encode(x)
        decoded = site.decode(y, scale_T1)
    # To the nearest step, and ties to even.
    assert encoded.dtype == torch.int32
    assert encoded.tolist() == [[0, 2, 0, -2, 1, 6, -15], [15] * 7]
    assert scale_T1.tolist() == [[0.5], [0.25]]
    expected = y.double() * weight_scale.double() * scale_T1
    assert decoded.dtype == dtype
    # Three roundings of float32, then the one to the dtype; float16 ends at 65,504.
    error = 3 * 2.0**-24 + torch.finfo(dtype).eps
    fits = expected.abs() < torch.finfo(dtype).max
    assert torch.all(((decoded.double() - expected).abs() <= error * expected.abs() + 1e-7)[fits])


@pytest.mark.parametrize("kernels", KERNELS)
@each_row("dtype", [torch.float32, torch.bfloat16])
def test_a_row_is_computed_as_if_it_were_alone(kernels: str, dtype: torch.dtype) -> None:
    """Whatever is beside it: outliers, or nothing but zeros; and so large as the site allows.

    But for rows so small that their scale would be no normal number. All kernels give the same.
    """
    sizes = torch.tensor([1.0, 20_000.0, 0.0, 1e30, 1e-30, 1e-36, 1e-40])
    x_TI = (torch.randn(7, 130) * sizes[:, None]).to(dtype)
    y_TO = torch.randint(-1000, 1000, (7, 3), dtype=torch.int32)
    with using_kernels(kernels):
        site = IntegerSite(torch.rand(3), None, dtype, 8256)
        encoded, scale_T1 = site.encode(x_TI)
        decoded = site.decode(y_TO, scale_T1)
        for row in range(7):
            one = slice(row, row + 1)
            alone, scale = site.encode(x_TI[one])
            assert torch.equal(alone, encoded[one])
            assert torch.equal(site.decode(y_TO[one], scale), decoded[one])
        assert all(map(torch.equal, site.quantise(x_TI), (encoded, scale_T1)))
    *largest, small, smallest = encoded.abs().amax(1).tolist()
    assert largest == [8256, 8256, 0, 8256, 8256]
    assert 0 == smallest < small < 8256
    assert decoded.isfinite().all()


@each_row("size", [8, 2048, 28_672, MAX_IN_FEATURES])
def test_no_sum_wraps_for_the_largest_weights_and_inputs(size: int) -> None:
    weight = torch.full((2, size), 127, dtype=torch.int8)
    weight[1] = -127
    largest = largest_input(QuantizedLinear(weight, torch.ones(2), {}).max_row_sum())
    site = IntegerSite(torch.ones(2), None, torch.float32, largest)
    x_TI = torch.tensor([1.0, 0.3, -7e-5, 3e38])[:, None].expand(4, size)
    q_TI, _ = site.encode(x_TI)
    assert int(q_TI.abs().amin()) == int(q_TI.abs().amax()) == largest
    exact = q_TI.long() @ weight.long().t()
    assert int(exact.abs().max()) <= MAX_SUM
    assert torch.equal(ring_product(q_TI, weight, site.digits).long(), exact)


def test_inputs_are_as_large_as_two_digits_and_the_sums_let_them() -> None:
    sums = [0, 1, 127 * 518, 127 * 2048, 127 * 8192, 127 * MAX_IN_FEATURES]
    assert [*map(largest_input, sums)] == [32_639, 32_639, 32_639, 8256, 2064, 129]
    sites = [IntegerSite(torch.ones(1), None, torch.float32, one) for one in (127, 128, 32_639)]
    assert [site.digits for site in sites] == [1, 2, 2]


def test_weights_other_than_those_met_before_are_refused(
    config: ModelConfig, model: SavedModel
) -> None:
    sites = IntegerSites(config, Checkpoint(model.directory), {}, torch.float32)
    first = QuantizedLinear(torch.full((2, 1024), 127, dtype=torch.int8), torch.ones(2), {})
    other = replace(first, scale=torch.tensor([1.0, 1.01]))
    named: dict[Site, str] = {(0, "qkv_proj"): "qkv_proj in layer 0", (2, "lm_head"): "lm_head"}
    for site, where in named.items():
        for _ in range(2):
            sites.take_scales(site, first)
        with pytest.raises(ModelError, match=f"{model.directory}: {where}: scales of the weights"):
            sites.take_scales(site, other)
        assert sites[site].largest == MAX_SUM // (127 * 1024)


def test_weights_of_a_site_that_nobody_met_are_read_once(
    config: ModelConfig, model: SavedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint, read = Checkpoint(model.directory), list[Site]()

    def noted(checkpoint: Any, config: Any, *site: Any) -> QuantizedLinear:
        read.append(site)
        return load_quantized(checkpoint, config, *site)

    monkeypatch.setattr(sites_module, "load_quantized", noted)
    sites = IntegerSites(config, checkpoint, {}, torch.bfloat16)
    known, *unknown = asked = list[Site]([(0, "o_proj"), (1, "down_proj"), (2, "lm_head")])
    sites.take_scales(known, load_quantized(checkpoint, config, *known))
    for site in (*asked, *asked):
        weights = load_quantized(checkpoint, config, *site)
        assert torch.equal(sites[site].factor_O, weights.scale)
        assert sites[site].largest == largest_input(weights.max_row_sum())
        assert sites[site].dtype == torch.bfloat16
    assert read == unknown


def test_biases_of_the_modules_stand_side_by_side_and_are_added(
    saved_model: Callable[..., SavedModel],
) -> None:
    model = saved_model("llama", attention_bias=True, mlp_bias=True)
    config, checkpoint = read_config(model.directory), Checkpoint(model.directory)
    biases = load_biases(checkpoint, config, FUSED_MODULES, torch.float32)
    assert set(biases) == {(layer, operator) for layer in range(3) for operator in FUSED_MODULES}
    attention = model.reference.model.layers[1].self_attn
    parts = [getattr(attention, name).bias for name in FUSED_MODULES["qkv_proj"]]
    assert torch.equal(biases[1, "qkv_proj"], torch.cat(parts))
    x, y = torch.randn(3, 48), torch.randn(3, 160)
    for found, expected in ((biases, y + biases[1, "qkv_proj"]), ({}, y)):
        site = FloatSite(found.get((1, "qkv_proj")))
        assert site.encode(x) == (x, None)
        assert torch.equal(site.decode(y, None), expected)


def test_biases_that_are_missing_are_a_model_error(
    model: SavedModel, config: ModelConfig, tmp_path: Path
) -> None:
    shutil.copytree(model.directory, tmp_path / "m")
    tensors = load_file(tmp_path / "m" / "model.safetensors")
    del tensors["model.layers.1.self_attn.k_proj.bias"]
    save_file(tensors, tmp_path / "m" / "model.safetensors")
    with pytest.raises(ModelError, match=r"layers\.1\.self_attn\.k_proj\.bias"):
        load_biases(Checkpoint(tmp_path / "m"), config, ["qkv_proj"], torch.float32)


@pytest.fixture(params=[kernels for kernels in KERNELS if kernels != "torch"])
def compiled(request: pytest.FixtureRequest) -> Iterator[str]:
    with using_kernels(request.param):
        yield request.param


class Parts:
    """A weight, its site, its check, and a pad. `largest`: what a row's largest input becomes."""

    def __init__(
        self,
        dtype: torch.dtype = torch.float32,
        rows: int = 3,
        *,
        bias: bool = True,
        largest: int = 32_639,
        where: str = "",
    ) -> None:
        self.weight = torch.randint(-127, 128, (75, 130)).to(torch.int8)
        bias_O = torch.randn(75).to(dtype) if bias else None
        self.site = IntegerSite(torch.rand(75), bias_O, dtype, largest, where)
        self.check = ExactCheck.draw(self.weight, Randomness())
        self.pad = seeded([bytes(Randomness().bytes(32)) for _ in range(2)], rows, 130)
        r = self.pad.elements()
        self.factors = Factors(r, ring_product(r, self.weight))
        self.x = torch.randn(rows, 130).to(dtype)

    def padded(self, *, checked: bool = True) -> PaddedSite:
        words = {7: (self.pad, self.factors.u, ())}
        pads: Any = SimpleNamespace(words=lambda site, _: words[site])
        return PaddedSite(self.site, 7, pads, self.check if checked else None)


@each_row(
    ("dtype", "rows", "bias", "checked", "largest"),
    [
        (torch.float32, 9, False, True, 2064),
        (torch.bfloat16, 1, True, True, 32_639),
        (torch.float32, 3, True, False, 8256),
        (torch.bfloat16, 1, True, True, 127),
        (torch.float32, 5, True, True, 32_639),
    ],
)
def test_both_passes_equal_the_stages(
    compiled: str, dtype: torch.dtype, rows: int, bias: bool, checked: bool, largest: int
) -> None:
    """And what torch computes without compiled kernels, and the TEE without a pad."""
    made = Parts(dtype, rows, bias=bias, largest=largest)
    site, factors, x = made.site, made.factors, made.x
    x *= (10.0 ** torch.arange(rows)[:, None]).to(dtype)
    x[0] = 0.0 if rows > 1 else x[0]
    hidden = made.padded(checked=checked).hide(x)
    encoded, scale_T1 = site.encode(x)
    (sent,) = Pad().mask(encoded, factors).sent
    assert torch.equal(hidden.sent[0], cast("torch.Tensor", sent))
    y = ring_product(hidden.sent[0], made.weight)
    revealed = hidden.reveal([y])
    assert revealed is not None
    assert torch.equal(revealed, site.decode(y - factors.u, scale_T1))
    with using_kernels("torch"):
        site.compiled = False
        alone, scale_T1 = site.encode(x)
        assert torch.equal(encoded, alone)
        assert torch.equal(revealed, site.decode(ring_product(alone, made.weight), scale_T1))
    # Kernels that are changed while a run is on, and those that have no AES.
    with using_kernels("portable"):
        again = made.padded(checked=checked).hide(x)
        assert torch.equal(again.sent[0], hidden.sent[0])
    assert int(encoded.abs().max()) == largest
    of_site = site.largest, site.digits, made.weight, site.factor_O, site.bias_O
    here, is_finite = native_sites.linear(x, *of_site)
    assert is_finite
    assert torch.equal(revealed, here)


@each_row(("dtype", "largest"), [(torch.float32, 8256), (torch.bfloat16, 127)])
def test_a_wrong_product_is_not_revealed(compiled: str, dtype: torch.dtype, largest: int) -> None:
    made = Parts(dtype, 4, largest=largest)
    hidden = made.padded().hide(made.x)
    right = ring_product(hidden.sent[0], made.weight)
    assert hidden.reveal([right]) is not None
    for row, column, error in ((0, 0, 1), (3, 74, -(2**31)), (2, 16, 256)):
        wrong = right.clone()
        wrong[row, column] += error
        assert hidden.reveal([wrong]) is None
        assert made.padded(checked=False).hide(made.x).reveal([wrong]) is not None
    # Neither in a traceback nor in a log.
    assert repr(hidden) == str(hidden) == "Padded()"
    assert repr(Factors(made.x, made.x)) == "Factors()"
    assert repr(Seed(bytes(32), (1, 2))) == "Seed(shape=(1, 2))"


@pytest.mark.parametrize("kernels", KERNELS)
@each_row("value", [math.nan, math.inf, -math.inf])
def test_a_row_that_is_not_finite_is_refused_before_it_is_sent(kernels: str, value: float) -> None:
    for where in ("o_proj in layer 0: ", "lm_head: "):
        made = Parts(where=where)
        for row in range(3):
            x = made.x.clone()
            x[row, 129] = value
            with using_kernels(kernels):
                hides = [made.site.encode, made.padded().hide][: 1 if kernels == "torch" else 2]
                for hide in hides:
                    with pytest.raises(ActivationRangeError) as raised:
                        hide(x)
                    said = f"{where}input row: got not finite, expected finite numbers"
                    assert said in str(raised.value)
