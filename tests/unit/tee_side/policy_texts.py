"""Short ways to write a policy, for the tests of policies."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from protocol.errors import PolicyError
from tee_side.policy.placement import Policy, load_policy
from tee_side.words import OPERATORS, Operator

# What leaves in the clear, and is believed.
CLEAR = {"place": "gpu", "mask": "none", "verify": "none"}
CLEAR_TOML = '{ place = "gpu", mask = "none", verify = "none" }'

LINEAR: set[Operator] = {"qkv_proj", "o_proj", "gate_up_proj", "down_proj"}


def leaves(policy: Policy, operator: Operator) -> bool:
    """Say whether an operator leaves the TEE, in some layer and phase."""
    return operator in {operator for operator, _ in policy.leaving()}


def policy_toml(**changes: str | None) -> str:
    """Text of a policy with everything in the TEE, and some lines changed or left out."""
    lines: dict[str, str | None] = {
        "name": '"mine"',
        "summary": '"a test"',
        "one_rpc_per_module": "false",
    }
    operators: dict[str, str | None] = dict.fromkeys(OPERATORS, '"tee"')
    for key, value in changes.items():
        target = operators if key in operators or key.startswith("op_") else lines
        target[key.removeprefix("op_")] = value
    head = [f"{key} = {value}" for key, value in lines.items() if value is not None]
    body = [f"{key} = {value}" for key, value in operators.items() if value is not None]
    return "\n".join([*head, "[operators]", *body])


def refusal(path: Path, text: str) -> PolicyError:
    """Write a policy file, and return the error that it is refused with, which names the file."""
    path.write_text(text)
    with pytest.raises(PolicyError) as caught:
        load_policy(str(path))
    assert str(path) in caught.value.where
    return caught.value


def policy_of(operators: dict[Any, Any] | None = None, **settings: Any) -> Policy:
    """Return a policy with everything in the TEE but these operators. `settings`: other fields."""
    placed = {**dict.fromkeys(OPERATORS, "tee"), **(operators or {})}
    return Policy.model_validate({"name": "n", "summary": "s", "operators": placed, **settings})
