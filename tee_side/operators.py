"""The operators that a policy places, and where each of them runs.

`Operators` is the table that the forward pass calls. `LocalOperators` computes in the TEE,
`RemoteOperators` asks the service; `place` picks per operator, layer and phase, once, so that a
call costs nothing more than the call. Shape suffixes as in `tee_side.forward`; R stands for G * T.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Protocol, TypeAlias, cast

import torch

from tee_side.light import LightOperators
from tee_side.masks.mask import Mask
from tee_side.observed import observed_local
from tee_side.observer import Observer
from tee_side.pads.source import PadLane
from tee_side.policy import Placement, Policy
from tee_side.vocabulary import LAYERLESS, OPERATORS, PRODUCTS, Operator, Phase, Verify

Tensor: TypeAlias = torch.Tensor

# How something leaves: under which mask, and how its results are checked.
Cover: TypeAlias = tuple[Mask | None, Verify]


class Operators(Protocol):
    """What the forward pass calls; a TEE, a GPU service and a policy's mixture all provide it."""

    def attention_stays(self, layer: int, /) -> bool:
        """Say whether scores and values of a layer's attention are both computed in the TEE."""
        ...

    async def embedding(self, token_ids_T: Tensor, /) -> Tensor:
        """Look up token embeddings: int64 [T] -> [T, D]."""
        ...

    async def qkv_proj(self, layer: int, h_TD: Tensor, /) -> Tensor:
        """Project to q, k and v side by side [T, (H + 2 K) * C], biases included."""
        ...

    async def attn_scores(self, layer: int, q_KRC: Tensor, k_KSC: Tensor, /) -> Tensor:
        """Q K^T of one sequence: [K, R, S]; q is already scaled."""
        ...

    async def attn_values(self, layer: int, p_KRS: Tensor, v_KSC: Tensor, /) -> Tensor:
        """P V of one sequence: [K, R, C]."""
        ...

    async def o_proj(self, layer: int, out_TX: Tensor, /) -> Tensor:
        """Project the heads' outputs [T, H * C] to [T, D]."""
        ...

    async def gate_up_proj(self, layer: int, h_TD: Tensor, /) -> tuple[Tensor, Tensor]:
        """Project to gate and up, each [T, F]."""
        ...

    async def down_proj(self, layer: int, a_TF: Tensor, /) -> Tensor:
        """Project [T, F] to [T, D]."""
        ...

    async def lm_head(self, h_ND: Tensor, /) -> Tensor:
        """Return logits [N, V]."""
        ...


@dataclass(frozen=True, slots=True)
class PlacedOperators:
    """What a forward pass calls: placed operators, a table a phase, and the light ones.

    `one_table`: whether the tables are the same, so that a step may hold both phases. `pads`: what
    the operators draw from.
    """

    prefill: Operators
    decode: Operators
    light: LightOperators
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
    local: Operators,
    remote: Mapping[Cover, Operators],
    light: LightOperators,
    observer: Observer | None = None,
    only: Collection[Operator] | None = None,
    pads: Sequence[PadLane] = (),
) -> PlacedOperators:
    """Build the tables for a policy that has been checked against the model.

    `remote` has the operators of the GPU side under each cover that the policy has; it and `light`
    tell an observer by themselves. `only`: the local operators that it is told of. `pads`: what
    `remote` draws from.
    """

    def table(phase: Phase) -> Operators:
        chosen: dict[str, Callable[..., Any]] = {}
        for operator in OPERATORS:
            count = 1 if operator in LAYERLESS else layers
            placements = [policy.at(operator, layer, phase) for layer in range(count)]
            methods: dict[tuple[str, Cover], Callable[..., Any]] = {}
            told = observer if only is None or operator in only else None
            for placement in placements:
                key = (placement.place, cover_of(placement))
                if key not in methods:
                    methods[key] = _method(placement, operator, local, remote, told)
            by_layer = [methods[p.place, cover_of(p)] for p in placements]
            chosen[operator] = by_layer[0] if len(methods) == 1 else _by_layer(by_layer)
        stays = [
            all(policy.at(product, layer, phase).place == "tee" for product in PRODUCTS)
            for layer in range(layers)
        ]
        return cast(Operators, SimpleNamespace(**chosen, attention_stays=stays.__getitem__))

    if not policy.splits_phases:
        both = table("decode")
        return PlacedOperators(both, both, light, True, tuple(pads))
    return PlacedOperators(table("prefill"), table("decode"), light, False, tuple(pads))


def cover_of(placement: Placement) -> Cover:
    """Return how what is placed so leaves."""
    return placement.mask, placement.verify


def _method(
    placement: Placement,
    operator: Operator,
    local: Operators,
    remote: Mapping[Cover, Operators],
    observer: Observer | None,
) -> Callable[..., Any]:
    if placement.place == "gpu":
        return cast(Callable[..., Any], getattr(remote[cover_of(placement)], operator))
    method: Callable[..., Any] = getattr(local, operator)
    return method if observer is None else observed_local(method, operator, observer)


def _by_layer(methods: Sequence[Callable[..., Any]]) -> Callable[..., Any]:
    def dispatch(layer: int, *arguments: Any) -> Any:
        return methods[layer](layer, *arguments)

    return dispatch
