"""Operators that ask services in this process, for the model of `tests.support.SIZES`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from protocol.messages import Request, Response, TensorReply
from protocol.model.config import read_config
from protocol.tensors import from_torch, to_torch
from tee_side.masking import linear_masking
from tee_side.masks.mask import Mask
from tee_side.randomness import Randomness
from tee_side.remote_operators import RemoteOperators
from tee_side.verifier import UNVERIFIED
from tee_side.vocabulary import Operator
from tests.support import LoopbackChannel, SavedModel

Models = Callable[..., SavedModel]
Change = Callable[[torch.Tensor], torch.Tensor]

# Inputs of every operator for the model of `tests.support.SIZES`, and the shapes that come back.
ARGUMENTS: dict[Operator, tuple[tuple[int | torch.Tensor, ...], list[tuple[int, ...]]]] = {
    "embedding": ((torch.tensor([1, 2, 3]),), [(3, 48)]),
    "qkv_proj": ((0, torch.ones(3, 48)), [(3, 96 + 32 + 32)]),
    "attn_scores": ((0, torch.ones(2, 9, 16), torch.ones(2, 5, 16)), [(2, 9, 5)]),
    "attn_values": ((0, torch.ones(2, 9, 5), torch.ones(2, 5, 16)), [(2, 9, 16)]),
    "o_proj": ((0, torch.ones(3, 96)), [(3, 48)]),
    "gate_up_proj": ((0, torch.ones(3, 48)), [(3, 96), (3, 96)]),
    "down_proj": ((0, torch.ones(3, 96)), [(3, 48)]),
    "lm_head": ((torch.ones(3, 48),), [(3, 320)]),
}


class ChangingChannel(LoopbackChannel):
    """A service that changes every tensor before it sends it."""

    def __init__(self, directory: Path, change: Change) -> None:
        super().__init__(directory)
        self._change = change

    def answer(self, request: Request) -> Response:
        """Compute the true reply and change it."""
        reply = super().answer(request)
        if not isinstance(reply, TensorReply):
            return reply
        return TensorReply(output=from_torch(self._change(to_torch(reply.output))))


class OneSite:
    """Doubles inputs into integers, and halves products."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype

    def encode(self, layer: int, operator: str, x_TI: torch.Tensor) -> torch.Tensor:
        return (2 * x_TI).to(self._dtype)

    def decode(self, layer: int, operator: str, y_TO: torch.Tensor) -> torch.Tensor:
        return y_TO.float() / 2


def remote_under(
    model: SavedModel, channels: list[LoopbackChannel], mask: Mask | None, **settings: Any
) -> RemoteOperators:
    """Return operators that ask these services under a mask, in float32."""
    randomness = Randomness(bytes(32))
    return RemoteOperators(
        lambda _layer: channels,
        read_config(model.directory),
        torch.float32,
        mask=mask,
        hide=linear_masking(mask, randomness),
        randomness=randomness,
        **{"verifier": UNVERIFIED, **settings},
    )
