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
from protocol.tensors import from_torch, torch_dtype
from tee_side.handshake import check_service
from tee_side.model import load_tee_model
from tests.support import LoopbackChannel, SavedModel

Models = Callable[..., SavedModel]


def _check(ours: Path, channel: LoopbackChannel, dtype: str = "float32") -> None:
    config, checkpoint = read_config(ours), Checkpoint(ours)
    model = load_tee_model(config, checkpoint, torch_dtype(dtype))
    check_service(channel, config, checkpoint, model, timeout_s=1.0)


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
        return Exchange(TensorReply(output=output), 0, 0, 0, 0, 0, None)


def test_a_reply_that_is_no_init_reply_is_refused(saved_model: Models) -> None:
    directory = saved_model("llama").directory
    with pytest.raises(ReplyError, match="Init reply from loopback: got TensorReply"):
        _check(directory, ConfusedChannel(directory))
