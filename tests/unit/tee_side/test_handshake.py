"""A service that holds another model is noticed before anything secret is sent."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from protocol.channel import Exchange
from protocol.errors import ModelMismatchError, ReplyError
from protocol.messages import InitReply, InitRequest, Request, Response, TensorReply
from protocol.model.checkpoint import EMBEDDING, FINAL_NORM, Checkpoint
from protocol.model.config import read_config
from protocol.model.identity import linear_digest
from protocol.tensors import from_torch, torch_dtype
from tee_side.model.layers import load_tee_model
from tee_side.policy.placement import builtin_policies, load_policy
from tee_side.remote.handshake import ServiceCheck
from tests.kit.model import LoopbackChannel, SavedModel
from tests.kit.rows import each_row
from tsqp.lab.research.feature_key import FeatureKey
from tsqp.lab.research.feature_permutation import FeaturePermutation

Models = Callable[..., SavedModel]


def _check(ours: Path, channel: LoopbackChannel, dtype: str = "float32") -> None:
    config, checkpoint = read_config(ours), Checkpoint(ours)
    model = load_tee_model(config, checkpoint, torch_dtype(dtype))
    linear = linear_digest(config, checkpoint)
    check = ServiceCheck(config, checkpoint, model.norm_weights(), linear=linear)
    check.verify(channel.endpoint, channel.call(InitRequest()).response)


def _mismatch(ours: Path, channel: LoopbackChannel) -> ModelMismatchError:
    with pytest.raises(ModelMismatchError) as caught:
        _check(ours, channel)
    assert caught.value.where.startswith("model at loopback: ")
    assert all(isinstance(request, InitRequest) for request in channel.requests)
    return caught.value


def _with_changed_tensor(
    source: Path, target: Path, name: str, change: Callable[[torch.Tensor], torch.Tensor]
) -> Path:
    shutil.copytree(source, target)
    tensors = load_file(target / "model.safetensors")
    tensors[name] = change(tensors[name].clone()).contiguous()
    save_file(tensors, target / "model.safetensors")
    return target


class LyingChannel(LoopbackChannel):
    """A service whose Init reply differs in some fields from the truth."""

    def __init__(self, directory: Path, **changes: Any) -> None:
        super().__init__(directory)
        self._changes = changes

    def answer(self, request: Request) -> Response:
        """Compute the true reply and replace fields of it."""
        reply = super().answer(request)
        return reply.model_copy(update=self._changes)


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_service_with_the_same_model_is_accepted(
    saved_model: Models, kind: str, dtype: str
) -> None:
    directory = saved_model(kind).directory
    channel = LoopbackChannel(directory)
    _check(directory, channel, dtype)
    assert len(channel.requests) == 1


@pytest.mark.parametrize(
    ("overrides", "field", "got", "expected"),
    [
        ({"num_hidden_layers": 2}, "num_layers", "2", "3"),
        ({"hidden_size": 36}, "hidden_size", "36", "48"),
        ({"num_attention_heads": 4}, "num_heads", "4", "6"),
        ({"num_key_value_heads": 3}, "num_kv_heads", "3", "2"),
        ({"head_dim": 8}, "head_dim", "8", "16"),
    ],
)
def test_another_size_is_named_with_both_numbers(
    saved_model: Models, overrides: dict[str, int], field: str, got: str, expected: str
) -> None:
    channel = LoopbackChannel(saved_model("llama", **overrides).directory)
    error = _mismatch(saved_model("llama").directory, channel)
    assert error.where.endswith(f": {field}")
    assert error.got == got
    assert error.expected.startswith(f"{expected} (start service and runner with the same model")


def test_another_final_norm_is_named(saved_model: Models, tmp_path: Path) -> None:
    ours = saved_model("llama").directory
    theirs = _with_changed_tensor(ours, tmp_path / "m", FINAL_NORM, lambda norm: norm * 1.01)
    assert _mismatch(ours, LoopbackChannel(theirs)).where.endswith(": final_norm")


@pytest.mark.parametrize("norms", [[], ["final_norm"]])
def test_a_final_norm_that_is_missing_or_has_another_shape_is_named(
    saved_model: Models, norms: list[str]
) -> None:
    ours = saved_model("llama").directory
    reply = LoopbackChannel(ours).call(InitRequest()).response
    assert isinstance(reply, InitReply)
    norm = reply.norm_weights["final_norm"]
    short = norm.model_copy(update={"weight": from_torch(torch.ones(3))})
    channel = LyingChannel(ours, norm_weights=dict.fromkeys(norms, short))
    assert _mismatch(ours, channel).where.endswith(": final_norm")


def test_another_embedding_is_noticed_by_the_digest(saved_model: Models, tmp_path: Path) -> None:
    ours = saved_model("llama").directory
    theirs = _with_changed_tensor(ours, tmp_path / "m", EMBEDDING, lambda table: table + 1)
    error = _mismatch(ours, LoopbackChannel(theirs))
    assert error.where.endswith(": model_digest")
    assert len(error.got) == 16
    assert error.got != error.expected[:16]


def test_a_fine_tune_with_the_same_sizes_and_norms_is_noticed(
    saved_model: Models, tmp_path: Path
) -> None:
    """One linear weight differs, as after merging an adapter: only its own digest can tell."""
    ours = saved_model("llama").directory
    name = "model.layers.1.mlp.down_proj.weight"
    theirs = _with_changed_tensor(ours, tmp_path / "m", name, torch.neg)
    assert _mismatch(ours, LoopbackChannel(theirs)).where.endswith(": linear_digest")


def test_linear_weights_that_the_tee_lacks_are_not_compared(
    saved_model: Models, tmp_path: Path
) -> None:
    theirs, ours = saved_model("llama").directory, tmp_path / "light"
    shutil.copytree(theirs, ours)
    tensors = load_file(ours / "model.safetensors")
    light = {name: tensor for name, tensor in tensors.items() if "_proj" not in name}
    save_file(light, ours / "model.safetensors")
    _check(ours, LoopbackChannel(theirs))


def test_every_norm_and_the_rope_parameters_are_compared(saved_model: Models) -> None:
    ours = saved_model("llama").directory
    reply = LoopbackChannel(ours).call(InitRequest()).response
    assert isinstance(reply, InitReply)
    norms, rotary = reply.norm_weights, reply.rotary_emb_params
    first = norms["layer_0_input_layernorm"]
    not_a_number = first.model_copy(update={"weight": from_torch(torch.full((48,), torch.nan))})
    lies = {
        "layer_0_input_layernorm": {
            "norm_weights": {**norms, "layer_0_input_layernorm": not_a_number}
        },
        "layer_2_post_attention_layernorm": {
            "norm_weights": {n: w for n, w in norms.items() if not n.startswith("layer_2_post")}
        },
        "final_norm.eps": {
            "norm_weights": {
                **norms,
                "final_norm": norms["final_norm"].model_copy(update={"eps": 123.0}),
            }
        },
        "inv_freq": {
            "rotary_emb_params": rotary.model_copy(update={"inv_freq": from_torch(torch.ones(1))})
        },
        "attention_scaling": {
            "rotary_emb_params": rotary.model_copy(update={"attention_scaling": -5.0})
        },
    }
    for field, changes in lies.items():
        assert _mismatch(ours, LyingChannel(ours, **changes)).where.endswith(f": {field}"), field
    extra = {"norm_weights": {**norms, "layer_9_input_layernorm": first}}
    assert _mismatch(ours, LyingChannel(ours, **extra)).where.endswith(": fields")


def test_another_setting_that_init_does_not_publish_is_noticed_by_the_digest(
    saved_model: Models, tmp_path: Path
) -> None:
    import json

    ours, theirs = saved_model("llama").directory, tmp_path / "other"
    shutil.copytree(ours, theirs)
    config = json.loads((theirs / "config.json").read_text())
    config["max_position_embeddings"] = 512
    (theirs / "config.json").write_text(json.dumps(config))
    assert _mismatch(ours, LoopbackChannel(theirs)).where.endswith(": model_digest")


def test_a_digest_that_is_made_up_is_refused(saved_model: Models) -> None:
    ours = saved_model("llama").directory
    error = _mismatch(ours, LyingChannel(ours, model_digest="0" * 64))
    assert error.where.endswith(": model_digest")
    assert error.got == "0" * 16


class ConfusedChannel(LoopbackChannel):
    """A channel that returns a tensor for an Init request."""

    def call(self, request: Request, timeout_s: float | None = None) -> Exchange:
        """Answer with something else."""
        output = from_torch(torch.ones(1))
        return Exchange(TensorReply(output=output), 0, 0, 0, 0, 0, None, 0, self.endpoint)


def test_a_reply_that_is_no_init_reply_is_refused(saved_model: Models) -> None:
    directory = saved_model("llama").directory
    with pytest.raises(ReplyError, match="Init reply from loopback: got TensorReply"):
        _check(directory, ConfusedChannel(directory))


# ----------------------------------------------------------------- arithmetic and provisioning


def _mask_check(
    ours: SavedModel, channel: LoopbackChannel, policy: str, linear: str | None = None
) -> None:
    chosen = load_policy(policy)
    config, checkpoint = read_config(ours.directory), Checkpoint(ours.directory)
    masks = ours.masks(chosen)
    check = ServiceCheck(
        config,
        checkpoint,
        load_tee_model(config, checkpoint, torch.float32).norm_weights(),
        arithmetic=chosen.arithmetic,
        key=FeatureKey.load(masks.key) if masks.key else None,
        linear=linear or linear_digest(config, checkpoint),
    )
    check.verify(channel.endpoint, channel.call(InitRequest()).response)


@each_row("name", builtin_policies())
def test_the_service_that_a_policy_needs_is_accepted(saved_model: Models, name: str) -> None:
    model = saved_model("llama")
    for channel in model.services(load_policy(name)):
        _mask_check(model, channel, name)
        assert len(channel.requests) == 1


@pytest.mark.parametrize(
    ("policy", "held", "field"),
    [("shielded", "float", "int8"), ("tsqp", "int8", "float")],
)
def test_a_service_without_the_arithmetic_is_refused_with_both(
    saved_model: Models, policy: str, held: str, field: str
) -> None:
    model = saved_model("llama")
    channel = LyingChannel(model.directory, arithmetic=(held,))
    with pytest.raises(ModelMismatchError) as caught:
        _mask_check(model, channel, policy)
    assert caught.value.where == "model at loopback: arithmetic"
    assert caught.value.got == held
    assert caught.value.expected.startswith(field)


@pytest.mark.parametrize("policy", ["tsqp", "row-mix", "shielded", "two-server"])
def test_a_provisioned_service_is_refused_by_policies_that_need_the_models_own_weights(
    saved_model: Models, policy: str
) -> None:
    model = saved_model("llama")
    provisioned = LoopbackChannel(model.provisioned(FeaturePermutation())[0])
    with pytest.raises(ModelMismatchError) as caught:
        _mask_check(model, provisioned, policy)
    # One with integers lies about them; it is refused all the same.
    assert "int8" in str(caught.value) or "provision_id: got " in str(caught.value)
    reply = provisioned.call(InitRequest()).response
    assert isinstance(reply, InitReply)
    lying = LyingChannel(model.directory, provision_id=reply.provision_id)
    with pytest.raises(ModelMismatchError, match=r"provision_id: got \w+, expected None"):
        _mask_check(model, lying, policy)


@pytest.mark.parametrize("policy", ["stip", "cloak"])
def test_a_service_with_the_models_own_weights_is_refused_by_a_feature_mask(
    saved_model: Models, policy: str
) -> None:
    model = saved_model("llama")
    with pytest.raises(ModelMismatchError, match=r"provision_id: got None"):
        _mask_check(model, LoopbackChannel(model.directory), policy)


def test_weights_of_another_key_are_refused(saved_model: Models) -> None:
    model = saved_model("llama")
    other, _ = model.provisioned(FeaturePermutation(block=8))
    with pytest.raises(ModelMismatchError, match="provision_id"):
        _mask_check(model, LoopbackChannel(other), "stip")


def test_weights_that_are_not_those_that_were_provisioned_are_refused(
    saved_model: Models, tmp_path: Path
) -> None:
    model = saved_model("llama")
    server, _ = model.provisioned(FeaturePermutation())
    channel = LyingChannel(server, linear_digest="0" * 64)
    with pytest.raises(ModelMismatchError, match="linear_digest"):
        _mask_check(model, channel, "stip")


def test_linear_weights_are_compared_with_those_that_the_scales_belong_to(
    saved_model: Models,
) -> None:
    """A TEE without linear weights knows their digest from its calibration."""
    model = saved_model("llama")
    with pytest.raises(ModelMismatchError, match="linear_digest"):
        _mask_check(model, LoopbackChannel(model.directory), "shielded", linear="1" * 64)


@pytest.mark.parametrize(
    ("held", "asked", "fits"),
    [
        ((0, 2), None, True),
        ((0, 2), (1, 1), True),
        ((1, 2), (1, 2), True),
        ((1, 2), None, False),
        ((1, 1), (1, 2), False),
        ((0, 1), (0, 2), False),
    ],
)
def test_a_service_must_hold_the_layers_that_it_is_asked_for(
    saved_model: Models, held: tuple[int, int], asked: tuple[int, int] | None, fits: bool
) -> None:
    directory = saved_model("llama").directory
    config, checkpoint = read_config(directory), Checkpoint(directory)
    norms = load_tee_model(config, checkpoint, torch.float32).norm_weights()
    check = ServiceCheck(config, checkpoint, norms)
    reply = LyingChannel(directory, layers=held).call(InitRequest()).response
    if fits:
        assert check.verify("there", reply, asked) is reply
        return
    with pytest.raises(ModelMismatchError) as caught:
        check.verify("there", reply, asked)
    first, last = asked or (0, 2)
    assert caught.value.where == "model at there: layers"
    assert caught.value.got == f"{held[0]}-{held[1]}"
    assert caught.value.expected.startswith(f"{first}-{last}, ")


@each_row(
    ("held", "asked", "got", "expected"),
    [
        ((0, 1), (0, 1), None, None),
        ((1, 2), (1, 2), None, None),
        ((0, 2), (1, 2), "columns 0/2", "columns 1/2, which"),
        ((0, 2), (0, 3), "columns 0/2", "columns 0/3, which"),
        ((0, 2), (0, 1), "columns 0/2", "all columns, which"),
        ((0, 1), (0, 2), "all columns", "columns 0/2, which"),
    ],
)
def test_a_service_must_hold_the_columns_that_it_is_asked_for(
    saved_model: Models,
    held: tuple[int, int],
    asked: tuple[int, int],
    got: str | None,
    expected: str | None,
) -> None:
    directory = saved_model("llama").directory
    config, checkpoint = read_config(directory), Checkpoint(directory)
    norms = load_tee_model(config, checkpoint, torch.float32).norm_weights()
    check = ServiceCheck(config, checkpoint, norms)
    reply = LyingChannel(directory, columns=held).call(InitRequest()).response
    if got is None or expected is None:
        assert check.verify("there", reply, None, asked) is reply
        return
    with pytest.raises(ModelMismatchError) as caught:
        check.verify("there", reply, None, asked)
    assert caught.value.where == "model at there: columns"
    assert caught.value.got == got
    assert caught.value.expected.startswith(expected)
    assert "gpu-service --columns" in caught.value.expected


def test_a_service_of_several_ranks_is_not_asked_for_whole_layers(saved_model: Models) -> None:
    directory = saved_model("llama").directory
    config, checkpoint = read_config(directory), Checkpoint(directory)
    norms = load_tee_model(config, checkpoint, torch.float32).norm_weights()
    reply = LyingChannel(directory, ranks=2).call(InitRequest()).response
    assert ServiceCheck(config, checkpoint, norms).verify("there", reply) is reply
    check = ServiceCheck(config, checkpoint, norms, whole_layers=True)
    with pytest.raises(ModelMismatchError, match="model at there: ranks: got 2, expected 1: the"):
        check.verify("there", reply)
    alone = LyingChannel(directory).call(InitRequest()).response
    assert check.verify("there", alone) is alone


def test_digests_are_computed_once_for_all_connections(
    saved_model: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = saved_model("llama").directory
    config, checkpoint = read_config(directory), Checkpoint(directory)
    norms = load_tee_model(config, checkpoint, torch.float32).norm_weights()
    check = ServiceCheck(config, checkpoint, norms)
    reply = LoopbackChannel(directory).call(InitRequest()).response

    def again(*_: object) -> str:
        raise AssertionError("read again")

    monkeypatch.setattr("tee_side.remote.handshake.model_digest", again)
    for _ in range(2):
        check.verify("there", reply)


def test_a_service_that_scales_rope_as_the_configuration_says_is_accepted(
    saved_model: Models,
) -> None:
    scaling = {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0}
    ours = saved_model("llama", rope_parameters=scaling).directory
    reply = LoopbackChannel(ours).call(InitRequest()).response
    assert isinstance(reply, InitReply)
    assert reply.rotary_emb_params.attention_scaling != 1.0
    _check(ours, LoopbackChannel(ours))
