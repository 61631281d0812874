"""Layouts have the sites of the model; what the maker puts into a store undoes the mask exactly."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, ClassVar

import pytest
import torch
from pydantic import Field, ValidationError
from safetensors.torch import load_file, save_file

from protocol.errors import CalibrationError, ModelError, PadBankError, PolicyError
from protocol.messages import FUSED_MODULES
from protocol.model.checkpoint import Checkpoint
from protocol.model.config import read_config
from protocol.model.identity import linear_digest, model_digest
from protocol.model.quantized import QuantizedLinear, load_quantized
from protocol.model.weights import CPU, load_linear
from tee_side.assembly import Assembly
from tee_side.policy.placement import Policy
from tee_side.protect.masks.mask import Mask
from tee_side.protect.masks.pad import Pad
from tee_side.protect.pads import maker as maker_module
from tee_side.protect.pads.bank import BankFile
from tee_side.protect.pads.bank_files import BankPlace
from tee_side.protect.pads.bank_format import Purpose
from tee_side.protect.pads.layout import PadLayout, SiteShape, site_number
from tee_side.protect.pads.maker import PadMaker, read_weights
from tee_side.protect.pads.store import MemoryStore
from tee_side.protect.sites import IntegerSites
from tee_side.words import OPERATORS, PROJECTIONS, Site
from tests.kit.model import SavedModel
from tests.kit.rows import each_row
from tsqp.cli.pads import product_operations
from tsqp.lab.research.float_noise import FloatNoise

Models = Callable[..., SavedModel]


def test_a_layout_has_each_site_once_with_the_sizes_of_the_model(saved_model: Models) -> None:
    config = read_config(saved_model().directory)
    layout, last = PadLayout.of(config), config.num_hidden_layers - 1
    numbers = [site_number(layer, operator) for layer in range(3) for operator in PROJECTIONS]
    assert numbers == list(range(15))
    # Of the LM heads that each layer might have, there is one.
    assert [site.number for site in layout.sites] == [
        n for n in range(5 * last + 5) if n % 5 != 4 or n == 5 * last + 4
    ]
    products = 0
    for site in layout.sites:
        shapes = [(config.vocab_size, config.hidden_size)]
        if site.operator != "lm_head":
            shapes = [config.module_shape(module) for module in FUSED_MODULES[site.operator]]
        assert site.out_features == sum(shape[0] for shape in shapes)
        assert {site.in_features} == {shape[1] for shape in shapes}
        products += sum(outputs * inputs for outputs, inputs in shapes)
    assert layout.token_bytes == 4 * sum(site.out_features for site in layout.sites)
    # In four digits, an addition beside each product.
    assert product_operations(layout) == 2 * 4 * products
    some = PadLayout.of(config, [(1, "down_proj"), (0, "o_proj")])  # in any order
    assert [str(site) for site in some.sites] == ["layer 0 o_proj", "layer 1 down_proj"]


def test_impossible_layouts_are_refused() -> None:
    for layers in ((), (1, 0), (0, 0)):
        with pytest.raises(ValueError, match="ascending"):
            PadLayout(tuple(SiteShape(layer, "qkv_proj", 1, 1) for layer in layers))
    right = {"mask": "pad", "model_digest": "0" * 64, "linear_digest": "0" * 64}
    Purpose.model_validate({**right, "sites": [(0, 0, "qkv_proj", 4, 4)]})
    for site in (
        (0, -1, "qkv_proj", 4, 4),
        (0, 0, "embedding", 4, 4),
        (0, 0, "qkv_proj", 0, 4),
        (0, 0, "qkv_proj", 4, 2**31),
    ):
        with pytest.raises(ValidationError):
            Purpose.model_validate({**right, "sites": [site]})


# More rows than a block of digits, and fewer.
@each_row("count", [1, 3, 40])
@pytest.mark.parametrize("kind", ["llama", "qwen2"])
def test_factors_are_the_exact_products_of_the_services_own_integers(
    saved_model: Models, kind: str, count: int
) -> None:
    directory = saved_model(kind).directory
    config, checkpoint = read_config(directory), Checkpoint(directory)
    store, noise = MemoryStore(PadLayout.of(config), 64), MemoryStore(PadLayout.of(config), 64)
    mask, told, checked = FloatNoise(sigma=3.0), list[tuple[int, int]](), list[Site]()

    def check(site: Site, weights: QuantizedLinear) -> None:
        checked.append(site)
        assert torch.equal(weights.weight, load_quantized(checkpoint, config, *site).weight)

    maker = PadMaker(Pad(), read_weights(checkpoint, config, "int8", check))
    maker.fill(store, count, lambda *done: told.append(done))
    maker.fill(store, 1)
    assert checked == [site.site for site in store.layout.sites]
    PadMaker(mask, read_weights(checkpoint, config, "float")).fill(noise, count)
    assert told == [(done, 13) for done in range(1, 14)]
    assert store.available == noise.available + 1 == count + 1
    indices = store.take(count)
    noise.take(count)
    for site in store.layout.sites:
        r, u = store.factors(indices, site.number)
        exact = r.long() @ load_quantized(checkpoint, config, *site.site).weight.long().t()
        assert torch.equal(u, exact.to(torch.int32)), str(site)
        # Guards the test: these products do wrap.
        assert (exact.abs() >= 2**31).any()
        words, bits = noise.factors(indices, site.number)
        fused = load_linear(checkpoint, config, *site.site, dtype=torch.float32, device=CPU)
        expected = mask.draw(words) @ fused.weight.t()
        torch.testing.assert_close(bits.view(torch.float32), expected, rtol=0, atol=1e-4)


def test_what_makes_no_pads_leaves_no_batch_behind(saved_model: Models, tmp_path: Path) -> None:
    """A store without room, weights that fail their check, a model that changed meanwhile."""
    directory = tmp_path / "model"
    shutil.copytree(saved_model("llama").directory, directory)
    config, checkpoint = read_config(directory), Checkpoint(directory)
    store = MemoryStore(PadLayout.of(config), 4)

    def check(site: Site, weights: QuantizedLinear) -> None:
        if site == (1, "down_proj"):
            raise CalibrationError("down_proj in layer 1", got="others", expected="the same")

    def refused(error: type[Exception], match: str, tokens: int, *more: Any) -> None:
        maker = PadMaker(Pad(), read_weights(checkpoint, config, "int8", *more))
        for _ in range(2):  # however often they are asked for
            with pytest.raises(error, match=match):
                maker.fill(store, tokens)
        assert (store.available, store.room) == (0, 4)

    refused(ValueError, "got 5 to fill", 5)
    refused(CalibrationError, "down_proj in layer 1", 2, check)
    tensors = load_file(directory / "model.safetensors")
    name = "model.layers.1.mlp.down_proj.weight"
    tensors[name] = torch.full_like(tensors[name], torch.nan)
    save_file(tensors, directory / "model.safetensors")
    refused(ModelError, "another content since the file was checked", 2)


# ------------------------------------------------------------------------- the pads of a run


class Shifted(Pad):
    """A pad whose factors depend on an option."""

    name: ClassVar[str] = "shifted"
    shift: Annotated[int, Field(ge=0)] = 0
    label: str = ""

    def draw(self, words_TI: torch.Tensor) -> torch.Tensor:
        return words_TI + self.shift


SHIFTED = Shifted(shift=3)


def _policy(**masks: Mask) -> Policy:
    """Linear operators under masks of their own, the rest in the TEE."""
    placed = {
        operator: {"place": "gpu", "mask": mask, "verify": "none"}
        for operator, mask in masks.items()
    }
    fields = {"name": "own", "summary": "", "arithmetic": "int8"}
    return Policy.model_validate(
        {**fields, "operators": {**dict.fromkeys(OPERATORS, "tee"), **placed}}
    )


def _bank(model: SavedModel, path: Path, mask: str) -> BankPlace:
    """Make an empty bank for `o_proj` under a mask."""
    config, checkpoint = read_config(model.directory), Checkpoint(model.directory)
    sites: list[Site] = [(layer, "o_proj") for layer in range(config.num_hidden_layers)]
    purpose = Purpose.of(
        PadLayout.of(config, sites),
        mask=mask,
        model_digest=model_digest(config, checkpoint),
        linear_digest=linear_digest(config, checkpoint) or "",
    )
    place = BankPlace.at(path, beside_bank=True)
    BankFile.create(place, purpose, capacity=4).close()
    return place


def _fill(assembly: Assembly) -> None:
    for pads in assembly.pads.values():
        assert pads._maker is not None
        pads._maker.fill(pads._store, 1)


def test_pads_are_made_from_the_weights_that_stay_or_else_from_the_directory(
    saved_model: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Either way, a calibration of other weights is noticed: when they are loaded, or made from."""
    read: list[Site] = []

    def noted(checkpoint: Any, config: Any, *site: Any) -> QuantizedLinear:
        read.append(site)
        return load_quantized(checkpoint, config, *site)

    monkeypatch.setattr(maker_module, "load_quantized", noted)
    # Under the default policy prefill is in the TEE, which holds all of them.
    assembly = saved_model("llama").tee("shielded").assembly
    _fill(assembly)
    assert read == []
    (pads,) = assembly.pads.values()
    site, indices = pads._store.layout.sites[0], pads._store.take(1)
    r, u = pads._store.factors(indices, site.number)
    config = read_config(saved_model("llama").directory)
    checkpoint = Checkpoint(saved_model("llama").directory)
    weight = load_quantized(checkpoint, config, *site.site).weight
    assert torch.equal(u, (r.long() @ weight.long().t()).to(torch.int32))
    _fill(saved_model("llama").tee("shielded-prefill").assembly)
    assert len(read) == len(set(read)) == 3 * 4 + 1

    def other(self: IntegerSites, site: Site, weights: QuantizedLinear) -> None:
        raise CalibrationError(str(site), got="others", expected="the same")

    monkeypatch.setattr(IntegerSites, "check_weights", other)
    for policy in ("shielded", "shielded-prefill"):
        with pytest.raises(CalibrationError, match="qkv_proj"):
            _fill(saved_model("llama").tee(policy).assembly)


