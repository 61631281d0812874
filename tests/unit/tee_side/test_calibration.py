"""Activation scales: what they refuse, that nothing wraps, and their file."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from protocol.errors import ActivationRangeError, CalibrationError
from protocol.integer import MAX_IN_FEATURES, ring_product
from protocol.messages import FUSED_MODULES
from protocol.model.config import ModelConfig, read_config
from tee_side.protect.calibration import (
    HEADROOM,
    MAX_SUM,
    Calibration,
    Site,
    SiteScales,
    calibration_path,
    norm_limit,
)
from tee_side.protect.sites import IntegerSite, IntegerSites
from tests.kit.model import SavedModel
from tests.kit.rows import each_row
from tsqp.calibrate import coarse, save_calibration

MODEL, LINEAR = "a" * 64, "b" * 64


def scales_of(weight_NI: torch.Tensor, input_scale: float = 0.5) -> SiteScales:
    """Return the scales of an int8 weight whose rows all have scale 1."""
    largest = float(weight_NI.double().norm(dim=1).max())
    return SiteScales(input_scale, torch.ones(len(weight_NI)), norm_limit(largest), 1.0)


def site_of(scales: SiteScales, dtype: torch.dtype) -> IntegerSite:
    made = Calibration({(0, "o_proj"): scales}, "", "", 1)
    return IntegerSites(made, {}, dtype)[0, "o_proj"]


def make(config: ModelConfig, change: dict[Site, SiteScales] | None = None) -> Calibration:
    """Return a calibration with other numbers at every site."""
    sites: dict[Site, SiteScales] = {}
    for layer in range(config.num_hidden_layers):
        for column, (operator, modules) in enumerate(FUSED_MODULES.items()):
            size = sum(config.module_shape(module)[0] for module in modules)
            scale = torch.linspace(0.001, 0.002 + layer, size)
            numbers = (0.25 + layer + 8 * column, scale, 1e6 + column, 10.0 + layer)
            sites[layer, operator] = SiteScales(*numbers)
    sites |= change or {}
    return Calibration(sites, MODEL, LINEAR, 1234)


@pytest.fixture
def config(saved_model: Callable[..., SavedModel]) -> ModelConfig:
    return read_config(saved_model().directory)


# ------------------------------------------------------------------------------ encode and decode


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_inputs_are_rounded_to_the_nearest_step_and_ties_to_even(dtype: torch.dtype) -> None:
    scales = SiteScales(0.5, torch.ones(1), 1e6, 1.0)
    x = torch.tensor([[0.25, 0.75, -0.25, -0.75, 0.26, 3.0, -7.5]], dtype=dtype)
    encoded = scales.encode(x)
    assert encoded.dtype == torch.int32
    assert encoded.tolist() == [[0, 2, 0, -2, 1, 6, -15]]


def test_a_row_has_the_same_integers_alone_and_in_a_batch() -> None:
    scales = SiteScales(0.0137, torch.rand(33) * 0.01, 1e7, 1.0)
    x_TI = torch.randn(9, 77, generator=torch.Generator().manual_seed(1))
    together = scales.encode(x_TI)
    assert torch.equal(together, torch.cat([scales.encode(x_TI[[t]]) for t in range(9)]))
    y_TN = torch.randint(-MAX_SUM, MAX_SUM, (9, 33), dtype=torch.int32)
    decode = site_of(scales, torch.float32).decode
    decoded = decode(y_TN, x_TI)
    alone = torch.cat([decode(y_TN[[t]], x_TI[[t]]) for t in range(9)])
    assert torch.equal(decoded, alone)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_sums_are_scaled_back_in_float32(dtype: torch.dtype) -> None:
    weight_scale = torch.tensor([0.5, 0.003, 1e-6])
    scales = SiteScales(0.01, weight_scale, 1e6, 1.0)
    y = torch.tensor([[100, -123_457, MAX_SUM], [0, 1, -MAX_SUM]], dtype=torch.int32)
    expected = y.double() * weight_scale.double() * 0.01
    decoded = site_of(scales, dtype).decode(y, torch.empty(2, 1))
    assert decoded.dtype == dtype
    # Three roundings of float32, then the one to the dtype.
    error = 3 * 2.0**-24 + torch.finfo(dtype).eps
    assert torch.all((decoded.double() - expected).abs() <= error * expected.abs() + 1e-7)


@each_row("value", [float("nan"), float("inf"), -float("inf"), 1e30])
@pytest.mark.parametrize("row", [0, 1, 2])
def test_a_row_that_is_not_finite_or_far_too_large_is_refused(value: float, row: int) -> None:
    scales = SiteScales(0.5, torch.ones(1), 1e6, 1.0)
    x_TI = torch.ones(3, 8)
    x_TI[row, 5] = value
    with pytest.raises(ActivationRangeError, match=r"length of an input row: got .*expected"):
        scales.encode(x_TI)


@pytest.mark.parametrize(("longer", "got"), [(1.01, 2), (1.99, 2), (2.01, 3), (77.5, 78)])
def test_the_error_says_how_much_too_long_a_row_is_and_no_more(longer: float, got: int) -> None:
    # The norm itself would name the token to whoever reads the log.
    scales = SiteScales(0.5, torch.ones(1), 1000.0, 1.0)
    with pytest.raises(ActivationRangeError) as raised:
        scales.encode(torch.tensor([[300.0, 400.0]]) * 0.995 * longer)
    assert raised.value.got == f"less than {got} times"


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
    scales = scales_of(weight_NI)
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


@pytest.mark.parametrize("size", [8, 2048, 28_672, MAX_IN_FEATURES])
def test_rounding_in_the_norm_cannot_let_a_wrapping_row_through(size: int) -> None:
    # Weights and inputs that are all alike: the largest sum, and the worst case for a float32 one.
    weight_NI = torch.full((1, size), 127, dtype=torch.int8)
    scales = scales_of(weight_NI, input_scale=1.0)
    value = math.ceil((MAX_SUM + 1) / (127 * size))
    with pytest.raises(ActivationRangeError):
        scales.encode(torch.full((1, size), float(value)))
    below = math.floor(0.99 * MAX_SUM / (127 * size))
    x_int = scales.encode(torch.full((1, size), float(below)))
    assert int(x_int.long().sum() * 127) <= MAX_SUM


def test_weights_that_are_all_zero_still_bound_the_inputs() -> None:
    assert norm_limit(0.0) == MAX_SUM
    with pytest.raises(ActivationRangeError):
        SiteScales(1.0, torch.ones(1), norm_limit(0.0), 0.0).encode(torch.tensor([[2.0**31]]))


# ----------------------------------------------------------------------------------- ring and file


def test_headroom_is_how_much_larger_than_the_largest_row_an_input_may_be() -> None:
    assert SiteScales(0.1, torch.ones(1), 5000.0, 20.0).headroom == pytest.approx(25.0)
    assert SiteScales(0.1, torch.ones(1), 5000.0, 0.0).headroom == math.inf


def test_a_ring_that_is_too_small_is_refused_with_both_values(config: ModelConfig) -> None:
    site: Site = (2, "down_proj")
    size = config.hidden_size
    # Its largest row is 12; 2^2.1 times as large as the ring has room for.
    limit = HEADROOM * 12 / 2**2.1
    small = make(config, {site: SiteScales(1.0, torch.ones(size), limit, 12.0)})
    with pytest.raises(CalibrationError) as raised:
        small.check_ring()
    assert str(raised.value) == (
        "ring Z_2^32: got 2^33.1 for down_proj in layer 2, expected at most 2^31"
    )
    make(config, {site: SiteScales(1.0, torch.ones(size), HEADROOM * 12, 12.0)}).check_ring()


def test_the_file_is_small_and_gives_back_what_was_saved(
    tmp_path: Path, config: ModelConfig
) -> None:
    saved, path = make(config), tmp_path / "scales.safetensors"
    save_calibration(saved, path)
    loaded = Calibration.load(path, config, MODEL, LINEAR)
    assert [p.name for p in tmp_path.iterdir()] == ["scales.safetensors"]
    assert (loaded.model_digest, loaded.linear_digest, loaded.tokens) == (MODEL, LINEAR, 1234)
    assert loaded.sites.keys() == saved.sites.keys()
    for site, scales in saved.sites.items():
        # An exact norm is that of one row, and identifies its token.
        assert loaded.sites[site].max_norm == coarse(scales.max_norm) != scales.max_norm
        assert loaded.sites[site].input_scale == scales.input_scale
        assert loaded.sites[site].norm_limit == scales.norm_limit
        assert torch.equal(loaded.sites[site].weight_scale, scales.weight_scale)


def test_a_save_that_fails_leaves_the_old_file(tmp_path: Path, config: ModelConfig) -> None:
    (tmp_path / "taken").mkdir()
    with pytest.raises(OSError, match="directory"):
        save_calibration(make(config), tmp_path / "taken")
    assert [p.name for p in tmp_path.iterdir()] == ["taken"]


def test_another_models_file_is_refused_with_both_digests(
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


def rewritten(
    path: Path,
    config: ModelConfig,
    tensors: dict[str, torch.Tensor | None] | None = None,
    **metadata: str | None,
) -> None:
    """Save a calibration and change its file; None takes an entry away."""
    save_calibration(make(config), path)
    good = {
        "format": "tsqp-calibration",
        "version": "1",
        "model_digest": MODEL,
        "linear_digest": LINEAR,
        "tokens": "7",
    }
    entries = load_file(path) | (tensors or {})
    save_file(
        {name: tensor for name, tensor in entries.items() if tensor is not None},
        path,
        {name: value for name, value in (good | metadata).items() if value is not None},
    )


@pytest.mark.parametrize(
    ("metadata", "said"),
    [
        ({"version": "2"}, "version: got '2', expected 1"),
        ({"version": None}, "version: got nothing, expected 1"),
        ({"format": "tsqp-pads"}, "format: got 'tsqp-pads', expected tsqp-calibration"),
        ({"model_digest": "xyz"}, "model_digest: got 'xyz', expected 64 hexadecimal"),
        ({"linear_digest": None}, "linear_digest: got nothing, expected 64 hexadecimal"),
        ({"tokens": "many"}, "tokens: got 'many', expected a number"),
        ({"tokens": "0"}, "tokens: got '0', expected a number"),
        ({"colour": "red"}, "metadata 'colour': got an unknown key"),
    ],
)
def test_metadata_that_is_not_ours_is_refused(
    tmp_path: Path, config: ModelConfig, metadata: dict[str, str | None], said: str
) -> None:
    path = tmp_path / "c"
    rewritten(path, config)
    Calibration.load(path, config, MODEL)
    rewritten(path, config, **metadata)
    with pytest.raises(CalibrationError, match=said):
        Calibration.load(path, config, MODEL)


NAME = "1.down_proj.weight_scale"


@pytest.mark.parametrize(
    ("name", "tensor", "said"),
    [
        (NAME, None, f"{NAME}: got no such tensor, expected F32 "),
        (NAME, torch.ones(47), f"{NAME}: got F32 .47., expected F32 .48."),
        (NAME, torch.ones(48, dtype=torch.float16), f"{NAME}: got F16 .48., expected F32 .48."),
        (NAME, torch.linspace(-1, 1, 48), f"{NAME}: got -1, expected positive finite numbers"),
        (NAME, torch.linspace(0, 1, 48), f"{NAME}: got 0, expected positive"),
        (NAME, torch.full((48,), float("nan")), f"{NAME}: got nan, expected positive"),
        ("9.down_proj.weight_scale", torch.ones(48), "a tensor that the model does not explain"),
        ("norm_limit", None, "norm_limit: got no such tensor"),
        ("norm_limit", torch.full((3, 4), math.inf).double(), "norm_limit: got inf"),
        (
            "norm_limit",
            torch.full((3, 4), 2.0**31).double(),
            "norm_limit: got 2.147.*at most 21",
        ),
        ("input_scale", torch.zeros(3, 4).double(), "input_scale: got 0"),
        ("input_scale", torch.ones(2, 4).double(), r"input_scale: got F64 \[2, 4\]"),
        ("max_norm", -torch.ones(3, 4).double(), "max_norm: got -1"),
        ("max_norm", torch.full((3, 4), 1e9).double(), "ring Z_2.32: got 2"),
    ],
)
def test_scales_that_are_not_this_models_are_refused(
    tmp_path: Path, config: ModelConfig, name: str, tensor: torch.Tensor | None, said: str
) -> None:
    path = tmp_path / "c"
    rewritten(path, config, {name: tensor})
    with pytest.raises(CalibrationError, match=said):
        Calibration.load(path, config, MODEL)


@pytest.mark.parametrize("content", [b"", b"\x80\x02pickle", b"\x10\0\0\0\0\0\0\0{}"])
def test_a_damaged_file_is_refused(tmp_path: Path, config: ModelConfig, content: bytes) -> None:
    path = tmp_path / "c"
    path.write_bytes(content)
    with pytest.raises(CalibrationError, match="expected a file made by tsqp calibrate"):
        Calibration.load(path, config, MODEL)
    with pytest.raises(CalibrationError, match="expected a file made by tsqp calibrate"):
        Calibration.load(tmp_path / "missing", config, MODEL)


def test_weights_that_the_file_was_not_made_from_are_refused(config: ModelConfig) -> None:
    calibration = make(config)
    scales = calibration.sites[0, "qkv_proj"]
    largest = MAX_SUM / scales.norm_limit
    calibration.check_weights((0, "qkv_proj"), scales.weight_scale, largest)
    with pytest.raises(CalibrationError, match=r"qkv_proj in layer 0: norm limit .*: got 1e"):
        calibration.check_weights((0, "qkv_proj"), scales.weight_scale, largest * 1.01)
    with pytest.raises(CalibrationError, match="qkv_proj in layer 0: weight scales"):
        calibration.check_weights((0, "qkv_proj"), scales.weight_scale * 1.01, largest)


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
