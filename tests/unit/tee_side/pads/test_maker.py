"""What the maker puts into a store takes the mask away again, exactly."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from protocol.errors import CalibrationError, ModelError
from protocol.messages import FUSED_MODULES
from protocol.model.checkpoint import Checkpoint
from protocol.model.config import ModelConfig, read_config
from protocol.model.quantized import QuantizedLinear, load_quantized
from protocol.model.weights import CPU, load_linear
from tee_side.protect.masks.pad import Pad
from tee_side.protect.pads.layout import PadLayout, SiteShape
from tee_side.protect.pads.maker import (
    PadMaker,
    held_or,
    read_weights,
)
from tee_side.protect.pads.store import MemoryStore
from tee_side.words import Site
from tests.kit.model import SavedModel
from tsqp.cli.pads import pads, product_operations
from tsqp.lab.research.float_noise import FloatNoise

Models = Callable[..., SavedModel]

# More rows than a block of digits, and fewer.
COUNTS = (1, 3, 40)


@pytest.fixture(scope="module", params=["llama", "qwen2"])
def model(saved_model: Models, request: pytest.FixtureRequest) -> tuple[Any, Any]:
    directory = saved_model(request.param).directory
    return read_config(directory), Checkpoint(directory)


@pytest.mark.parametrize("count", COUNTS)
def test_pads_are_the_exact_products_of_the_services_own_integers(
    model: tuple[ModelConfig, Checkpoint], count: int
) -> None:
    config, checkpoint = model
    store = MemoryStore(PadLayout.of(config), 64)
    PadMaker(Pad(), read_weights(checkpoint, config, "int8")).fill(store, count)
    assert store.available == count
    indices = store.take(count)
    for site in store.layout.sites:
        r, u = store.factors(indices, site.number)
        weight = load_quantized(checkpoint, config, site.layer, site.operator).weight
        exact = r.long() @ weight.long().t()
        assert torch.equal(u, exact.to(torch.int32)), str(site)
        # Guards the test: these products do wrap.
        assert (exact.abs() >= 2**31).any()


@pytest.mark.parametrize("count", COUNTS)
def test_factors_of_float_noise_are_products_without_biases(
    model: tuple[ModelConfig, Checkpoint], count: int
) -> None:
    config, checkpoint = model
    mask = FloatNoise(sigma=3.0)
    store = MemoryStore(PadLayout.of(config), 64)
    PadMaker(mask, read_weights(checkpoint, config, "float")).fill(store, count)
    indices = store.take(count)
    for site in store.layout.sites:
        words, bits = store.factors(indices, site.number)
        fused = load_linear(
            checkpoint, config, site.layer, site.operator, dtype=torch.float32, device=CPU
        )
        expected = mask.draw(words) @ fused.weight.t()
        torch.testing.assert_close(bits.view(torch.float32), expected, rtol=0, atol=1e-4)


def test_only_the_sites_of_the_layout_are_made_and_each_is_reported(
    saved_model: Models,
) -> None:
    directory = saved_model("llama").directory
    config = read_config(directory)
    layout = PadLayout.of(config, [(0, "o_proj"), (2, "down_proj"), (1, "qkv_proj")])
    store, told = MemoryStore(layout, 4), []
    PadMaker(Pad(), read_weights(Checkpoint(directory), config, "int8")).fill(
        store, 2, lambda done, total: told.append((done, total))
    )
    assert told == [(1, 3), (2, 3), (3, 3)]
    assert store.available == 2


def test_more_than_there_is_room_for_is_a_mistake_of_the_caller(saved_model: Models) -> None:
    directory = saved_model("llama").directory
    config = read_config(directory)
    store = MemoryStore(PadLayout.of(config), 4)
    with pytest.raises(ValueError, match="got 5 to fill"):
        PadMaker(Pad(), read_weights(Checkpoint(directory), config, "int8")).fill(store, 5)
    assert (store.available, store.room) == (0, 4)


def test_a_model_that_changed_meanwhile_leaves_no_pads_and_no_batch_behind(
    saved_model: Models, tmp_path: Path
) -> None:
    directory = tmp_path / "model"
    shutil.copytree(saved_model("llama").directory, directory)
    config = read_config(directory)
    maker = PadMaker(Pad(), read_weights(Checkpoint(directory), config, "int8"))
    store = MemoryStore(PadLayout.of(config), 4)
    tensors = load_file(directory / "model.safetensors")
    name = "model.layers.1.mlp.down_proj.weight"
    tensors[name] = torch.full_like(tensors[name], torch.nan)
    save_file(tensors, directory / "model.safetensors")
    with pytest.raises(ModelError, match="another content since the file was checked"):
        maker.fill(store, 2)
    assert (store.available, store.room) == (0, 4)


def test_every_site_is_checked_once_with_the_weights_that_are_used(saved_model: Models) -> None:
    directory = saved_model("llama").directory
    config, checkpoint = read_config(directory), Checkpoint(directory)
    layout = PadLayout.of(config, [(0, "o_proj"), (2, "down_proj")])
    checked: list[Site] = []

    def check(site: Site, weights: QuantizedLinear) -> None:
        checked.append(site)
        expected = load_quantized(checkpoint, config, *site)
        assert torch.equal(weights.weight, expected.weight)
        assert torch.equal(weights.scale, expected.scale)

    store = MemoryStore(layout, 4)
    maker = PadMaker(Pad(), read_weights(checkpoint, config, "int8", check))
    maker.fill(store, 1)
    maker.fill(store, 2)
    assert checked == [(0, "o_proj"), (2, "down_proj")]
    assert store.available == 3


def test_weights_that_fail_their_check_make_no_pads_however_often_they_are_asked_for(
    saved_model: Models,
) -> None:
    directory = saved_model("llama").directory
    config = read_config(directory)

    def check(site: Site, weights: QuantizedLinear) -> None:
        if site == (1, "down_proj"):
            raise CalibrationError("down_proj in layer 1", got="others", expected="the same")

    store = MemoryStore(PadLayout.of(config), 4)
    maker = PadMaker(Pad(), read_weights(Checkpoint(directory), config, "int8", check))
    for _ in range(2):
        with pytest.raises(CalibrationError, match="down_proj in layer 1"):
            maker.fill(store, 1)
    assert (store.available, store.room) == (0, 4)


def test_weights_in_memory_are_used_instead_of_read(saved_model: Models) -> None:
    directory = saved_model("llama").directory
    config, checkpoint = read_config(directory), Checkpoint(directory)
    layout = PadLayout.of(config, [(0, "o_proj"), (1, "o_proj")])
    held: dict[Site, QuantizedLinear] = {}
    read: list[Site] = []

    def streamed(shape: SiteShape) -> torch.Tensor:
        read.append(shape.site)
        return load_quantized(checkpoint, config, *shape.site).weight

    store = MemoryStore(layout, 8)
    maker = PadMaker(Pad(), held_or(held, streamed))
    maker.fill(store, 1)
    assert read == [(0, "o_proj"), (1, "o_proj")]
    # Held later than the maker was made, and other weights than those on disk, to tell them apart.
    held[1, "o_proj"] = load_quantized(checkpoint, config, 2, "o_proj")
    read.clear()
    maker.fill(store, 2)
    assert read == [(0, "o_proj")]
    store.take(1)
    indices = store.take(2)
    for site, layer in ((1, 0), (6, 2)):
        r, u = store.factors(indices, site)
        weight = load_quantized(checkpoint, config, layer, "o_proj").weight
        assert torch.equal(u, (r.long() @ weight.long().t()).to(torch.int32))


def test_missing_weights_are_named_before_anything_is_made(
    saved_model: Models, tmp_path: Path
) -> None:
    directory = tmp_path / "light"
    shutil.copytree(saved_model("llama").directory, directory)
    tensors = load_file(directory / "model.safetensors")
    light = {name: tensor for name, tensor in tensors.items() if "o_proj" not in name}
    save_file(light, directory / "model.safetensors")
    bank = tmp_path / "bank"
    made = ["make", str(directory), "--tokens", "1", "--bank", str(bank), "--bank-key-beside-bank"]
    with pytest.raises(ModelError, match=r"layers\.0\.self_attn\.o_proj"):
        pads.main(made, standalone_mode=False)
    assert not bank.exists()


def test_operations_count_four_digit_products_of_every_site(saved_model: Models) -> None:
    config = read_config(saved_model("llama").directory)
    layout = PadLayout.of(config)
    per_layer = sum(
        config.module_shape(module)[0] * config.module_shape(module)[1]
        for modules in FUSED_MODULES.values()
        for module in modules
    )
    head = config.vocab_size * config.hidden_size
    assert product_operations(layout) == 2 * 4 * (per_layer * config.num_hidden_layers + head)
