"""Secrets for all that a policy verifies, and results checked where the operators get them."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from protocol.errors import CalibrationError, ModelError, PolicyError, ReplyError, VerificationError
from protocol.messages import (
    FUSED_MODULES,
    EmbeddingRequest,
    LMHeadRequest,
    MatmulRequest,
    Request,
    Response,
    TensorReply,
)
from protocol.model.checkpoint import Checkpoint
from protocol.model.config import read_config
from protocol.model.identity import linear_digest, model_digest
from tee_side.model.local_operators import sites_where
from tee_side.policy.placement import Policy, builtin_policies, load_policy
from tee_side.protect.calibration import Calibration
from tee_side.protect.pads.source import PadLane
from tee_side.protect.randomness import Randomness
from tee_side.protect.sites import IntegerSites
from tee_side.protect.verification import ExactCheck
from tee_side.protect.verifier import Unverified, Weights, check_verifiable, find_checks
from tee_side.remote.call import CallPlan
from tee_side.remote.linear import RemoteLinear
from tee_side.words import OPERATORS, PRODUCTS, Operator, Site, is_linear
from tests.kit.lie import (
    Change,
    Lying,
    Models,
    bytes_of,
    everything_verified,
    generate,
    one_more,
    site_of,
)
from tests.kit.model import LoopbackChannel, SavedModel, token_ids, with_results
from tests.kit.rows import each_row
from tsqp.lab.research.float_check import FloatCheck
from tsqp.operator_table import OperatorTable

ROOT = Path(__file__).resolve().parents[3]


LINEAR = [operator for operator in OPERATORS if is_linear(operator)]
SEGMENTS = [name for name in builtin_policies() if "segment" in load_policy(name).operators]


def unverified(name: str) -> Policy:
    """Return a built-in policy that believes everything."""
    return with_results(name, "none")


def _low_rank(y: torch.Tensor) -> torch.Tensor:
    rows = torch.arange(1, y[..., 0].numel() + 1).reshape(y.shape[:-1])
    return y + (rows[..., None] * torch.arange(y.shape[-1])).to(y.dtype)


LIES: dict[str, Change] = {
    "one element by 1": one_more,
    "low-rank": _low_rank,
    "sign": lambda y: -y,
    "x(1 + 1e-3)": lambda y: (y.double() * 1.001).round().to(y.dtype),
    "zeros": torch.zeros_like,
}


def _at(site: tuple[int, str]) -> Callable[[Request], bool]:
    return lambda request: site_of(request) == site


# ------------------------------------------------------------------- the same tokens as without


@each_row("name", [n for n in builtin_policies() if n not in SEGMENTS and load_policy(n).services])
def test_a_verified_policy_gives_the_tokens_that_it_gives_without(
    saved_model: Models, name: str
) -> None:
    """Every policy that there is, with all that leaves it verified: embedding to LM head.

    But for segments, which nothing verifies.
    """
    model = saved_model("qwen2")
    verified, believed = everything_verified(name), unverified(name)
    assert verified.verified
    assert not believed.verified
    tokens = [
        generate(model.tee(policy, randomness=Randomness(bytes(32))), 6)
        for policy in (verified, believed)
    ]
    assert tokens[0] == tokens[1]


@pytest.mark.each_value
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("name", ["tsqp", "tsqp-permuted", "row-mix", "cloak", "float-noise"])
def test_honest_floats_raise_no_alarm_in_any_dtype(
    saved_model: Models, name: str, dtype: str
) -> None:
    tee = saved_model("llama").tee(everything_verified(name), dtype)
    tee.logits(token_ids(70), chunk=9)
    assert any(channel.requests for channel in tee.channels)


# ---------------------------------------------------------------------------- lies are refused


@pytest.mark.each_value
@pytest.mark.parametrize("turn", range(len(LIES)))
@pytest.mark.parametrize("policy", ["shielded", "shielded-prefill", "two-server"])
def test_every_lie_at_every_site_is_refused(saved_model: Models, policy: str, turn: int) -> None:
    """One wrong reply in the middle of the generation; each time at another site.

    Lies take turns: the cases of a policy together tell each of them at each site.
    """
    model, chosen = saved_model("llama"), load_policy(policy)
    sites = [(n, name) for n in range(3) for name in ("q_proj", "o_proj", "gate_proj", "down_proj")]
    if policy != "two-server":
        sites.append((-1, "lm_head"))
    for number, (layer, operator) in enumerate(sites):
        channels = [
            Lying(
                model.directory,
                list(LIES.values())[(number + turn) % len(LIES)],
                _at((layer, operator)),
                at=1,
            ),
            LoopbackChannel(model.directory),
        ][: chosen.services]
        tee = model.tee(chosen, channels=channels)
        with pytest.raises(VerificationError) as caught:
            generate(tee, 4)
        assert isinstance(channels[0], Lying)
        (exchange, error) = channels[0].distrusted[0]
        assert caught.value is error
        named = {"q_proj": "qkv_proj", "gate_proj": "gate_up_proj"}.get(operator, operator)
        assert error.where == f"{named} in layer {layer} at loopback".replace(" in layer -1", "")
        assert exchange.endpoint == "loopback"
        # Nothing was asked after the lie, so its result was used for nothing.
        assert channels[0].lied == [len(channels[0].requests) - 1]


@pytest.mark.parametrize("policy", ["shielded", "shielded-prefill", "two-server"])
@pytest.mark.parametrize("which", ["swapped layer", "stale reply"])
def test_a_right_reply_to_another_question_is_refused(
    saved_model: Models, policy: str, which: str
) -> None:
    model, chosen = saved_model("llama"), load_policy(policy)

    class Other(LoopbackChannel):
        earlier: Response | None = None

        def answer(self, request: Request) -> Response:
            reply = super().answer(request)
            if (site := site_of(request)) is None or site[1] != "o_proj":
                return reply
            layer, _ = site
            if which == "swapped layer":
                return super().answer(request.model_copy(update={"layer_idx": 2}))
            if self.earlier is None and layer == 1:
                self.earlier = reply
            return self.earlier if self.earlier and layer == 1 else reply

    channels: list[LoopbackChannel] = [
        Other(model.directory),
        LoopbackChannel(model.directory),
    ]
    tee = model.tee(chosen, channels=channels[: chosen.services])
    layer = 0 if which == "swapped layer" else 1
    with pytest.raises(VerificationError, match=f"o_proj in layer {layer} at loopback"):
        # One row a step, so that an earlier reply has the shape of a later one.
        tee.logits([1, 2, 3], chunk=1, phase="decode")


FLOAT_LIES: dict[str, Change] = {
    "low-rank": _low_rank,
    "sign": lambda y: -y,
    "a tenth more": lambda y: y * 1.1,
    "zeros": torch.zeros_like,
    "NaN": lambda y: torch.full_like(y, float("nan")),
    "infinity": lambda y: torch.full_like(y, float("inf")),
}


KINDS: dict[Operator, Callable[[Request], bool]] = {
    "embedding": lambda request: isinstance(request, EmbeddingRequest),
    "qkv_proj": lambda request: (site_of(request) or (0, ""))[1] in ("q_proj", "k_proj", "v_proj"),
    "attn_scores": lambda request: isinstance(request, MatmulRequest) and request.a.shape[-1] == 16,
    "attn_values": lambda request: isinstance(request, MatmulRequest) and request.b.shape[-1] == 16,
    "o_proj": lambda request: (site_of(request) or (0, ""))[1] == "o_proj",
    "gate_up_proj": lambda request: (site_of(request) or (0, ""))[1] in ("gate_proj", "up_proj"),
    "down_proj": lambda request: (site_of(request) or (0, ""))[1] == "down_proj",
    "lm_head": lambda request: isinstance(request, LMHeadRequest),
}


@pytest.mark.pairwise
@pytest.mark.parametrize("lie", FLOAT_LIES)
@pytest.mark.parametrize("operator", OPERATORS)
@pytest.mark.parametrize("name", ["tsqp", "tsqp-permuted"])
def test_lies_about_floats_are_refused_at_every_operator(
    saved_model: Models, name: str, operator: Operator, lie: str
) -> None:
    model = saved_model("llama")
    channel = Lying(model.directory, FLOAT_LIES[lie], KINDS[operator])
    tee = model.tee(everything_verified(name), channels=[channel])
    with pytest.raises(VerificationError) as caught:
        generate(tee)
    layered = operator in LINEAR or operator in PRODUCTS
    where = f"{operator} in layer 0" if layered else operator
    assert caught.value.where == f"{where} at loopback"
    assert channel.lied


@pytest.mark.parametrize("operator", OPERATORS)
def test_a_lie_in_the_last_row_alone_is_refused(saved_model: Models, operator: Operator) -> None:
    directory = saved_model("llama").directory
    last = Lying(directory, lambda y: torch.cat((y[:-1], -y[-1:])), KINDS[operator])
    with pytest.raises(VerificationError, match=operator):
        generate(saved_model("llama").tee(everything_verified("tsqp"), channels=[last]))


@pytest.mark.each_value
@pytest.mark.parametrize("name", ["cloak", "stip", "row-mix", "row-rotation", "float-noise"])
@pytest.mark.parametrize("lie", FLOAT_LIES)
def test_lies_are_refused_under_every_float_mask(saved_model: Models, name: str, lie: str) -> None:
    model, policy = saved_model("llama"), everything_verified(name)
    directory = model.directory
    if policy.feature_mask is not None:
        directory = model.provisioned(policy.feature_mask)[0]
    channel = Lying(directory, FLOAT_LIES[lie], KINDS["down_proj"], at=4)
    with pytest.raises(VerificationError, match=r"down_proj in layer 1 at loopback"):
        generate(model.tee(policy, channels=[channel]))
    assert channel.lied


def test_an_error_says_nothing_of_the_numbers(saved_model: Models) -> None:
    model = saved_model("llama")
    channel = Lying(model.directory, one_more)
    with pytest.raises(VerificationError) as caught:
        generate(model.tee("shielded", channels=[channel]))
    assert str(caught.value) == (
        "qkv_proj in layer 0 at loopback: got a wrong result, expected what the weights of the"
        " TEE's own model give"
    )


# ------------------------------------------------------------------ somebody else is asked then


@pytest.mark.parametrize("policy", ["shielded", "shielded-prefill", "two-server"])
@pytest.mark.parametrize("micro_batches", [1, 2])
def test_the_same_masked_tensors_are_sent_again_and_the_tokens_are_the_right_ones(
    saved_model: Models, policy: str, micro_batches: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, chosen = saved_model("llama"), load_policy(policy)
    expected = generate(model.tee(chosen), 6)
    drawn: list[int] = []
    draw = PadLane.draw

    def counted(lane: PadLane, *arguments: Any) -> Any:
        drawn.append(1)
        return draw(lane, *arguments)

    monkeypatch.setattr(PadLane, "draw", counted)
    channels = [
        Lying(
            model.directory,
            one_more,
            lambda request: site_of(request) == (1, "gate_proj"),
            at=1,
            others=True,
        ),
        LoopbackChannel(model.directory),
    ][: chosen.services]
    tee = model.tee(chosen, channels=channels, micro_batches=micro_batches)
    assert generate(tee, 6) == expected
    liar = channels[0]
    assert isinstance(liar, Lying)
    ((exchange, _),) = liar.distrusted
    (lied,) = liar.lied
    refused = liar.requests[lied]
    again = [
        index
        for index, request in enumerate(liar.requests)
        if bytes_of(request) == bytes_of(refused) and request == refused
    ]
    assert len(again) == 2
    assert again[0] == lied
    assert isinstance(exchange.response, TensorReply)
    # No other tensor crossed twice, and no pad was drawn for the second attempt.
    crossed = [bytes_of(request) for request in liar.requests]
    assert len(crossed) - len(set(crossed)) == 1
    if len(channels) == 1:
        assert len(drawn) == len(crossed) - 1


WRONG_FORMS: dict[str, Change] = {
    "a column less": lambda y: y[:, :-1],
    "a row more": lambda y: torch.cat((y, y[:1])),
    "another dtype": lambda y: y.to(torch.int64 if y.dtype == torch.int32 else torch.float16),
}


@pytest.mark.parametrize("form", WRONG_FORMS)
@pytest.mark.parametrize("policy", ["shielded", "two-server", "attention-in-tee"])
def test_whoever_replies_in_a_wrong_form_is_asked_no_more_and_others_the_same(
    saved_model: Models, policy: str, form: str
) -> None:
    """Verified or not: no result is as wrong as one that cannot be read."""
    model = saved_model("llama")
    expected = generate(model.tee(policy), 5)
    for others in (True, False):
        channels = [
            Lying(model.directory, change, at=10, others=others)
            for change in (WRONG_FORMS[form], lambda y: y)
        ][: load_policy(policy).services]
        tee = model.tee(policy, channels=list(channels))
        if others:
            assert generate(tee, 5) == expected
        else:
            with pytest.raises(ReplyError, match="reply from loopback"):
                generate(tee, 5)
        ((_, error),) = channels[0].distrusted
        assert isinstance(error, ReplyError)
        assert not any(channel.distrusted for channel in channels[1:])


def test_a_repeated_exchange_is_reported_and_the_check_is_timed(saved_model: Models) -> None:
    model, table = saved_model("llama"), OperatorTable()
    channel = Lying(model.directory, one_more, others=True)
    generate(model.tee("shielded", channels=[channel], observer=table), 2)
    assert table.totals["qkv_proj"].round_trips == 3 + 1
    assert table.totals["o_proj"].round_trips == 3


def test_without_verification_a_lie_is_used(saved_model: Models) -> None:
    """Guards all of the above: it is the check that refuses."""
    model, ids = saved_model("llama"), token_ids(5)
    channel = Lying(model.directory, lambda y: y + 1000, at=2)
    cases: tuple[tuple[Policy, list[LoopbackChannel] | None], ...] = (
        (unverified("shielded"), [channel]),
        (load_policy("shielded"), None),
    )
    found, right = (
        model.tee(policy, channels=channels).logits(ids, chunk=1, phase="decode")
        for policy, channels in cases
    )
    assert channel.lied
    assert not torch.equal(found, right)


@pytest.mark.parametrize("name", ["shielded", "tsqp", "attention-in-tee"])
@pytest.mark.parametrize("verified", [True, False])
def test_results_are_believed_only_where_the_policy_says_so(
    saved_model: Models, name: str, verified: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An object that is named, at all operators that leave: no check is merely missing."""
    given: dict[Operator, object] = {}
    make = CallPlan.__init__

    def noted(self: CallPlan, **settings: Any) -> None:
        given[settings["operator"]] = settings["check"]
        make(self, **settings)

    monkeypatch.setattr(CallPlan, "__init__", noted)
    policy = everything_verified(name) if verified else unverified(name)
    saved_model("llama").tee(policy).logits(token_ids(3), phase="decode")
    assert given.keys() == {operator for operator, _ in policy.leaving()}
    for one in given.values():
        assert isinstance(one, Unverified) != verified


