"""What is multiplied, and what becomes of the product: integers by fixed scales, and biases."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from protocol.errors import ActivationRangeError, CalibrationError, ModelError
from protocol.messages import FUSED_MODULES
from protocol.model.checkpoint import Checkpoint
from protocol.model.config import read_config
from protocol.model.identity import model_digest
from protocol.model.quantized import QuantizedLinear, load_head_scale, load_quantized
from tee_side.model.local_operators import _dynamic_product
from tee_side.protect.calibration import Calibration
from tee_side.protect.sites import (
    Biases,
    DynamicSite,
    FloatSites,
    IntegerSites,
    load_biases,
    tensors_of,
)
from tests.kit.kernels import KERNELS, using_kernels
from tests.kit.model import SavedModel

Models = Callable[..., SavedModel]


def _biases(model: SavedModel) -> Biases:
    config, checkpoint = read_config(model.directory), Checkpoint(model.directory)
    return load_biases(checkpoint, config, FUSED_MODULES, torch.float32)


def _integers(model: SavedModel, dtype: torch.dtype = torch.float32) -> IntegerSites:
    config, checkpoint = read_config(model.directory), Checkpoint(model.directory)
    calibration = Calibration.load(model.calibration, config, model_digest(config, checkpoint))
    biases = load_biases(checkpoint, config, FUSED_MODULES, dtype)
    return IntegerSites(calibration, biases, dtype)


def test_a_model_without_biases_has_none(saved_model: Models) -> None:
    assert _biases(saved_model("llama")) == {}


def test_biases_of_the_modules_stand_side_by_side(saved_model: Models) -> None:
    model = saved_model("qwen2")
    biases = _biases(model)
    assert set(biases) == {(layer, "qkv_proj") for layer in range(3)}
    for layer, block in enumerate(model.reference.model.layers):
        parts = [getattr(block.self_attn, name).bias for name in FUSED_MODULES["qkv_proj"]]
        assert torch.equal(biases[layer, "qkv_proj"], torch.cat(parts))


def test_biases_of_all_operators_are_read(saved_model: Models) -> None:
    model = saved_model("llama", attention_bias=True, mlp_bias=True)
    biases = _biases(model)
    assert set(biases) == {(layer, operator) for layer in range(3) for operator in FUSED_MODULES}
    up = model.reference.model.layers[1].mlp.up_proj.bias
    assert torch.equal(biases[1, "gate_up_proj"][-len(up) :], up)


def test_biases_that_are_missing_are_a_model_error(
    saved_model: Models, tmp_path_factory: pytest.TempPathFactory
) -> None:
    import shutil

    from safetensors.torch import load_file, save_file

    directory = tmp_path_factory.mktemp("model") / "m"
    shutil.copytree(saved_model("qwen2").directory, directory)
    tensors = load_file(directory / "model.safetensors")
    del tensors["model.layers.1.self_attn.k_proj.bias"]
    save_file(tensors, directory / "model.safetensors")
    with pytest.raises(ModelError, match=r"layers\.1\.self_attn\.k_proj\.bias"):
        load_biases(Checkpoint(directory), read_config(directory), ["qkv_proj"], torch.float32)


def test_floats_pass_and_get_their_bias(saved_model: Models) -> None:
    biases = _biases(saved_model("qwen2"))
    sites = FloatSites(biases)
    x, y = torch.randn(3, 48), torch.randn(3, 96 + 96)
    assert sites[0, "qkv_proj"].encode(x) is x
    width = len(biases[1, "qkv_proj"])
    product = torch.randn(3, width)
    assert torch.equal(sites[1, "qkv_proj"].decode(product, x), product + biases[1, "qkv_proj"])
    assert sites[0, "gate_up_proj"].decode(y, x) is y


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_integers_there_and_back_are_the_operator_within_its_scales(
    saved_model: Models, dtype: torch.dtype
) -> None:
    model = saved_model("qwen2")
    sites = _integers(model, dtype)
    config, checkpoint = read_config(model.directory), Checkpoint(model.directory)
    weights = load_quantized(checkpoint, config, 1, "qkv_proj")
    x = torch.randn(5, 48).to(dtype)
    encoded = sites[1, "qkv_proj"].encode(x)
    assert encoded.dtype == torch.int32
    product = (encoded.long() @ weights.weight.long().t()).to(torch.int32)
    found = sites[1, "qkv_proj"].decode(product, x)
    assert found.dtype == dtype
    attention = model.reference.model.layers[1].self_attn
    expected = torch.cat([m(x.float()) for m in (attention.q_proj, attention.k_proj)], -1)
    difference = (found[:, : expected.shape[1]].float() - expected).abs()
    assert difference.max() < 0.1
    # The bias is in it: without it the difference would be as large as the bias.
    assert attention.q_proj.bias.abs().max() > 0.3


def test_rows_are_quantised_each_by_itself(saved_model: Models) -> None:
    """Or a token's integers would depend on its neighbours in the batch."""
    sites, x = _integers(saved_model("llama")), torch.randn(9, 48)
    x[4] *= 3
    together = sites[0, "qkv_proj"].encode(x)
    for row in range(9):
        assert torch.equal(sites[0, "qkv_proj"].encode(x[row : row + 1])[0], together[row])


