"""Secrets for all that a policy verifies, and results checked where the operators get them.

That no lie wins: tests/property/test_malicious_gpu.py; under every mask: tests/contract.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from protocol.errors import CalibrationError, ModelError, PolicyError, VerificationError
from protocol.messages import FUSED_MODULES
from protocol.model.checkpoint import Checkpoint
from protocol.model.config import read_config
from protocol.model.identity import model_digest
from tee_side.model.local_operators import sites_where
from tee_side.policy.placement import Policy, load_policy
from tee_side.protect.calibration import Calibration
from tee_side.protect.randomness import Randomness
from tee_side.protect.sites import IntegerSites
from tee_side.protect.verification import ExactCheck
from tee_side.protect.verifier import Unverified, Weights, check_verifiable, find_checks
from tee_side.remote.call import CallPlan
from tee_side.words import OPERATORS, Operator, Site
from tests.kit.lie import Change, Lying, generate, is_of
from tests.kit.model import (
    CLEAR,
    LoopbackChannel,
    SavedModel,
    Tee,
    policy_of,
    token_ids,
    with_results,
)
from tests.kit.rows import each_row
from tsqp.lab.research.float_check import FloatCheck

Models = Callable[..., SavedModel]
ROOT = Path(__file__).resolve().parents[4]


@pytest.fixture(scope="module")
def model(saved_model: Models) -> SavedModel:
    return saved_model("llama")


# ------------------------------------------------------------------------- results are checked


@each_row(
    ("name", "dtype"),
    [
        ("tsqp", "float32"),
        ("tsqp", "float16"),
        ("tsqp-permuted", "bfloat16"),
        ("row-mix", "float16"),
        ("row-rotation", "bfloat16"),
        ("stip", "float16"),
        ("cloak", "bfloat16"),
        ("float-noise", "float32"),
        ("quantized-clear", "bfloat16"),
    ],
)
def test_honest_services_raise_no_alarm_in_any_dtype(
    model: SavedModel, name: str, dtype: str
) -> None:
    """Every policy with all that leaves verified; those that say so by themselves run elsewhere."""
    policy = with_results(name, "freivalds")
    assert policy.verified
    tee = model.tee(policy, dtype)
    tee.logits(token_ids(70), chunk=9)
    assert all(channel.requests for channel in tee.channels)


LIES: dict[str, Change] = {
    "the last row": lambda y: torch.cat((y[..., :-1, :], -y[..., -1:, :]), -2),
    "a tenth more": lambda y: y * 1.1,
    "zeros": torch.zeros_like,
    "NaN": lambda y: torch.full_like(y, torch.nan),
    "infinity": lambda y: torch.full_like(y, torch.inf),
}


@each_row("operator", OPERATORS)
def test_a_lie_about_floats_is_refused_at_every_operator(
    model: SavedModel, operator: Operator
) -> None:
    channel = Lying(model.directory, lambda y: y)
    tee = model.tee(with_results("tsqp", "freivalds"), channels=[channel])
    for change in LIES.values():
        channel.tell(change, partial(is_of, operator), at=1)
        with pytest.raises(VerificationError) as caught:
            generate(tee)
        layered = operator not in ("embedding", "lm_head")
        place = f"{operator} in layer " if layered else f"{operator} at loopback"
        assert caught.value.where.startswith(place)
        assert channel.lied


@each_row(
    ("name", "verify"),
    [(n, v) for n in ("shielded", "tsqp", "attention-in-tee") for v in ("freivalds", "none")],
)
def test_results_are_believed_only_where_the_policy_says_so(
    model: SavedModel, name: str, verify: Any
) -> None:
    """An object that is named, at all operators that leave: no check is merely missing."""
    given: dict[Operator, object] = {}
    make = CallPlan.__init__

    def noted(self: CallPlan, **settings: Any) -> None:
        given[settings["operator"]] = settings["check"]
        make(self, **settings)

    policy = with_results(name, verify)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CallPlan, "__init__", noted)
        model.tee(policy).logits(token_ids(3), phase="decode")
    assert given.keys() == {operator for operator, _ in policy.leaving()}
    assert {isinstance(one, Unverified) for one in given.values()} == {verify == "none"}


# ------------------------------------------------------------------------------------- secrets


def _verified(policy: Policy) -> list[Site]:
    return sites_where(policy, 3, lambda placed: placed.verify != "none")


def _secrets(model: SavedModel, policy: Policy, integers: IntegerSites | None = None) -> Any:
    config, checkpoint = read_config(model.directory), Checkpoint(model.directory)
    if policy.arithmetic == "int8" and integers is None:
        integers = IntegerSites(_calibration(model), {}, torch.float32)
    weights = Weights(config, checkpoint, torch.float32, {}, integers)
    checks = find_checks(policy.name, policy.served_arithmetic)
    return checks.draw(_verified(policy), weights, Randomness())


def _calibration(model: SavedModel) -> Calibration:
    config, checkpoint = read_config(model.directory), Checkpoint(model.directory)
    return Calibration.load(model.calibration, config, model_digest(config, checkpoint))


def test_secrets_are_those_of_what_is_verified_and_no_more(model: SavedModel) -> None:
    linear = {(layer, operator) for layer in range(3) for operator in FUSED_MODULES}
    for name, sites, kind in (
        ("shielded", linear | {(2, "lm_head")}, ExactCheck),
        ("tsqp", linear, FloatCheck),
    ):
        secrets = _secrets(model, with_results(name, "freivalds"))
        assert secrets.vectors.keys() == sites
        assert {type(one) for one in secrets.vectors.values()} == {kind}
        # Not in a traceback, nor in a log.
        for one in (secrets, secrets.check((0, "o_proj"), None)):
            for text in (repr(one), str(one)):
                assert not re.search(r"tensor\(|ExactCheck|FloatCheck|vectors_kO=|Randomness", text)
                assert re.search("Checkpoint|Tolerance", text)  # guards the test
    none = _secrets(model, load_policy("attention-in-tee"))
    assert none.vectors == {}
    with pytest.raises(LookupError):
        none.check((0, "o_proj"), None)


def test_two_runs_have_no_secret_in_common_and_micro_batches_of_one_share_theirs(
    model: SavedModel,
) -> None:
    """A generator with a known key for masks is no way to known secrets."""
    tees: list[Tee] = [
        model.tee("shielded", randomness=Randomness(bytes(32)), micro_batches=2) for _ in range(2)
    ]
    first, second = (tee.assembly._secrets for tee in tees)
    assert first.vectors
    for site, check in first.vectors.items():
        equal = check.vectors_kO == second.vectors[site].vectors_kO
        assert float(equal.double().mean()) < 0.1
    tees[0].assembly.lanes(lambda _layer: tees[0].channels)
    assert tees[0].assembly._secrets is first
    # Weights that stay are not read again for them.
    assert tees[0].assembly._held
    assert first.weights.held is tees[0].assembly._held


# --------------------------------------------------------------------- refused before it starts


def _without(model: SavedModel, folder: Path, names: Sequence[str]) -> SavedModel:
    """Return a copy of a model without some tensors."""
    tensors = load_file(model.directory / "model.safetensors")
    shutil.copytree(model.directory, folder)
    left = {name: tensor for name, tensor in tensors.items() if name not in names}
    save_file(left, folder / "model.safetensors", metadata={"format": "pt"})
    found = replace(model, directory=folder)
    found.__dict__["calibration"] = model.calibration
    return found


@each_row("policy", ["shielded-prefill", "two-server"])
def test_a_directory_without_the_weights_is_refused_before_anything_is_sent(
    model: SavedModel, policy: str, tmp_path: Path
) -> None:
    missing = ["model.layers.1.mlp.up_proj.weight", "model.layers.2.self_attn.o_proj.weight"]
    services = [LoopbackChannel(model.directory) for _ in range(2)]
    light = _without(model, tmp_path / policy, missing)
    with pytest.raises(PolicyError) as caught:
        light.tee(policy, channels=services)
    assert caught.value.where == f'policy {policy}: verify = "freivalds"'
    assert caught.value.got == f"no {missing[0]} and 1 more in {tmp_path / policy}"
    assert not any(channel.requests for channel in services)
    # Only what is verified is needed.
    config, checkpoint = read_config(light.directory), Checkpoint(light.directory)
    gone = [CLEAR | {"layers": 1}, CLEAR | {"layers": 0, "verify": "freivalds"}, CLEAR]
    gone[2] = gone[1] | {"layers": "2-"}
    sites = _verified(policy_of({"gate_up_proj": gone}))
    assert sites == [(0, "gate_up_proj"), (2, "gate_up_proj")]
    check_verifiable("n", sites, config, checkpoint)
    with pytest.raises(PolicyError, match=r"no model\.layers\.1\.mlp\.up_proj\.weight in "):
        check_verifiable("n", [(1, "gate_up_proj")], config, checkpoint)


def test_weights_of_another_shape_or_norm_are_refused(model: SavedModel, tmp_path: Path) -> None:
    name = "model.layers.1.mlp.up_proj.weight"
    changed = _without(model, tmp_path / "changed", [name])
    tensors = load_file(changed.directory / "model.safetensors") | {name: torch.ones(96, 47)}
    save_file(tensors, changed.directory / "model.safetensors", metadata={"format": "pt"})
    config, checkpoint = read_config(changed.directory), Checkpoint(changed.directory)
    with pytest.raises(ModelError, match=name):
        check_verifiable("n", _verified(load_policy("shielded")), config, checkpoint)
    # The bound of the sums rests on the norms of these very weights.
    calibration = _calibration(model)
    scales = calibration.sites[1, "o_proj"]
    calibration.sites[1, "o_proj"] = replace(scales, norm_limit=scales.norm_limit * 1.01)
    integers = IntegerSites(calibration, {}, torch.float32)
    with pytest.raises(CalibrationError, match="o_proj in layer 1"):
        _secrets(model, load_policy("two-server"), integers)


def test_nothing_that_the_trusted_side_runs_looks_at_the_environment() -> None:
    """So that no variable can switch a check off; options are those of `RunnerSettings`."""
    files = [file for part in ("tee_side", "protocol") for file in (ROOT / part).rglob("*.py")]
    assert len(files) > 50
    texts = {file: file.read_text(encoding="utf-8") for file in files}
    assert [f for f, text in texts.items() if re.search(r"os\.environ|\bgetenv", text)] == []