# ------------------------------------------------------------------------------------- secrets


def _secrets(model: SavedModel, policy: Policy, **changes: Any) -> Any:
    config, checkpoint = read_config(model.directory), Checkpoint(model.directory)
    integers = None
    if policy.arithmetic == "int8":
        digests = Calibration.load(model.calibration, config, *_digests(config, checkpoint))
        integers = IntegerSites(digests, {}, torch.float32)
    held, integers = changes.get("held", {}), changes.get("integers", integers)
    weights = Weights(config, checkpoint, torch.float32, held, integers)
    return find_checks(policy.name, policy.arithmetic).draw(
        _verified(policy), weights, Randomness()
    )


def _verified(policy: Policy) -> list[Site]:
    return sites_where(policy, 3, lambda placed: placed.verify != "none")


def _digests(config: Any, checkpoint: Checkpoint) -> tuple[str, str | None]:
    return model_digest(config, checkpoint), linear_digest(config, checkpoint)


def test_secrets_are_those_of_what_is_verified_and_no_more(saved_model: Models) -> None:
    model = saved_model("llama")
    every_site = {(layer, operator) for layer in range(3) for operator in LINEAR}
    shielded = _secrets(model, load_policy("shielded"))
    assert shielded.vectors.keys() == every_site | {(2, "lm_head")}
    assert all(isinstance(one, ExactCheck) for one in shielded.vectors.values())
    whole = _secrets(model, everything_verified("tsqp"))
    assert whole.vectors.keys() == every_site
    assert all(isinstance(one, FloatCheck) for one in whole.vectors.values())
    none = _secrets(model, load_policy("attention-in-tee"))
    assert none.vectors == {}
    with pytest.raises(LookupError):
        none.check((0, "o_proj"), None)


