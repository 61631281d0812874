"""Remote operators that are not `RemoteLinear`: installed packages register them.

The entry points `tsqp.operators` name a class each for `embedding`, `attention` (whose products are
`attn_scores` and `attn_values`) and `lm_head`. What they send goes through `carry_out`, too.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from protocol.errors import PolicyError
from protocol.model.checkpoint import Checkpoint
from protocol.model.config import ModelConfig
from tee_side.plugins import load_entry_point, one_entry_point
from tee_side.policy.placement import Policy
from tee_side.protect.randomness import Randomness
from tee_side.remote.linear import CallSettings
from tee_side.words import PRODUCTS, Operator, Phase

GROUP = "tsqp.operators"


@dataclass(frozen=True, slots=True)
class RunParts:
    """What a registered operator is made from; the policy has been checked against the model."""

    policy: Policy
    config: ModelConfig
    checkpoint: Checkpoint
    dtype: torch.dtype


class RegisteredOperator(Protocol):
    """An operator of a run, as an installed package computes it at a service."""

    def __init__(self, parts: RunParts) -> None:
        """Read what is needed, and draw the secrets of checks; once a run."""
        ...

    def bind(
        self, layer: int, phase: Phase, settings: CallSettings, randomness: Randomness
    ) -> Callable[..., Awaitable[torch.Tensor]]:
        """Return what the forward pass calls, in a layer and phase in which the operator leaves.

        `embedding` and `lm_head` get a tensor, `attention` what `RemoteAttention` does.
        """
        ...


def registered_name(operator: Operator) -> str:
    """Return under which name the class of an operator is registered."""
    return "attention" if operator in PRODUCTS else operator


def find_registered(
    policy: Policy, *, head_in_segment: bool = False
) -> dict[str, type[RegisteredOperator]]:
    """Return the classes of all others that leave, by registered name.

    `head_in_segment`: whether the LM head leaves with one. Raises PolicyError that says what to
    install, and PluginError for a package that does not load.
    """
    found: dict[str, type[RegisteredOperator]] = {}
    for operator, _ in policy.leaving():
        if operator in policy.projections or registered_name(operator) in found:
            continue
        if operator == "segment" or (operator == "lm_head" and head_in_segment):
            continue
        name = registered_name(operator)
        if (entry := one_entry_point(GROUP, name)) is None:
            raise PolicyError(
                f"policy {policy.name}: {operator}",
                got="a placement that leaves, without a package that sends it",
                expected=f"an installed package that registers {name!r} in the entry points"
                f' {GROUP}, as tsqp does, or place = "tee"',
            )
        found[name] = load_entry_point(entry)
    return found
