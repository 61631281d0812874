"""Activation scales and their file: what they refuse, that nothing wraps, and biases."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from protocol.errors import ActivationRangeError, CalibrationError, ManifestError, ModelError
from protocol.integer import MAX_IN_FEATURES, ring_product
from protocol.messages import FUSED_MODULES
from protocol.model.checkpoint import Checkpoint
from protocol.model.config import ModelConfig, read_config
from protocol.model.manifest import Manifest
from protocol.model.quantized import load_head_scale, load_quantized
from tee_side.protect.calibration import (
    HEADROOM,
    MAX_SUM,
    Calibration,
    SiteScales,
    calibration_path,
    norm_limit,
)
from tee_side.protect.sites import (
    FloatSites,
    IntegerSites,
    load_biases,
)
from tee_side.words import Site
from tests.kit.kernels import KERNELS, using_kernels
from tests.kit.model import SavedModel
from tests.kit.rows import each_row
from tsqp.calibrate import coarse, save_calibration

MODEL, LINEAR = "a" * 64, "b" * 64


def make(config: ModelConfig, change: dict[Site, SiteScales] | None = None) -> Calibration:
    """Return a calibration with other numbers at every site."""
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
    """Return a model with biases of q, k and v."""
    return saved_model("qwen2")


@pytest.fixture(scope="module")
def config(model: SavedModel) -> ModelConfig:
    return read_config(model.directory)


# ---------------------------------------------------------------------------- encode and decode


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
        with using_kernels(kernels), pytest.raises(ActivationRangeError) as caught:
            IntegerSites(integers, {}, torch.float32)[2, "down_proj"].encode(x_TI)
        assert caught.value.where == "down_proj in layer 2: length of an input row"
        assert "calibrate" in caught.value.expected


@each_row(("longer", "got"), [(1.01, 2), (1.99, 2), (2.01, 3), (77.5, 78)])
def test_the_error_says_how_much_too_long_a_row_is_and_no_more(longer: float, got: int) -> None:
    # The norm itself would name the token to a reader of the log.
    scales = SiteScales(0.5, torch.ones(1), 1000.0, 1.0)
    with pytest.raises(ActivationRangeError) as raised:
        scales.encode(torch.tensor([[300.0, 400.0]]) * 0.995 * longer)
    assert raised.value.got == f"less than {got} times"


def _scales_of(weight_NI: torch.Tensor, input_scale: float) -> SiteScales:
    """Return the scales of an int8 weight whose rows all have scale 1."""
    largest = float(weight_NI.double().norm(dim=1).max())
    return SiteScales(input_scale, torch.ones(len(weight_NI)), norm_limit(largest), 1.0)


@given(
    st.integers(2, 40),
    st.integers(0, 2**32),
    st.sampled_from([0.5, 0.99, 0.9999, 1.001, 1.5, 300.0]),
)
def test_no_sum_wraps_or_the_row_is_refused(size: int, seed: int, times: float) -> None:
    # The worst input for a column is the column itself; nothing gets nearer to the bound.
    generator = torch.Generator().manual_seed(seed)
    weight_NI = torch.randint(-127, 128, (5, size), generator=generator, dtype=torch.int8)
    weight_NI[0, 0] = 127
    scales = _scales_of(weight_NI, 0.5)
    worst = weight_NI[weight_NI.double().norm(dim=1).argmax()].double()
    x_TI = (times * scales.norm_limit * scales.input_scale * worst / worst.norm())[None].float()
    try:
        x_int = scales.encode(x_TI)
    except ActivationRangeError:
        assert times >= 0.995
        return
    exact = x_int.long() @ weight_NI.long().t()
    assert times < 1
    assert exact.abs().max() <= MAX_SUM
    assert torch.equal(ring_product(x_int, weight_NI).long(), exact)


@each_row("size", [8, 2048, 28_672, MAX_IN_FEATURES])
def test_rounding_in_the_norm_cannot_let_a_wrapping_row_through(size: int) -> None:
    # Weights and inputs that are all alike: the largest sum, and the worst case for a float32 one.
    scales = _scales_of(torch.full((1, size), 127, dtype=torch.int8), input_scale=1.0)
    value = math.ceil((MAX_SUM + 1) / (127 * size))
    with pytest.raises(ActivationRangeError):
        scales.encode(torch.full((1, size), float(value)))
    below = math.floor(0.99 * MAX_SUM / (127 * size))
    x_int = scales.encode(torch.full((1, size), float(below)))
    assert int(x_int.long().sum() * 127) <= MAX_SUM
    # Weights that are all zero still bound the inputs.
    with pytest.raises(ActivationRangeError):
        SiteScales(1.0, torch.ones(1), norm_limit(0.0), 0.0).encode(torch.tensor([[2.0**31]]))


# -------------------------------------------------------------------------------- ring and file


def test_a_ring_that_is_too_small_is_refused_with_both_values(config: ModelConfig) -> None:
    fits = SiteScales(1.0, torch.ones(config.hidden_size), HEADROOM * 12, 12.0)
    make(config, {(2, "down_proj"): fits}).check_ring()
    with pytest.raises(CalibrationError, match=r"got 2\^31\.2 for down_proj in layer 2"):
        make(config, {(2, "down_proj"): replace(fits, norm_limit=HEADROOM * 12 * 0.9)}).check_ring()
    # Its largest row is 12; 2^2.1 times as large as the ring has room for.
    small = replace(fits, norm_limit=HEADROOM * 12 / 2**2.1)
    with pytest.raises(CalibrationError) as raised:
        make(config, {(2, "down_proj"): small}).check_ring()
    assert str(raised.value) == (
        "ring Z_2^32: got 2^33.1 for down_proj in layer 2, expected at most 2^31"
    )


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
    # A save that fails leaves no file half written.
    (tmp_path / "taken").mkdir()
    with pytest.raises(OSError, match="directory"):
        save_calibration(saved, tmp_path / "taken")
    assert {one.name for one in tmp_path.iterdir()} == {path.name, "taken"}


def test_the_file_of_another_model_is_refused_with_both_digests(
    tmp_path: Path, config: ModelConfig
) -> None:
    path, other = tmp_path / "c", "c" * 64
    save_calibration(make(config), path)
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
        ({"version": "11"}, {}, "version: got '11', expected 1"),
        ({"version": None}, {}, "version: got nothing, expected 1"),
        ({"format": "tsqp-pads"}, {}, "format: got 'tsqp-pads', expected tsqp-calibration"),
        ({"model_digest": "xyz"}, {}, "model_digest: got 'xyz', expected 64 hexadecimal"),
        ({"linear_digest": None}, {}, "linear_digest: got nothing, expected 64 hexadecimal"),
        ({"tokens": "many"}, {}, "tokens: got 'many', expected a number"),
        ({"tokens": "0"}, {}, "tokens: got '0', expected a number"),
        ({"colour": "red"}, {}, "metadata 'colour': got an unknown key"),
        ({}, {NAME: None}, f"{NAME}: got no such tensor, expected F32 "),
        ({}, {NAME: torch.ones(47)}, f"{NAME}: got F32 .47., expected F32 .48."),
        ({}, {NAME: torch.ones(48).half()}, f"{NAME}: got F16 .48., expected F32 .48."),
        ({}, {NAME: torch.linspace(-1, 1, 48)}, f"{NAME}: got -1, expected positive finite num"),
        ({}, {NAME: torch.linspace(0, 1, 48)}, f"{NAME}: got 0, expected positive"),
        ({}, {NAME: torch.full((48,), math.nan)}, f"{NAME}: got nan, expected positive"),
        ({}, {NAME: torch.full((48,), math.inf)}, f"{NAME}: got inf, expected positive"),
        ({}, {"9.o_proj.weight_scale": torch.ones(48)}, "a tensor that the model does not expl"),
        ({}, {"norm_limit": None}, "norm_limit: got no such tensor"),
        ({}, {"norm_limit": torch.full((3, 4), math.inf).double()}, "norm_limit: got inf"),
        ({}, {"norm_limit": torch.full((3, 4), 2.0**31).double()}, "norm_limit: got 2.147.*at mos"),
        ({}, {"input_scale": torch.zeros(3, 4).double()}, "input_scale: got 0"),
        ({}, {"input_scale": torch.ones(2, 4).double()}, r"input_scale: got F64 \[2, 4\]"),
        ({}, {"max_norm": -torch.ones(3, 4).double()}, "max_norm: got -1"),
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
    for name, content in (("a", b""), ("b", b"\x80\x02pickle"), ("c", b"\x10" + bytes(7) + b"{}")):
        (tmp_path / name).write_bytes(content)
    for name in ("a", "b", "c", "missing"):
        with pytest.raises(CalibrationError, match="expected a file made by tsqp calibrate"):
            Calibration.load(tmp_path / name, config, MODEL)
    save_calibration(make(config), tmp_path / "a")
    pinned = Manifest(version=1, files={"config.json": MODEL}, tensors={})
    with pytest.raises(ManifestError, match="calibration"):
        Calibration.load(tmp_path / "a", config, MODEL, manifest=pinned)


def test_the_file_is_the_one_given_or_the_one_beside_the_model(tmp_path: Path) -> None:
    beside, given_path = tmp_path / "calibration.safetensors", tmp_path / "other"
    with pytest.raises(CalibrationError, match=f"expected one made by: tsqp calibrate {tmp_path}$"):
        calibration_path(tmp_path, None)
    beside.touch()
    assert calibration_path(tmp_path, None) == beside
    with pytest.raises(CalibrationError, match=f"{tmp_path} --output {given_path}$"):
        calibration_path(tmp_path, given_path)
    given_path.touch()
    assert calibration_path(tmp_path, given_path) == given_path


# ----------------------------------------------------------------------------- weights and biases


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
    head, scale = (
        load_quantized(checkpoint, config, 2, "lm_head"),
        load_head_scale(checkpoint, config),
    )
    sites = IntegerSites(calibration, {}, torch.float32, scale)
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
        site = FloatSites(found)[1, "qkv_proj"]
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
