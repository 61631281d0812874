"""Remote operators that are not `RemoteLinear`: installed packages register them.

The entry points `tsqp.operators` name a class each for `embedding`, `attention` (whose products are
`attn_scores` and `attn_values`) and `lm_head`. What they send goes through `carry_out`, too.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

import torch

from protocol.errors import PolicyError
from tee_side.plugins import load_entry_point, one_entry_point
from tee_side.protect.randomness import Randomness
from tee_side.remote.call import CallSettings, RunParts
from tee_side.words import Operator, Phase, registered_name

GROUP = "tsqp.operators"


class RegisteredOperator(Protocol):
    """An operator of a run, as an installed package computes it at a service."""

    def __init__(self, parts: RunParts) -> None:
        """Read what is needed, and draw the secrets of checks; once a run."""

    def bind(
        self, layer: int, phase: Phase, settings: CallSettings, randomness: Randomness
    ) -> Callable[..., Awaitable[torch.Tensor]]:
        """Return what the forward pass calls, in a layer and phase in which the operator leaves.

        `embedding` and `lm_head` get a tensor, `attention` what `RemoteAttention` does.
        """


def find_registered(
    policy: str, operators: Sequence[Operator]
) -> dict[str, type[RegisteredOperator]]:
    """Return the classes that send operators of a policy, by the names they are registered under.

    Raises PolicyError that says what to install, and PluginError for a package that does not load.
    """
    found: dict[str, type[RegisteredOperator]] = {}
    for operator in operators:
        name = registered_name(operator)
        if (entry := one_entry_point(GROUP, name)) is None:
            raise PolicyError(
                f"policy {policy}: {operator}",
                "a placement that leaves, without a package that sends it",
                f"an installed package that registers {name!r} in the entry points"
                f' {GROUP}, as tsqp does, or place = "tee"',
            )
        found[name] = load_entry_point(entry)
    return found
