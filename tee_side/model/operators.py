"""The operators that a policy places, as the forward pass calls them.

`Operators` is the table of one phase: where each operator of each layer runs was decided when the
run was assembled, so that a call costs nothing more than the call. Shape suffixes as in
`tee_side.model.forward`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeAlias

import torch

from protocol.messages import FUSED_MODULES, LinearOperator
from tee_side.model.batch import Batch
from tee_side.model.layers import Layer, TeeModel
from tee_side.model.local_operators import LocalOperators
from tee_side.policy.placement import Policy
from tee_side.protect.pads.source import PadLane
from tee_side.remote.overlap import until
from tee_side.words import PRODUCTS, Operator, Phase

Tensor: TypeAlias = torch.Tensor

# An operator of one layer, or of none: one tensor in, one out.
Call: TypeAlias = Callable[[Tensor], Awaitable[Tensor]]


class RemoteAttention(Protocol):
    """Attention of a layer of which at least one product leaves the TEE."""

    def __call__(
        self, layer: Layer, q_THC: Tensor, k_KSC: Tensor, v_KSC: Tensor
    ) -> Awaitable[Tensor]:
        """Return causal attention of a sequence's last T rows, as `local_ops.attention`."""
        ...


@dataclass(frozen=True, slots=True)
class Operators:
    """What a forward pass calls in one phase.

    `embedding`: int64 [T] -> [T, D]; `lm_head`: [N, D] -> [N, V]. `linear`: one call for each
    layer, [T, I] -> [T, O], biases included. `products`: of each layer the attention whose products
    leave, None where both stay.
    """

    embedding: Call
    linear: Mapping[LinearOperator, Sequence[Call]]
    products: Sequence[RemoteAttention | None]
    lm_head: Call

    def qkv_proj(self, layer: Layer, h_TD: Tensor) -> Awaitable[Tensor]:
        """Project to q, k and v side by side [T, (H + 2 K) * C]: all heads of q, of k, of v."""
        return self.linear["qkv_proj"][layer.index](h_TD)

    def o_proj(self, layer: Layer, out_TX: Tensor) -> Awaitable[Tensor]:
        """Project the heads' outputs [T, H * C] to [T, D]."""
        return self.linear["o_proj"][layer.index](out_TX)

    def gate_up_proj(self, layer: Layer, h_TD: Tensor) -> Awaitable[Tensor]:
        """Project to gate and up side by side [T, 2 F]."""
        return self.linear["gate_up_proj"][layer.index](h_TD)

    def down_proj(self, layer: Layer, a_TF: Tensor) -> Awaitable[Tensor]:
        """Project [T, F] to [T, D]."""
        return self.linear["down_proj"][layer.index](a_TF)

    async def attention(
        self, layer: Layer, q_THC: Tensor, k_TKC: Tensor, v_TKC: Tensor, batch: Batch
    ) -> Tensor:
        """Write each sequence's new keys and values, and attend to its whole cache: [T, H * C]."""
        remote = self.products[layer.index]
        sizes = [chunk.tokens for chunk in batch.chunks]
        parts = (x_TXC.split_with_sizes(sizes) for x_TXC in (q_THC, k_TKC, v_TKC))
        outputs = []
        for chunk, q, k, v in zip(batch.chunks, *parts, strict=True):
            # Rows of the same sequence in an earlier micro-batch: it is seldom behind, but may be.
            await until(partial(chunk.follows, layer.index))
            k_KSC, v_KSC = layer.kv_cache(chunk, k, v)
            outputs.append(
                layer.attention(q, k_KSC, v_KSC)
                if remote is None
                else await remote(layer, q, k_KSC, v_KSC)
            )
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


@dataclass(frozen=True, slots=True)
class MicroBatchOperators:
    """What one micro-batch of a step runs on.

    `model`: with the observer of this micro-batch. `one_table`: whether both phases have the same
    table, so that a step may hold both. `pads`: what the operators draw from.
    """

    model: TeeModel
    prefill: Operators
    decode: Operators
    one_table: bool
    pads: tuple[PadLane, ...]

    def __getitem__(self, phase: Phase) -> Operators:
        return self.prefill if phase == "prefill" else self.decode

    def end_step(self) -> None:
        """Release what a step did not use up, because it failed or left operators out."""
        for lane in self.pads:
            lane.end_step()


def place(
    policy: Policy,
    layers: int,
    local: Callable[[Operator, int | None], Call],
    remote: Callable[[Operator, int, Phase], Callable[..., Any]],
) -> tuple[Operators, Operators]:
    """Build the tables of decode and prefill, which is one table where phases do not differ.

    `local`: returns how an operator of a layer, or of none, is called where it stays; `remote`:
    where it leaves. The service of layer 0 has the embedding, that of the last layer the LM head.
    """

    def table(phase: Phase) -> Operators:
        def call(operator: LinearOperator, layer: int) -> Call:
            stays = policy.at(operator, layer, phase).place == "tee"
            return local(operator, layer) if stays else remote(operator, layer, phase)

        def alone(operator: Operator, layer: int) -> Call:
            stays = policy.at(operator, 0, phase).place == "tee"
            return local(operator, None) if stays else remote(operator, layer, phase)

        def products(layer: int) -> RemoteAttention | None:
            if all(policy.at(product, layer, phase).place == "tee" for product in PRODUCTS):
                return None
            return remote("attn_scores", layer, phase)

        return Operators(
            alone("embedding", 0),
            {name: [call(name, layer) for layer in range(layers)] for name in FUSED_MODULES},
            [products(layer) for layer in range(layers)],
            alone("lm_head", layers - 1),
        )

    decode = table("decode")
    return decode, table("prefill") if policy.splits_phases else decode


def staying(function: Callable[[Tensor], Tensor]) -> Call:
    """Return a function that is computed in the TEE as an operator that could leave."""

    async def call(x: Tensor) -> Tensor:
        return function(x)

    return call


def local_operators(local: LocalOperators, layers: int) -> Operators:
    """Return the table of a model that runs in the TEE as a whole."""

    def call(operator: Operator, layer: int | None) -> Call:
        return staying(local.function(operator, layer))

    return Operators(
        call("embedding", None),
        {name: [call(name, layer) for layer in range(layers)] for name in FUSED_MODULES},
        [None] * layers,
        call("lm_head", None),
    )