def test_one_bank_for_two_masks_is_refused_with_both_names(
    saved_model: Models, tmp_path: Path
) -> None:
    model, policy = saved_model("llama"), _policy(o_proj=Pad(), down_proj=SHIFTED)
    bank = _bank(model, tmp_path / "bank", "pad")
    with pytest.raises(PolicyError) as caught:
        model.tee(policy, bank=bank)
    assert str(bank.bank) in caught.value.where
    assert caught.value.got == 'masks pad and shifted label="" shift=3'
    # Refused, and not left locked.
    model.tee(_policy(o_proj=Pad()), bank=bank).assembly.close()
    # In memory each has pads of its own.
    assert len(model.tee(policy).assembly.pads) == 2


@each_row(
    ("made_for", "fits"),
    [
        # The name alone is what a bank had before options were written into it.
        ("shifted", False),
        ('shifted label="" shift=2', False),
        ("pad", False),
        (Shifted(shift=3, label='" shift=2 x="').described(), False),
        (SHIFTED.described(), True),
    ],
)
def test_a_bank_opens_for_the_mask_and_options_that_it_was_made_for(
    saved_model: Models, tmp_path: Path, made_for: str, fits: bool
) -> None:
    model, policy = saved_model("llama"), _policy(o_proj=SHIFTED)
    bank = _bank(model, tmp_path / f"bank for {made_for}", made_for)
    if fits:
        assembly = model.tee(policy, bank=bank).assembly
        _fill(assembly)
        assembly.close()
        return
    with pytest.raises(PadBankError) as caught:
        model.tee(policy, bank=bank)
    assert caught.value.where == f"{bank.bank}: mask"
    assert (caught.value.got, caught.value.expected) == (made_for, 'shifted label="" shift=3')