def test_two_runs_have_nothing_secret_in_common_whatever_the_masks_are_drawn_from(
    saved_model: Models,
) -> None:
    """A generator with a known key for masks is no way to known secrets."""
    model = saved_model("llama")
    found = []
    for _ in range(2):
        tee = model.tee("shielded", randomness=Randomness(bytes(32)))
        found.append(tee.assembly._secrets)
    for site, check in found[0].vectors.items():
        other = found[1].vectors[site]
        equal = check.vectors_kO == other.vectors_kO
        assert float(equal.double().mean()) < 0.1


def test_all_micro_batches_share_what_was_drawn_once(saved_model: Models) -> None:
    tee = saved_model("llama").tee("shielded", micro_batches=2)
    secrets = tee.assembly._secrets
    tee.assembly.lanes(lambda _layer: tee.channels)
    assert tee.assembly._secrets is secrets


def test_lanes_hand_their_deadline_to_what_asks(
    saved_model: Models,
) -> None:
    tee = saved_model("llama").tee("shielded")
    lanes = tee.assembly.lanes(lambda _layer: tee.channels, timeout_s=7.0)
    given = {
        call._settings.longest_s
        for name in FUSED_MODULES
        for call in getattr(lanes[0].tables["decode"], name)
        if isinstance(call, RemoteLinear)
    }
    assert given == {7.0}


