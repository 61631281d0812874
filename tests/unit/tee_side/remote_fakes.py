"""Operators that ask services in this process, for the model of `tests.support.SIZES`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from protocol.channel import Channel
from protocol.messages import LinearOperator, Request, Response, TensorReply
from protocol.model.config import read_config
from protocol.tensors import from_torch, to_torch
from tee_side.protect.masking import HideAt, MaskRules, linear_masking
from tee_side.protect.masks.mask import Mask
from tee_side.protect.randomness import Randomness
from tee_side.protect.sites import FloatSite, Sites
from tee_side.protect.verifier import UNVERIFIED
from tee_side.remote.linear import CallSettings, RemoteLinear
from tee_side.words import Operator, Site, is_linear
from tests.support import LoopbackChannel, SavedModel
from tsqp.lab.research.operators import embedding_call, lm_head_call, product_call

Models = Callable[..., SavedModel]
Change = Callable[[torch.Tensor], torch.Tensor]

# Inputs of every operator for the model of `tests.support.SIZES`, and the shapes that come back.
ARGUMENTS: dict[Operator, tuple[tuple[int | torch.Tensor, ...], list[tuple[int, ...]]]] = {
    "embedding": ((torch.tensor([1, 2, 3]),), [(3, 48)]),
    "qkv_proj": ((0, torch.ones(3, 48)), [(3, 96 + 32 + 32)]),
    "attn_scores": ((0, torch.ones(2, 9, 16), torch.ones(2, 5, 16)), [(2, 9, 5)]),
    "attn_values": ((0, torch.ones(2, 9, 5), torch.ones(2, 5, 16)), [(2, 9, 16)]),
    "o_proj": ((0, torch.ones(3, 96)), [(3, 48)]),
    "gate_up_proj": ((0, torch.ones(3, 48)), [(3, 192)]),
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
    """Doubles inputs into integers, and halves products; of every site."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype

    def __getitem__(self, site: Site) -> OneSite:
        return self

    def encode(self, x_TI: torch.Tensor) -> torch.Tensor:
        return (2 * x_TI).to(self._dtype)

    def decode(self, y_TO: torch.Tensor, _x_TI: torch.Tensor) -> torch.Tensor:
        return y_TO.float() / 2


class Remote:
    """Every operator as it leaves under one mask: `remote.o_proj(layer, x)`, and so on.

    `sites`: None where the service adds the bias, in the clear and unchecked.
    """

    def __init__(
        self,
        model: SavedModel,
        channels: Sequence[Channel],
        mask: Mask | None,
        *,
        hide: HideAt | None = None,
        check: Any = UNVERIFIED,
        sites: Sites | None = None,
        one_rpc_per_module: bool = False,
        timeout_s: float | None = None,
    ) -> None:
        self._config, self._mask, self._check = read_config(model.directory), mask, check
        self._settings = CallSettings(lambda _layer: channels, timeout_s, None)
        self._randomness = Randomness(bytes(32))
        self._hide = hide or linear_masking(mask, self._randomness)
        self._sites, self._alone = sites, one_rpc_per_module

    def linear(self, layer: int, operator: LinearOperator, x: torch.Tensor) -> Any:
        site = (layer, operator)
        return RemoteLinear(
            site,
            self._config,
            self._settings,
            hide=self._hide(site),
            rules=MaskRules(self._mask),
            check=self._check,
            linear=FloatSite() if self._sites is None else self._sites[site],
            bias_leaves=self._sites is None,
            one_rpc_per_module=self._alone,
        )(x)

    def __getattr__(self, operator: Operator) -> Callable[..., Any]:
        if is_linear(operator):
            return lambda layer, x: self.linear(layer, operator, x)
        given = (self._mask, self._check, self._settings, self._randomness)
        if operator == "attn_scores":
            return lambda layer, q, k: product_call(operator, layer, *given)((q, k.transpose(1, 2)))
        if operator == "attn_values":
            return lambda layer, p, v: product_call(operator, layer, *given)((p, v))
        make = embedding_call if operator == "embedding" else lm_head_call
        return make(self._config, torch.float32, 0, *given)


def remote_under(
    model: SavedModel, channels: Sequence[Channel], mask: Mask | None, **settings: Any
) -> Remote:
    """Return operators that ask these services under a mask, in float32."""
    return Remote(model, channels, mask, **settings)
