"""The operators that a policy places, and where each of them runs.

`Operators` is the table that the forward pass calls. `LocalOperators` computes in the TEE,
`RemoteOperators` asks the service; `place` picks per operator, layer and phase, once, so that a
call costs nothing more than the call. Shape suffixes as in `tee_side.forward`; R stands for G * T.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Protocol, TypeAlias, cast

import torch

from protocol.channel import Exchange
from tee_side.masks.mask import Mask
from tee_side.policy import Placement, Policy
from tee_side.vocabulary import LAYERLESS, OPERATORS, Operator, Phase, Place

Tensor: TypeAlias = torch.Tensor


class Observer(Protocol):
    """Told about every operator; reports and traces are built on it."""

    def operator(self, operator: Operator, place: Place, elapsed_ns: int) -> None:
        """One call of an operator, wherever it ran."""
        ...

    def exchanges(self, operator: Operator, exchanges: Sequence[Exchange]) -> None:
        """Round trips that an operator made side by side: one, or one a service."""
        ...


class Operators(Protocol):
    """What the forward pass calls; a TEE, a GPU service and a policy's mixture all provide it."""

    def embedding(self, token_ids_T: Tensor, /) -> Tensor:
        """Look up token embeddings: int64 [T] -> [T, D]."""
        ...

    def qkv_proj(self, layer: int, h_TD: Tensor, /) -> tuple[Tensor, Tensor, Tensor]:
        """Project to q [T, H * C], k and v [T, K * C], biases included."""
        ...

    def attn_scores(self, layer: int, q_KRC: Tensor, k_KSC: Tensor, /) -> Tensor:
        """Q K^T of one sequence: [K, R, S]; q is already scaled."""
        ...

    def attn_values(self, layer: int, p_KRS: Tensor, v_KSC: Tensor, /) -> Tensor:
        """P V of one sequence: [K, R, C]."""
        ...

    def o_proj(self, layer: int, out_TX: Tensor, /) -> Tensor:
        """Project the heads' outputs [T, H * C] to [T, D]."""
        ...

    def gate_up_proj(self, layer: int, h_TD: Tensor, /) -> tuple[Tensor, Tensor]:
        """Project to gate and up, each [T, F]."""
        ...

    def down_proj(self, layer: int, a_TF: Tensor, /) -> Tensor:
        """Project [T, F] to [T, D]."""
        ...

    def lm_head(self, h_ND: Tensor, /) -> Tensor:
        """Return logits [N, V]."""
        ...


@dataclass(frozen=True, slots=True)
class PlacedOperators:
    """The tables of both phases; `one_table` if they are the same, so that a step may hold both."""

    prefill: Operators
    decode: Operators
    one_table: bool

    def __getitem__(self, phase: Phase) -> Operators:
        return self.prefill if phase == "prefill" else self.decode


def place(
    policy: Policy,
    layers: int,
    local: Operators,
    remote: Mapping[Mask | None, Operators],
    observer: Observer | None = None,
) -> PlacedOperators:
    """Build the tables for a policy that has been checked against the model.

    `remote` has the operators of the GPU side under each mask of the policy, None for none.
    """

    def table(phase: Phase) -> Operators:
        chosen: dict[str, Callable[..., Any]] = {}
        for operator in OPERATORS:
            count = 1 if operator in LAYERLESS else layers
            methods = [
                _method(policy.at(operator, layer, phase), operator, local, remote, observer)
                for layer in range(count)
            ]
            alike = all(method == methods[0] for method in methods)
            chosen[operator] = methods[0] if alike else _by_layer(methods)
        return cast(Operators, SimpleNamespace(**chosen))

    if not policy.splits_phases:
        both = table("decode")
        return PlacedOperators(both, both, one_table=True)
    return PlacedOperators(table("prefill"), table("decode"), one_table=False)


def _method(
    placement: Placement,
    operator: Operator,
    local: Operators,
    remote: Mapping[Mask | None, Operators],
    observer: Observer | None,
) -> Callable[..., Any]:
    implementation = local if placement.place == "tee" else remote[placement.mask]
    method: Callable[..., Any] = getattr(implementation, operator)
    if observer is None:
        return method
    return _Observed(method, operator, placement.place, observer)


def _by_layer(methods: Sequence[Callable[..., Any]]) -> Callable[..., Any]:
    def dispatch(layer: int, *arguments: Any) -> Any:
        return methods[layer](layer, *arguments)

    return dispatch


@dataclass(frozen=True, slots=True)
class _Observed:
    """A method that is timed; two of the same method are equal, so that layers can share one."""

    method: Callable[..., Any]
    operator: Operator
    where: Place
    observer: Observer

    def __call__(self, *arguments: Any) -> Any:
        started_ns = time.perf_counter_ns()
        result = self.method(*arguments)
        elapsed_ns = time.perf_counter_ns() - started_ns
        self.observer.operator(self.operator, self.where, elapsed_ns)
        return result
