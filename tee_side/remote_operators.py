"""Operators that leave the TEE: one request each, and a check of what comes back.

Every reply's dtype and shape must be what the TEE's own configuration implies. Whether the numbers
are right is not checked here (docs/limitations.md).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

import torch

from protocol.channel import Channel, Exchange
from protocol.errors import ReplyError
from protocol.messages import (
    FUSED_MODULES,
    EmbeddingRequest,
    FloatDtype,
    LinearOperator,
    LinearRequest,
    LMHeadRequest,
    MatmulRequest,
    ModuleName,
    Request,
    TensorReply,
)
from protocol.model.config import ModelConfig
from protocol.tensors import from_torch, short_name, to_torch
from tee_side.policy import Operator

OnExchange = Callable[[Operator, Exchange], None]


class RemoteOperators:
    """Asks the service. Raises the channel's errors, and ReplyError for a wrong dtype or shape.

    `one_rpc_per_module`: q, k, v, gate and up travel alone, as in the published schema, instead of
    together with what shares their input.
    """

    def __init__(
        self,
        channel: Channel,
        config: ModelConfig,
        dtype: torch.dtype,
        *,
        one_rpc_per_module: bool = False,
        on_exchange: OnExchange | None = None,
    ) -> None:
        self._channel = channel
        self._config = config
        self._dtype = dtype
        self._one_rpc_per_module = one_rpc_per_module
        self._on_exchange = on_exchange

    def embedding(self, token_ids_T: torch.Tensor) -> torch.Tensor:
        """Look up [T, D]. GPU sees: the token ids."""
        request = EmbeddingRequest(
            input_ids=from_torch(token_ids_T), dtype=cast(FloatDtype, short_name(self._dtype))
        )
        shape = (*token_ids_T.shape, self._config.hidden_size)
        return self._call("embedding", request, shape)

    def qkv_proj(
        self, layer: int, h_TD: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return q, k and v. GPU sees: the normalised hidden states."""
        q, k, v = self._linear(layer, "qkv_proj", h_TD)
        return q, k, v

    def attn_scores(self, layer: int, q_KRC: torch.Tensor, k_KSC: torch.Tensor) -> torch.Tensor:
        """Q K^T. GPU sees: scaled queries and the whole key cache of the sequence."""
        return self._matmul("attn_scores", q_KRC, k_KSC.transpose(1, 2))

    def attn_values(self, layer: int, p_KRS: torch.Tensor, v_KSC: torch.Tensor) -> torch.Tensor:
        """P V. GPU sees: attention probabilities and the whole value cache of the sequence."""
        return self._matmul("attn_values", p_KRS, v_KSC)

    def o_proj(self, layer: int, out_TX: torch.Tensor) -> torch.Tensor:
        """Project to [T, D]. GPU sees: the heads' outputs."""
        return self._linear(layer, "o_proj", out_TX)[0]

    def gate_up_proj(self, layer: int, h_TD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return gate and up. GPU sees: the normalised hidden states."""
        gate, up = self._linear(layer, "gate_up_proj", h_TD)
        return gate, up

    def down_proj(self, layer: int, a_TF: torch.Tensor) -> torch.Tensor:
        """Project to [T, D]. GPU sees: the MLP's inner activations."""
        return self._linear(layer, "down_proj", a_TF)[0]

    def lm_head(self, h_ND: torch.Tensor) -> torch.Tensor:
        """Return logits [N, V]. GPU sees: the final hidden states, and so the logits."""
        request = LMHeadRequest(hidden_states=from_torch(h_ND))
        return self._call("lm_head", request, (*h_ND.shape[:-1], self._config.vocab_size))

    def _linear(
        self, layer: int, operator: LinearOperator, hidden: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        modules = FUSED_MODULES[operator]
        sizes = [self._config.module_shape(module)[0] for module in modules]
        wire = from_torch(hidden)

        def ask(names: Sequence[ModuleName], size: int) -> torch.Tensor:
            request = LinearRequest(layer_idx=layer, module_names=tuple(names), hidden_states=wire)
            return self._call(operator, request, (*hidden.shape[:-1], size))

        if self._one_rpc_per_module:
            return tuple(ask([m], size) for m, size in zip(modules, sizes, strict=True))
        parts: tuple[torch.Tensor, ...] = ask(modules, sum(sizes)).split(sizes, dim=-1)
        return parts

    def _matmul(self, operator: Operator, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        request = MatmulRequest(a=from_torch(a), b=from_torch(b))
        return self._call(operator, request, (*a.shape[:-1], b.shape[-1]))

    def _call(self, operator: Operator, request: Request, shape: tuple[int, ...]) -> torch.Tensor:
        exchange = self._channel.call(request)
        if self._on_exchange is not None:
            self._on_exchange(operator, exchange)
        reply = exchange.response
        where = f"{operator} reply from {self._channel.endpoint}"
        if not isinstance(reply, TensorReply):
            raise ReplyError(where, got=type(reply).__name__, expected="a tensor")
        expected = (short_name(self._dtype), shape)
        if (reply.output.dtype, reply.output.shape) != expected:
            raise ReplyError(
                where,
                got=f"{reply.output.dtype} {list(reply.output.shape)}",
                expected=f"{expected[0]} {list(shape)}",
            )
        return to_torch(reply.output)
