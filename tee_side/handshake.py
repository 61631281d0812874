"""Checks, before anything secret is sent, that the service holds the model of our own directory.

This catches a service that was started with another model. It proves nothing about what the
service computes: it can answer all of this correctly and lie afterwards.
"""

from __future__ import annotations

import torch

from protocol.channel import Channel
from protocol.errors import ModelMismatchError, ReplyError
from protocol.messages import InitReply, InitRequest
from protocol.model.checkpoint import Checkpoint
from protocol.model.config import ModelConfig
from protocol.model.identity import model_digest
from protocol.tensors import to_torch
from tee_side.model import TeeModel


def check_service(
    channel: Channel,
    config: ModelConfig,
    checkpoint: Checkpoint,
    model: TeeModel,
    *,
    timeout_s: float,
) -> None:
    """Compare the service's Init reply with the TEE's own copy, and keep to its message limit.

    Raises ModelMismatchError naming the field, ReplyError for an Init reply that is none, and the
    channel's errors: DeadlineExceededError where nothing answers.
    """
    reply = channel.call(InitRequest(), timeout_s).response
    if not isinstance(reply, InitReply):
        raise ReplyError(
            f"Init reply from {channel.endpoint}", got=type(reply).__name__, expected="InitReply"
        )
    theirs, ours = reply.config.model_dump(), _published_sizes(config)
    for name, value in ours.items():
        if theirs[name] != value:
            raise _mismatch(channel, name, str(theirs[name]), str(value))
    norm = reply.norm_weights.get("final_norm")
    if norm is None or not _equal(to_torch(norm.weight), model.final_norm):
        raise _mismatch(channel, "final_norm", "other weights", "those of the TEE's directory")
    # A larger message would not be answered at all: ZeroMQ drops the connection.
    channel.max_message_bytes = min(channel.max_message_bytes, reply.max_message_bytes)
    digest = model_digest(config, checkpoint)
    if reply.model_digest != digest:
        raise _mismatch(channel, "model digest", reply.model_digest[:16], digest[:16])


def _published_sizes(config: ModelConfig) -> dict[str, int]:
    return {
        "num_layers": config.num_hidden_layers,
        "hidden_size": config.hidden_size,
        "num_heads": config.num_attention_heads,
        "num_kv_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
    }


def _equal(theirs: torch.Tensor, ours: torch.Tensor) -> bool:
    return theirs.shape == ours.shape and torch.equal(theirs.to(ours.dtype), ours)


def _mismatch(channel: Channel, what: str, got: str, expected: str) -> ModelMismatchError:
    return ModelMismatchError(
        f"model at {channel.endpoint}: {what}",
        got=got,
        expected=f"{expected} (start service and runner with the same model)",
    )
