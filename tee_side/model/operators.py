"""The operators that a policy places, as the forward pass calls them.

`Operators` is the table of one phase: where each operator of each layer runs was decided when the
run was assembled, so that a call costs nothing more than the call. Shape suffixes as in
`tee_side.model.forward`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch

from protocol.messages import FUSED_MODULES
from tee_side.model.batch import Batch
from tee_side.model.layers import Layer, TeeModel
from tee_side.model.local_operators import not_here
from tee_side.policy.placement import Policy, Segment
from tee_side.protect.masks.mask import AdditiveMask, Mask
from tee_side.protect.pads.source import PadLane
from tee_side.remote.overlap import turn
from tee_side.words import LAYERLESS, PRODUCTS, Operator, Phase

Tensor: TypeAlias = torch.Tensor

# An operator of one layer, or of none: one tensor in, one out.
Call: TypeAlias = Callable[[Tensor], Awaitable[Tensor]]


# Attention of a layer of which at least one product leaves the TEE: of q [T, H, C], the last T rows
# of a sequence, and k and v [K, S, C] of all; [T, H * C], as `local_ops.attention` returns.
RemoteAttention: TypeAlias = Callable[[Layer, Tensor, Tensor, Tensor], Awaitable[Tensor]]

# Whole layers at a service, whose KV cache is there: [T, D] of a batch to the same, or behind the
# last layer to what is wanted of it alone: [N + R, D], or the logits [N, V].
RemoteSegment: TypeAlias = Callable[[Tensor, Batch], Awaitable[Tensor]]


@dataclass(frozen=True, slots=True)
class Operators:
    """What a forward pass calls in one phase.

    `embedding`: int64 [T] -> [T, D]; `lm_head`: [N, D] -> [N, V]. The linear operators, biases
    included, of each layer: `qkv_proj` [T, D] -> [T, (H + 2 K) * C], all heads of q, of k, of v
    side by side; `o_proj` [T, H * C] -> [T, D]; `gate_up_proj` [T, D] -> [T, 2 F], gate and up;
    `down_proj` [T, F] -> [T, D]. `products`: of each layer the attention whose products leave, None
    where both stay. `masks`: that pads are drawn for. `head_apart`: whether each micro-batch asks
    for its own logits, because it draws pads for them. `segments`: by each layer that is in one;
    the first calls it, and the others have nothing left to do. `head_in_segment`: whether the last
    of them gives logits.
    """

    embedding: Call
    qkv_proj: Sequence[Call]
    o_proj: Sequence[Call]
    gate_up_proj: Sequence[Call]
    down_proj: Sequence[Call]
    products: Sequence[RemoteAttention | None]
    lm_head: Call
    masks: frozenset[Mask]
    head_apart: bool
    segments: Mapping[int, RemoteSegment] = field(default_factory=dict)
    head_in_segment: bool = False

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
            while not chunk.follows(layer.index):
                await turn()
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

    `model`: with the observer of this micro-batch. `tables`: of the phases, one and the same where
    rows of both run alike. `withheld`: the same with all that would draw pads in the TEE, to the
    same bits. `pads`: what the operators draw from, by mask. `spare`: only for a step with rows of
    several tables, which run side by side.
    """

    model: TeeModel
    tables: Mapping[Phase, Operators]
    withheld: Mapping[Phase, Operators]
    pads: Mapping[Mask, PadLane]
    spare: bool = False


def place(
    policy: Policy,
    layers: int,
    local: Callable[[Operator, int | None], Callable[[Tensor], Tensor]],
    remote: Callable[[Operator, int, Phase], Callable[..., Any]],
    segments: Sequence[Segment] = (),
    segment: Callable[[Segment], RemoteSegment] | None = None,
    *,
    withheld: bool = False,
) -> Mapping[Phase, Operators]:
    """Build the tables of prefill and decode, which is one table where phases do not differ.

    `local`: returns how an operator of a layer, or of none, is called where it stays; `remote`:
    where it leaves; `segment`: how one of `segments` is, each all at one service. The service of
    layer 0 has the embedding, that of the last layer the LM head. `withheld`: what is under pads
    stays, and the LM head of a segment.
    """
    head = any(one.head for one in segments)
    calls_at: dict[int, RemoteSegment] = {}
    if segment is not None:
        for one in segments:
            calls_at |= dict.fromkeys(range(one.first, one.last + 1), _done)
            calls_at[one.first] = segment(one._replace(head=one.head and not withheld))

    def table(phase: Phase) -> Operators:
        drawn: set[Mask] = set()
        # Rows for which the TEE computes much, while others' are under way.
        beside = withheld or (phase == "prefill" and policy.splits_phases)
        stays = yielding if beside else staying

        def call(operator: Operator, layer: int) -> Call:
            alone = operator in LAYERLESS
            if not alone and layer in calls_at:
                return staying(not_here)
            if operator == "lm_head" and head:
                # For what the TEE reads of a prompt: of the rest it is the segment's.
                return staying(local(operator, None))
            placed = policy.at(operator, 0 if alone else layer, phase)
            padded = isinstance(placed.mask, AdditiveMask)
            if placed.leaves and not (padded and withheld):
                drawn.update([placed.mask] if padded and placed.mask else [])
                return remote(operator, layer, phase)
            return stays(local(operator, None if alone else layer))

        def products(layer: int) -> RemoteAttention | None:
            if layer in calls_at:
                return None
            if all(policy.at(product, layer, phase).place == "tee" for product in PRODUCTS):
                return None
            return remote("attn_scores", layer, phase)

        calls: dict[str, Any] = {
            name: [call(name, layer) for layer in range(layers)] for name in FUSED_MODULES
        }
        head_apart = isinstance(policy.at("lm_head", 0, phase).mask, AdditiveMask)
        return Operators(
            embedding=call("embedding", 0),
            **calls,
            products=[products(layer) for layer in range(layers)],
            lm_head=call("lm_head", layers - 1),
            masks=frozenset(drawn),
            head_apart=head_apart and not withheld,
            segments=calls_at,
            head_in_segment=head and not withheld,
        )

    decode = table("decode")
    return {"decode": decode, "prefill": table("prefill") if policy.splits_phases else decode}


async def _done(h_TD: Tensor, _batch: Batch) -> Tensor:
    """Stand at a layer that the call for an earlier one has computed."""
    return h_TD


def tables_of(lane: MicroBatchOperators) -> list[Operators]:
    """Return every table of a lane, once."""
    found = (*lane.tables.values(), *lane.withheld.values())
    return list({id(table): table for table in found}.values())


def staying(function: Callable[[Tensor], Tensor]) -> Call:
    """Return a function that is computed in the TEE as an operator that could leave."""

    async def call(x: Tensor) -> Tensor:
        return function(x)

    return call


def yielding(function: Callable[[Tensor], Tensor]) -> Call:
    """Return the same, for rows beside which others are under way: they have their turn first."""

    async def call(x: Tensor) -> Tensor:
        await turn()
        return function(x)

    return call