@pytest.mark.parametrize("shown", [repr, str])
def test_nothing_secret_is_shown(saved_model: Models, shown: Callable[[object], str]) -> None:
    model = saved_model("llama")
    for policy in (load_policy("shielded"), everything_verified("tsqp")):
        secrets = _secrets(model, policy)
        for one in (secrets, secrets.check((0, "o_proj"), None)):
            text = shown(one)
            assert not re.search(r"tensor\(|ExactCheck|FloatCheck|vectors_kO=|Randomness", text)
            assert re.search("Checkpoint|Tolerance", text)  # guards the test


def test_weights_that_stay_are_not_read_again(saved_model: Models) -> None:
    model = saved_model("llama")
    tee = model.tee("shielded")
    held = tee.assembly._held
    assert held
    assert tee.assembly._secrets.weights.held is held


# --------------------------------------------------------------------- refused before it starts


def _without(model: SavedModel, folder: Path, names: Sequence[str]) -> SavedModel:
    calibration = model.calibration
    tensors = load_file(model.directory / "model.safetensors")
    for name in names:
        del tensors[name]
    folder.mkdir()
    for file in model.directory.iterdir():
        if file.suffix != ".safetensors":
            shutil.copy(file, folder)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    found = replace(model, directory=folder)
    found.__dict__["calibration"] = calibration
    return found


