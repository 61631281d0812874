"""How a run comes by its pads: from which weights, for which mask, and checked against what."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, ClassVar

import pytest
import torch
from pydantic import Field

from protocol.errors import CalibrationError, PadBankError, PolicyError
from protocol.model.checkpoint import Checkpoint
from protocol.model.config import ModelConfig, read_config
from protocol.model.identity import linear_digest, model_digest
from protocol.model.quantized import QuantizedLinear, load_quantized
from tee_side.assembly import Assembly
from tee_side.policy.placement import Policy, load_policy
from tee_side.protect.masks.mask import Mask
from tee_side.protect.masks.pad import Pad
from tee_side.protect.pads import maker
from tee_side.protect.pads.bank import BankFile
from tee_side.protect.pads.bank_files import BankPlace
from tee_side.protect.pads.bank_format import Purpose
from tee_side.protect.pads.layout import PadLayout
from tee_side.protect.sites import IntegerSites
from tee_side.words import OPERATORS, Site
from tests.kit.model import SavedModel

Models = Callable[..., SavedModel]


class Shifted(Pad):
    """A pad whose factors depend on an option."""

    name: ClassVar[str] = "shifted"
    shift: Annotated[int, Field(ge=0)] = 0
    label: str = ""

    def draw(self, words_TI: torch.Tensor) -> torch.Tensor:
        return words_TI + self.shift


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


def _bank(model: SavedModel, path: Path, policy: Policy, mask: str) -> None:
    config, checkpoint = read_config(model.directory), Checkpoint(model.directory)
    sites: list[Site] = [(layer, "o_proj") for layer in range(config.num_hidden_layers)]
    purpose = Purpose.of(
        PadLayout.of(config, sites),
        mask=mask,
        model_digest=model_digest(config, checkpoint),
        linear_digest=linear_digest(config, checkpoint) or "",
    )
    BankFile.create(BankPlace.at(path, beside_bank=True), purpose, capacity=4).close()


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[Site]:
    """Sites whose weights the maker read from the directory."""
    found: list[Site] = []

    def noted(
        checkpoint: Checkpoint, config: ModelConfig, layer: int, operator: Any
    ) -> QuantizedLinear:
        found.append((layer, operator))
        return load_quantized(checkpoint, config, layer, operator)

    monkeypatch.setattr(maker, "load_quantized", noted)
    return found


def _fill(assembly: Assembly) -> None:
    for pads in assembly.pads.values():
        assert pads._maker is not None
        pads._maker.fill(pads._store, 1)


def test_pads_are_made_from_the_weights_that_stay(saved_model: Models, read: list[Site]) -> None:
    """Under the default policy prefill is in the TEE, which holds all of them."""
    tee = saved_model("llama").tee("shielded")
    _fill(tee.assembly)
    assert read == []


def test_pads_are_made_from_the_directory_where_nothing_stays(
    saved_model: Models, read: list[Site]
) -> None:
    tee = saved_model("llama").tee("shielded-prefill")
    _fill(tee.assembly)
    assert len(read) == len(set(read)) == 3 * 4 + 1


@pytest.mark.parametrize("policy", ["shielded", "shielded-prefill"])
def test_a_calibration_of_other_weights_is_noticed(
    saved_model: Models, policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the TEE keeps no weights: when pads are made."""

    def other(self: IntegerSites, site: Site, weights: QuantizedLinear) -> None:
        raise CalibrationError(str(site), got="others", expected="the same")

    monkeypatch.setattr(IntegerSites, "check_weights", other)
    with pytest.raises(CalibrationError, match="qkv_proj"):
        _fill(saved_model("llama").tee(policy).assembly)


def test_one_bank_for_two_masks_is_refused_with_both_names(
    saved_model: Models, tmp_path: Path
) -> None:
    model, bank = saved_model("llama"), tmp_path / "bank"
    policy = _policy(o_proj=Pad(), down_proj=Shifted(shift=3))
    _bank(model, bank, policy, "pad")
    with pytest.raises(PolicyError) as caught:
        model.tee(policy, bank=BankPlace.at(bank, beside_bank=True))
    assert str(bank) in caught.value.where
    assert caught.value.got == 'masks pad and shifted label="" shift=3'
    # Refused, and not left locked.
    model.tee(_policy(o_proj=Pad()), bank=BankPlace.at(bank, beside_bank=True)).assembly.close()
    # In memory each has pads of its own.
    assert len(model.tee(policy).assembly.pads) == 2


@pytest.mark.parametrize("made_for", ["shifted", 'shifted label="" shift=2', "pad"])
def test_a_bank_of_another_mask_or_options_is_refused(
    saved_model: Models, tmp_path: Path, made_for: str
) -> None:
    """The name alone is what a bank had before options were written into it."""
    model, bank, policy = saved_model("llama"), tmp_path / "bank", _policy(o_proj=Shifted(shift=3))
    _bank(model, bank, policy, made_for)
    with pytest.raises(PadBankError) as caught:
        model.tee(policy, bank=BankPlace.at(bank, beside_bank=True))
    assert caught.value.where == f"{bank}: mask"
    assert caught.value.got == made_for
    assert caught.value.expected == 'shifted label="" shift=3'


def test_a_bank_opens_for_the_mask_that_it_was_made_for(
    saved_model: Models, tmp_path: Path
) -> None:
    model, bank, policy = saved_model("llama"), tmp_path / "bank", _policy(o_proj=Shifted(shift=3))
    _bank(model, bank, policy, Shifted(shift=3).described())
    tee = model.tee(policy, bank=BankPlace.at(bank, beside_bank=True))
    _fill(tee.assembly)
    tee.assembly.close()


def test_masks_with_other_options_are_described_otherwise() -> None:
    described = {
        mask.described()
        for mask in (
            Pad(),
            Shifted(),
            Shifted(shift=1),
            Shifted(label="1"),
            Shifted(label='" shift=1 x="'),
            Shifted(label='"', shift=1),
        )
    }
    assert len(described) == 6
    assert Shifted(shift=0).described() == Shifted().described()


def test_the_default_policy_has_one_mask_with_pads() -> None:
    """What a bank is made for, without being asked."""
    assert [mask.described() for mask in load_policy("shielded").masks] == ["pad"]