@pytest.mark.parametrize("value", [1e9, float("inf"), float("nan")])
def test_an_input_that_could_wrap_is_refused_with_its_site(
    saved_model: Models, value: float
) -> None:
    sites = _integers(saved_model("llama"))
    x = torch.ones(3, 96)
    x[1, 5] = value
    with pytest.raises(ActivationRangeError) as caught:
        sites[2, "down_proj"].encode(x)
    assert caught.value.where == "down_proj in layer 2: length of an input row"
    assert "calibrate" in caught.value.expected


def test_scales_of_other_weights_are_refused(saved_model: Models) -> None:
    model = saved_model("llama")
    sites = _integers(model)
    config, checkpoint = read_config(model.directory), Checkpoint(model.directory)
    sites.check_weights((1, "o_proj"), load_quantized(checkpoint, config, 1, "o_proj"))
    with pytest.raises(CalibrationError, match="o_proj in layer 1"):
        sites.check_weights((1, "o_proj"), load_quantized(checkpoint, config, 2, "o_proj"))


def test_tensors_of_sites_are_weights_and_the_biases_that_there_are(saved_model: Models) -> None:
    config = read_config(saved_model("qwen2").directory)
    found = tensors_of([(1, "qkv_proj"), (2, "down_proj")], config)
    prefix = "model.layers.1.self_attn."
    assert set(found) == {
        *(f"{prefix}{m}.{kind}" for m in FUSED_MODULES["qkv_proj"] for kind in ("weight", "bias")),
        "model.layers.2.mlp.down_proj.weight",
    }
    assert found[f"{prefix}q_proj.bias"] == found[f"{prefix}q_proj.weight"][:1]


def test_scales_of_another_lm_head_are_refused(saved_model: Models) -> None:
    model = saved_model("llama")
    config, checkpoint = read_config(model.directory), Checkpoint(model.directory)
    head = load_quantized(checkpoint, config, 2, "lm_head")
    scale = load_head_scale(checkpoint, config)
    calibration = Calibration.load(model.calibration, config, model_digest(config, checkpoint))
    sites = IntegerSites(calibration, {}, torch.float32, scale)
    sites.check_weights((2, "lm_head"), head)
    with pytest.raises(CalibrationError, match="lm_head: weight scales"):
        sites.check_weights((2, "lm_head"), replace(head, scale=head.scale * 2))
    with pytest.raises(LookupError, match="does not leave"):
        _integers(model)[2, "lm_head"]


@pytest.mark.parametrize("kernels", KERNELS)
def test_a_row_that_is_not_finite_in_the_tee_is_not_finite_behind_it(kernels: str) -> None:
    """Where nothing is sent nothing is refused: the logits say so."""
    weight = torch.randint(-127, 128, (5, 9)).to(torch.int8)
    x = torch.randn(3, 9)
    x[1, 4] = torch.nan
    with using_kernels(kernels):
        site = DynamicSite(torch.rand(5) + 0.1, None, torch.float32)
        found = _dynamic_product(QuantizedLinear(weight, site.factor_O, {}), site, x)
    assert found.isfinite().all(dim=1).tolist() == [True, False, True]