@pytest.mark.parametrize("policy", ["shielded-prefill", "two-server"])
def test_a_directory_without_the_weights_is_refused_before_anything_is_sent(
    saved_model: Models, policy: str, tmp_path: Path
) -> None:
    missing = ["model.layers.1.mlp.up_proj.weight", "model.layers.2.self_attn.o_proj.weight"]
    model = saved_model("llama")
    services = [LoopbackChannel(model.directory) for _ in range(2)]
    without = _without(model, tmp_path / "light", missing)
    with pytest.raises(PolicyError) as caught:
        without.tee(policy, channels=services)
    assert caught.value.where == f'policy {policy}: verify = "freivalds"'
    assert caught.value.got == f"no {missing[0]} and 1 more in {tmp_path / 'light'}"
    assert not any(channel.requests for channel in services)


def test_only_what_is_verified_is_needed(saved_model: Models, tmp_path: Path) -> None:
    model = saved_model("llama")
    light = _without(model, tmp_path / "light", ["model.layers.1.mlp.up_proj.weight"])
    config, checkpoint = read_config(light.directory), Checkpoint(light.directory)
    operators: dict[str, Any] = {
        **dict.fromkeys(OPERATORS, "tee"),
        "gate_up_proj": [
            {"layers": "1", "place": "gpu", "mask": "none", "verify": "none"},
            {"layers": 0, "place": "gpu", "verify": "freivalds", "mask": "none"},
            {"layers": "2-", "place": "gpu", "verify": "freivalds", "mask": "none"},
        ],
    }
    policy = Policy.model_validate({"name": "n", "summary": "s", "operators": operators})
    assert _verified(policy) == [(0, "gate_up_proj"), (2, "gate_up_proj")]
    check_verifiable("n", _verified(policy), config, checkpoint)
    with pytest.raises(PolicyError, match=r"no model\.layers\.1\.mlp\.up_proj\.weight in "):
        check_verifiable(
            "n", _verified(everything_verified("attention-in-tee")), config, checkpoint
        )


