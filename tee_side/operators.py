"""The operators that a policy places, and where each of them runs.

`Operators` is the table that the forward pass calls. `LocalOperators` computes in the TEE,
`RemoteOperators` asks the service; `place` picks per operator, once, so that a call costs nothing
more than the call. Shape suffixes as in `tee_side.forward`; R stands for G * T.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, Protocol, TypeAlias, cast

import torch

from protocol.channel import Exchange
from protocol.errors import PolicyError
from tee_side.policy import OPERATORS, Operator, Place, Policy

Tensor: TypeAlias = torch.Tensor


class Observer(Protocol):
    """Told about every operator; reports and traces are built on it."""

    def operator(self, operator: Operator, place: Place, elapsed_ns: int) -> None:
        """One call of an operator, wherever it ran."""
        ...

    def exchange(self, operator: Operator, exchange: Exchange) -> None:
        """One round trip that an operator made."""
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


def place(
    policy: Policy,
    local: Operators,
    remote: Operators | None,
    observer: Observer | None = None,
) -> Operators:
    """Build the table for a policy; `remote` may be None only if nothing leaves the TEE."""
    chosen: dict[str, Callable[..., Any]] = {}
    for operator in OPERATORS:
        implementation = local
        if policy.on_gpu(operator):
            if remote is None:
                raise PolicyError(
                    f"policy {policy.name}: {operator}",
                    got="no GPU service",
                    expected="an endpoint, since this operator is placed on the GPU",
                )
            implementation = remote
        method = getattr(implementation, operator)
        where = policy.operators[operator]
        chosen[operator] = (
            method if observer is None else _observed(method, operator, where, observer)
        )
    return cast(Operators, SimpleNamespace(**chosen))


def _observed(
    method: Callable[..., Any], operator: Operator, where: Place, observer: Observer
) -> Callable[..., Any]:
    def timed(*arguments: Any) -> Any:
        started_ns = time.perf_counter_ns()
        result = method(*arguments)
        observer.operator(operator, where, time.perf_counter_ns() - started_ns)
        return result

    return timed
