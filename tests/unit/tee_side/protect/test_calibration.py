"""Activation scales and their file, biases, and a site under pads in two passes: nothing wraps."""

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

from protocol.errors import ActivationRangeError, CalibrationError, ManifestError, ModelError
from protocol.integer import MAX_IN_FEATURES, ring_product
from protocol.messages import FUSED_MODULES
from protocol.model.at_rest import Manifest
from protocol.model.checkpoint import Checkpoint
from protocol.model.config import ModelConfig, read_config
from protocol.model.weights import load_head_scale, load_quantized
from tee_side.native import kernels as native_sites
from tee_side.protect.calibration import HEADROOM, MAX_SUM, Calibration, SiteScales, norm_limit
from tee_side.protect.masking import PaddedSite
from tee_side.protect.masks.mask import Factors, Pad, Seed
from tee_side.protect.randomness import Randomness
from tee_side.protect.sites import (
    DynamicSite,
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
from tsqp.calibrate import coarse, save_calibration

MODEL, LINEAR = "a" * 64, "b" * 64


def make(config: ModelConfig, change: dict[Site, SiteScales] | None = None) -> Calibration:
    sites: dict[Site, SiteScales] = {}
    for layer in range(config.num_hidden_layers):
        for column, (operator, modules) in enumerate(FUSED_MODULES.items()):
            size = sum(config.module_shape(module)[0] for module in modules)
            scale = torch.linspace(0.001, 0.002 + layer, size)
            numbers = (0.25 + layer + 8 * column, scale, 1e6 + column, 10.0 + layer)
            sites[layer, operator] = SiteScales(*numbers)
    return Calibration(sites | (change or {}), MODEL, LINEAR, 1234)


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
    scales = SiteScales(0.5, weight_scale, 1e6, 1.0)
    x = torch.tensor([[0.25, 0.75, -0.25, -0.75, 0.26, 3.0, -7.5], [1.0] * 7], dtype=dtype)
    y = torch.tensor([[100, -123_457, MAX_SUM], [0, 1, -MAX_SUM]], dtype=torch.int32)
    with using_kernels(kernels):
        site = IntegerSites(Calibration({(0, "o_proj"): scales}, "", "", 1), {}, dtype)[0, "o_proj"]
        encoded, decoded = site.encode(x), site.decode(y, x)
    # To the nearest step, and ties to even.
    assert encoded.dtype == torch.int32
    assert encoded.tolist() == [[0, 2, 0, -2, 1, 6, -15], [2] * 7]
    expected = y.double() * weight_scale.double() * 0.5
    assert decoded.dtype == dtype
    # Three roundings of float32, then the one to the dtype; float16 ends at 65,504.
    error = 3 * 2.0**-24 + torch.finfo(dtype).eps
    fits = expected.abs() < torch.finfo(dtype).max
    assert torch.all(((decoded.double() - expected).abs() <= error * expected.abs() + 1e-7)[fits])


@pytest.mark.parametrize("kernels", KERNELS)
@each_row("value", [math.nan, math.inf, -math.inf, 1e30])
def test_a_row_that_is_not_finite_or_far_too_large_is_refused(kernels: str, value: float) -> None:
    scales = SiteScales(0.5, torch.ones(1), 1e6, 1.0)
    integers = Calibration({(2, "down_proj"): scales}, "", "", 1)
    for row in range(3):
        x_TI = torch.ones(3, 8)
        x_TI[row, 5] = value
        with using_kernels(kernels), pytest.raises(ActivationRangeError, match="down_proj in la"):
            IntegerSites(integers, {}, torch.float32)[2, "down_proj"].encode(x_TI)


@each_row(("longer", "got"), [(1.01, 2), (1.99, 2), (2.01, 3), (77.5, 78)])
def test_the_error_says_how_much_too_long_a_row_is_and_no_more(longer: float, got: int) -> None:
    # The norm itself would name the token to a reader of the log.
    site = IntegerSite(SiteScales(0.5, torch.ones(1), 1000.0, 1.0))
    with pytest.raises(ActivationRangeError) as raised:
        site.encode(torch.tensor([[300.0, 400.0]]) * 0.995 * longer)
    assert raised.value.got == f"less than {got} times"


@each_row("size", [8, 2048, 28_672, MAX_IN_FEATURES])
def test_rounding_in_the_norm_cannot_let_a_wrapping_row_through(size: int) -> None:
    # Weights and inputs that are all alike: the largest sum, and the worst case for a float32 one.
    site = IntegerSite(SiteScales(1.0, torch.ones(1), norm_limit(127 * math.sqrt(size)), 1.0))
    value = math.ceil((MAX_SUM + 1) / (127 * size))
    with pytest.raises(ActivationRangeError):
        site.encode(torch.full((1, size), float(value)))
    below = math.floor(0.99 * MAX_SUM / (127 * size))
    x_int = site.encode(torch.full((1, size), float(below)))
    assert int(x_int.long().sum() * 127) <= MAX_SUM
    site = IntegerSite(SiteScales(1.0, torch.ones(1), norm_limit(0.0), 0.0))
    with pytest.raises(ActivationRangeError):
        site.encode(torch.tensor([[2.0**31]]))


def test_a_ring_that_is_too_small_is_refused_with_both_values(config: ModelConfig) -> None:
    fits = SiteScales(1.0, torch.ones(config.hidden_size), HEADROOM * 12, 12.0)
    make(config, {(2, "down_proj"): fits}).check_ring()
    small = replace(fits, norm_limit=HEADROOM * 12 * 0.9)
    with pytest.raises(CalibrationError, match=r"got 2\^31\.2 for down_proj in layer 2"):
        make(config, {(2, "down_proj"): small}).check_ring()


def test_the_file_gives_back_what_was_saved(tmp_path: Path, config: ModelConfig) -> None:
    saved, path = make(config), tmp_path / "scales.safetensors"
    save_calibration(saved, path)
    loaded = Calibration.load(path, config, MODEL, LINEAR)
    assert (loaded.model_digest, loaded.linear_digest, loaded.tokens) == (MODEL, LINEAR, 1234)
    assert loaded.sites.keys() == saved.sites.keys()
    for site, scales in saved.sites.items():
        # An exact norm is that of one row, and identifies its token.
        assert loaded.sites[site].max_norm == coarse(scales.max_norm) != scales.max_norm
        assert loaded.sites[site].input_scale == scales.input_scale
        assert loaded.sites[site].norm_limit == scales.norm_limit
        assert torch.equal(loaded.sites[site].weight_scale, scales.weight_scale)
    other = "c" * 64
    with pytest.raises(CalibrationError, match=f"model_digest: got {MODEL}, expected {other}"):
        Calibration.load(path, config, other, LINEAR)
    with pytest.raises(CalibrationError, match=f"linear_digest: got {LINEAR}, expected {other}"):
        Calibration.load(path, config, MODEL, other)
    # A TEE without linear weights has none to compare.
    assert Calibration.load(path, config, MODEL).linear_digest == LINEAR


NAME = "1.down_proj.weight_scale"
METADATA = {
    "format": "tsqp-calibration",
    "version": "1",
    "model_digest": MODEL,
    "linear_digest": LINEAR,
    "tokens": "7",
}


@each_row(
    ("metadata", "tensors", "said"),
    [
        ({"version": "2"}, {}, "version: got '2', expected 1"),
        ({"format": "tsqp-pads"}, {}, "format: got 'tsqp-pads', expected tsqp-calibration"),
        ({"linear_digest": None}, {}, "linear_digest: got nothing, expected 64 hexadecimal"),
        ({"tokens": "many"}, {}, "tokens: got 'many', expected a number"),
        ({"colour": "red"}, {}, "metadata 'colour': got an unknown key"),
        ({}, {NAME: None}, f"{NAME}: got no such tensor, expected F32 "),
        ({}, {NAME: torch.ones(47)}, f"{NAME}: got F32 .47., expected F32 .48."),
        ({}, {NAME: torch.linspace(0, 1, 48)}, f"{NAME}: got 0, expected positive"),
        ({}, {NAME: torch.full((48,), math.inf)}, f"{NAME}: got inf, expected positive"),
        ({}, {"9.o_proj.weight_scale": torch.ones(48)}, "a tensor that the model does not expl"),
        ({}, {"norm_limit": torch.full((3, 4), 2.0**31).double()}, "norm_limit: got 2.147.*at mos"),
        ({}, {"input_scale": torch.ones(2, 4).double()}, r"input_scale: got F64 \[2, 4\]"),
        ({}, {"max_norm": torch.full((3, 4), 1e9).double()}, "ring Z_2.32: got 2"),
    ],
)
def test_a_file_that_is_not_this_models_is_refused(
    tmp_path: Path,
    config: ModelConfig,
    metadata: dict[str, str | None],
    tensors: dict[str, torch.Tensor | None],
    said: str,
) -> None:
    path = tmp_path / "c"
    save_calibration(make(config), path)
    entries = {name: one for name, one in (load_file(path) | tensors).items() if one is not None}
    stated = {name: one for name, one in (METADATA | metadata).items() if one is not None}
    save_file(entries, path, stated)
    with pytest.raises(CalibrationError, match=said):
        Calibration.load(path, config, MODEL)


def test_a_damaged_or_missing_or_other_file_is_refused(tmp_path: Path, config: ModelConfig) -> None:
    (tmp_path / "a").write_bytes(b"\x80\x02pickle")
    for name in ("a", "missing"):
        with pytest.raises(CalibrationError, match="expected a file made by tsqp calibrate"):
            Calibration.load(tmp_path / name, config, MODEL)
    save_calibration(make(config), tmp_path / "a")
    pinned = Manifest(version=1, files={"config.json": MODEL}, tensors={})
    with pytest.raises(ManifestError, match="calibration"):
        Calibration.load(tmp_path / "a", config, MODEL, manifest=pinned)


def test_weights_that_the_file_was_not_made_from_are_refused(
    config: ModelConfig, model: SavedModel
) -> None:
    calibration = make(config)
    scales = calibration.sites[0, "qkv_proj"]
    largest = MAX_SUM / scales.norm_limit
    calibration.check_weights((0, "qkv_proj"), scales.weight_scale, largest)
    with pytest.raises(CalibrationError, match=r"qkv_proj in layer 0: norm limit .*: got 1e"):
        calibration.check_weights((0, "qkv_proj"), scales.weight_scale, largest * 1.01)
    with pytest.raises(CalibrationError, match="qkv_proj in layer 0: weight scales"):
        calibration.check_weights((0, "qkv_proj"), scales.weight_scale * 1.01, largest)
    checkpoint = Checkpoint(model.directory)
    head = load_quantized(checkpoint, config, 2, "lm_head")
    # Two digits, and below them what cannot wrap whatever the weights are.
    assert [*map(largest_input, (518, 2048, 8192))] == [32_639, 8256, 2064]
    here = DynamicSite(load_head_scale(checkpoint, config), None, torch.float32, 127)
    sites = IntegerSites(calibration, {}, torch.float32, here)
    sites.check_weights((2, "lm_head"), head)
    with pytest.raises(CalibrationError, match="lm_head: weight scales"):
        sites.check_weights((2, "lm_head"), replace(head, scale=head.scale * 2))
    with pytest.raises(LookupError, match="does not leave"):
        IntegerSites(calibration, {}, torch.float32)[2, "lm_head"]


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
        assert site.encode(x) is x
        assert torch.equal(site.decode(y, x), expected)


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
    """A weight, its site (`head`: with scales of its own for each row), its check, and a pad."""

    def __init__(
        self,
        dtype: torch.dtype = torch.float32,
        rows: int = 3,
        *,
        bias: bool = True,
        head: int = 0,
    ) -> None:
        self.weight = torch.randint(-127, 128, (75, 130)).to(torch.int8)
        limit = (2**31 - 1) / float(self.weight.double().norm(dim=1).max())
        scales = SiteScales(0.01, torch.rand(75), limit, 1.0)
        bias_O = torch.randn(75).to(dtype) if bias else None
        place: Any = (0, "o_proj")
        sites = IntegerSites(
            Calibration({place: scales}, "", "", 1),
            {} if bias_O is None else {place: bias_O},
            dtype,
        )
        self.site = DynamicSite(torch.rand(75), bias_O, dtype, head) if head else sites[place]
        self.check = ExactCheck.draw(self.weight, Randomness())
        r = Randomness().ring(rows, 130)
        self.factors = Factors(r, ring_product(r, self.weight))
        self.x = torch.randn(rows, 130).to(dtype)

    def padded(self, *, checked: bool = True) -> PaddedSite:
        words = {7: (self.factors.r, self.factors.u)}
        pads: Any = SimpleNamespace(words=lambda site, _: words[site])
        return PaddedSite(self.site, 7, pads, self.check if checked else None)


@each_row(
    ("dtype", "rows", "bias", "checked", "head"),
    [
        (torch.float32, 9, False, True, 0),
        (torch.bfloat16, 1, True, True, 0),
        (torch.float32, 3, True, False, 0),
        (torch.bfloat16, 1, True, True, 127),
        (torch.float32, 5, True, True, 32_639),
    ],
)
def test_both_passes_equal_the_stages(
    compiled: str, dtype: torch.dtype, rows: int, bias: bool, checked: bool, head: int
) -> None:
    """And what torch computes without compiled kernels, and the TEE without a pad."""
    made = Parts(dtype, rows, bias=bias, head=head)
    site, factors, x = made.site, made.factors, made.x
    if head:
        x *= (10.0 ** torch.arange(rows)[:, None]).to(dtype)
        x[0] = 0.0 if rows > 1 else x[0]
    hidden = made.padded(checked=checked).hide(x)
    encoded = site.encode(x)
    (sent,) = Pad().mask(encoded, factors).sent
    assert torch.equal(hidden.encoded, encoded)
    assert torch.equal(hidden.sent[0], cast("torch.Tensor", sent))
    y = ring_product(hidden.sent[0], made.weight)
    revealed = hidden.reveal([y])
    assert revealed is not None
    assert torch.equal(revealed, site.decode(y - factors.u, x))
    with using_kernels("torch"):
        site.compiled = False
        alone = site.encode(x)
        assert torch.equal(encoded, alone)
        assert torch.equal(revealed, site.decode(ring_product(alone, made.weight), x))
    if isinstance(site, DynamicSite):
        assert int(encoded.abs().max()) == head
    if head == 127:
        here = native_sites.linear8(x, made.weight, site.factor_O, site.bias_O)
        assert torch.equal(revealed, here)


@each_row(("dtype", "head"), [(torch.float32, 0), (torch.bfloat16, 127)])
def test_a_wrong_product_is_not_revealed(compiled: str, dtype: torch.dtype, head: int) -> None:
    made = Parts(dtype, 4, head=head)
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
    assert repr(Seed(bytes(32), (1,))) == "Seed(shape=(1,))"


@each_row(
    ("head", "value"),
    [(False, 1e9), (False, math.nan), (False, math.inf), (True, math.nan), (True, -math.inf)],
)
def test_an_input_out_of_range_is_refused_before_it_is_sent(
    compiled: str, head: bool, value: float
) -> None:
    made = Parts(head=head)
    made.x[1, 129] = value
    said = "lm_head: input row" if head else "o_proj in layer 0: length of an input row"
    for hide in (made.padded().hide, made.site.encode):
        with pytest.raises(ActivationRangeError, match=said):
            hide(made.x)
    one = Parts(rows=1)
    if isinstance(one.site, IntegerSite):  # the limit is that of the ring
        norm = float(one.x.norm()) / one.site.step
        one.padded().hide(one.x * (one.site.row_limit / norm * 0.99))
        with pytest.raises(ActivationRangeError):
            one.padded().hide(one.x * (one.site.row_limit / norm * 1.01))