def test_weights_of_another_shape_are_refused(saved_model: Models, tmp_path: Path) -> None:
    model, name = saved_model("llama"), "model.layers.1.mlp.up_proj.weight"
    changed = _without(model, tmp_path / "changed", [name])
    tensors = load_file(changed.directory / "model.safetensors")
    tensors[name] = torch.ones(96, 47)
    save_file(tensors, changed.directory / "model.safetensors", metadata={"format": "pt"})
    config, checkpoint = read_config(changed.directory), Checkpoint(changed.directory)
    with pytest.raises(ModelError, match=name):
        check_verifiable("n", _verified(load_policy("shielded")), config, checkpoint)


def test_weights_that_the_range_check_was_not_made_for_are_refused(saved_model: Models) -> None:
    """The bound of the sums rests on the norms of these very weights."""
    model, policy = saved_model("llama"), load_policy("two-server")
    config, checkpoint = read_config(model.directory), Checkpoint(model.directory)
    calibration = Calibration.load(model.calibration, config, *_digests(config, checkpoint))
    scales = calibration.sites[1, "o_proj"]
    calibration.sites[1, "o_proj"] = replace(scales, norm_limit=scales.norm_limit * 1.01)
    with pytest.raises(CalibrationError, match="o_proj in layer 1"):
        _secrets(model, policy, integers=IntegerSites(calibration, {}, torch.float32))


def test_nothing_that_the_trusted_side_runs_looks_at_the_environment() -> None:
    """So that no variable can switch a check off; options are those of `RunnerSettings`."""
    files = [file for part in ("tee_side", "protocol") for file in (ROOT / part).rglob("*.py")]
    assert len(files) > 50
    for file in files:
        text = file.read_text(encoding="utf-8")
        assert not re.search(r"os\.environ|\bgetenv", text), file
