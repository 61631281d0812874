"""A service that holds another model is noticed before anything secret is sent."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from protocol.errors import ModelMismatchError, ReplyError
from protocol.messages import InitReply, InitRequest, TensorReply
from protocol.model.checkpoint import Checkpoint
from protocol.model.config import read_config
from protocol.tensors import from_torch, torch_dtype
from tee_side.model.layers import load_tee_model
from tee_side.remote.handshake import ServiceCheck
from tests.kit.model import LoopbackChannel, Models
from tests.kit.rows import each_row


def _check(directory: Path, dtype: str = "float32", **settings: Any) -> ServiceCheck:
    config, checkpoint = read_config(directory), Checkpoint(directory)
    norms = load_tee_model(config, checkpoint, torch_dtype(dtype)).norm_weights()
    return ServiceCheck(config, checkpoint, norms, **settings)


def _said(directory: Path) -> InitReply:
    reply = LoopbackChannel(directory).call(InitRequest()).response
    assert isinstance(reply, InitReply)
    return reply


@pytest.fixture(scope="module")
def ours(saved_model: Models) -> Path:
    return saved_model("llama").directory


@pytest.fixture(scope="module")
def good(ours: Path) -> InitReply:
    return _said(ours)


@pytest.fixture(scope="module")
def check(ours: Path, good: InitReply) -> ServiceCheck:
    return _check(ours, linear=good.linear_digest)


YARN = {"rope_parameters": {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0}}


@each_row(
    ("kind", "dtype", "overrides"),
    [("qwen2", "bfloat16", {}), ("qwen3", "float32", {}), ("llama", "bfloat16", YARN)],
)
def test_a_service_with_the_same_model_is_accepted(
    saved_model: Models, kind: str, dtype: str, overrides: dict[str, Any]
) -> None:
    directory = saved_model(kind, **overrides).directory
    reply, check = _said(directory), _check(directory, dtype)
    assert (reply.rotary_emb_params.attention_scaling != 1.0) == bool(overrides)
    with pytest.MonkeyPatch.context() as patch:
        # Digests are computed once, for all connections.
        patch.setattr("tee_side.remote.handshake.model_digest", None)
        for _ in range(2):
            assert check.verify("there", reply) is reply


Change = Callable[[InitReply], dict[str, Any]]


def _norm(name: str, **changes: Any) -> Change:
    def change(good: InitReply) -> dict[str, Any]:
        norms = dict(good.norm_weights)
        norm = norms.pop(name, norms["final_norm"])
        if changes:
            norms[name] = norm.model_copy(update=changes)
        return {"norm_weights": norms}

    return change


def _of(field: str, **changes: Any) -> Change:
    return lambda good: {field: getattr(good, field).model_copy(update=changes)}


FIRST = "layer_0_input_layernorm"


@each_row(
    ("change", "field"),
    [
        (_of("config", num_layers=2), "num_layers"),
        (_of("config", hidden_size=36), "hidden_size"),
        (_of("config", num_heads=4), "num_heads"),
        (_of("config", num_kv_heads=3), "num_kv_heads"),
        (_of("config", head_dim=8), "head_dim"),
        (_norm("final_norm"), "final_norm"),
        (_norm("final_norm", weight=from_torch(torch.ones(3))), "final_norm"),
        (_norm("final_norm", weight=from_torch(torch.ones(48))), "final_norm"),
        (_norm(FIRST, weight=from_torch(torch.full((48,), torch.nan))), FIRST),
        (_norm("layer_2_post_attention_layernorm"), "layer_2_post_attention_layernorm"),
        (_norm("final_norm", eps=123.0), "final_norm.eps"),
        (_norm("layer_9_input_layernorm", eps=1e-6), "fields"),
        (_of("rotary_emb_params", inv_freq=from_torch(torch.ones(1))), "inv_freq"),
        (_of("rotary_emb_params", inv_freq=from_torch(torch.ones(8).double())), "inv_freq"),
        (_of("rotary_emb_params", attention_scaling=-5.0), "attention_scaling"),
        (lambda _: {"model_digest": "0" * 64}, "model_digest"),
        (lambda _: {"linear_digest": "0" * 64}, "linear_digest"),
        (lambda _: {"provision_id": "0" * 64}, "provision_id"),
        (lambda _: {"arithmetic": ("int8",)}, "arithmetic"),
    ],
)
def test_a_service_that_says_something_else_is_refused_by_field(
    ours: Path, check: ServiceCheck, good: InitReply, change: Change, field: str
) -> None:
    check.verify("there", good)
    reply = good.model_copy(update=change(good))
    with pytest.raises(ModelMismatchError) as caught:
        check.verify("there", reply)
    assert caught.value.where == f"model at there: {field}"
    assert caught.value.got != caught.value.expected
    if field == "linear_digest":  # a TEE without linear weights has none to compare
        assert _check(ours).verify("there", reply) is reply


def test_rounding_is_no_difference_and_a_hundredth_is(check: ServiceCheck, good: InitReply) -> None:
    norm = torch.frombuffer(
        bytearray(good.norm_weights["final_norm"].weight.data), dtype=torch.float32
    )
    near = _norm("final_norm", weight=from_torch(norm * (1 + 2e-6)))
    check.verify("there", good.model_copy(update=near(good)))
    far = _norm("final_norm", weight=from_torch(norm * 1.01))
    with pytest.raises(ModelMismatchError, match="final_norm"):
        check.verify("there", good.model_copy(update=far(good)))
    with pytest.raises(ReplyError, match="Init reply from there: got TensorReply"):
        check.verify("there", TensorReply(output=from_torch(torch.ones(1))))


@each_row(
    ("changes", "layers", "columns", "said"),
    [
        ({}, (1, 1), (0, 1), None),
        ({"layers": (1, 2)}, (1, 2), (0, 1), None),
        ({"layers": (1, 2)}, None, (0, 1), "layers: got 1-2, expected 0-2, which"),
        ({"layers": (1, 1)}, (1, 2), (0, 1), "layers: got 1-1, expected 1-2, which"),
        ({"layers": (0, 1)}, (0, 2), (0, 1), "layers: got 0-1, expected 0-2, which"),
        ({"columns": (1, 2)}, None, (1, 2), None),
        ({"columns": (0, 2)}, None, (1, 2), "columns: got columns 0/2, expected columns 1/2, whi"),
        ({"columns": (0, 2)}, None, (0, 3), "columns: got columns 0/2, expected columns 0/3, whi"),
        ({"columns": (0, 2)}, None, (0, 1), "columns: got columns 0/2, expected all columns, whi"),
        ({}, None, (0, 2), "columns: got all columns, expected columns 0/2, which"),
    ],
)
def test_a_service_must_hold_the_layers_and_columns_that_it_is_asked_for(
    check: ServiceCheck,
    good: InitReply,
    changes: dict[str, Any],
    layers: Any,
    columns: Any,
    said: str | None,
) -> None:
    reply = good.model_copy(update=changes)
    if said is None:
        assert check.verify("there", reply, layers, columns) is reply
        return
    with pytest.raises(ModelMismatchError, match=f"model at there: {said}"):
        check.verify("there", reply, layers, columns)


def test_a_service_of_several_ranks_is_not_asked_for_whole_layers(
    ours: Path, check: ServiceCheck, good: InitReply
) -> None:
    reply = good.model_copy(update={"ranks": 2})
    assert check.verify("there", reply) is reply
    whole = _check(ours, whole_layers=True)
    assert whole.verify("there", good) is good
    with pytest.raises(ModelMismatchError, match="model at there: ranks: got 2, expected 1: the"):
        whole.verify("there", reply)
