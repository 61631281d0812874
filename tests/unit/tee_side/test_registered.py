"""Operators that are not linear leave the TEE by what an installed package registers, or not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from protocol.errors import PolicyError
from tee_side import plugins
from tee_side.policy.placement import Policy, load_policy
from tee_side.remote.registered import find_registered
from tee_side.words import OPERATORS, Operator, is_linear
from tests.kit.model import SavedModel
from tests.unit.tee_side.policy_texts import CLEAR

OTHERS = [operator for operator in OPERATORS if not is_linear(operator)]


def _sending(*operators: Operator) -> Policy:
    placed = {**dict.fromkeys(OPERATORS, "tee"), **dict.fromkeys(operators, CLEAR)}
    return Policy.model_validate({"name": "n", "summary": "s", "operators": placed})


@pytest.fixture
def nothing_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugins, "entry_points", lambda **_: ())


@pytest.mark.parametrize("operator", OTHERS)
def test_a_policy_that_needs_a_package_says_what_to_install(
    saved_model: Callable[..., SavedModel], nothing_installed: None, operator: Operator
) -> None:
    """When the run is assembled, before a service is asked for anything."""
    name = "attention" if operator.startswith("attn") else operator
    with pytest.raises(
        PolicyError,
        match=f"policy n: {operator}: got .* expected an installed package that registers '{name}'"
        " in the entry points tsqp.operators",
    ):
        saved_model("llama").tee(_sending("o_proj", operator))


def test_a_verified_product_of_floats_needs_a_package(
    saved_model: Callable[..., SavedModel], nothing_installed: None
) -> None:
    placed = {**dict.fromkeys(OPERATORS, "tee"), "o_proj": CLEAR | {"verify": "freivalds"}}
    policy = Policy.model_validate({"name": "n", "summary": "s", "operators": placed})
    with pytest.raises(PolicyError, match="that registers 'float'"):
        saved_model("llama").tee(policy)


@pytest.mark.parametrize("name", ["tee-only", "attention-in-tee", "shielded", "two-server"])
def test_linear_operators_need_no_package(nothing_installed: None, name: str) -> None:
    assert find_registered(load_policy(name)) == {}


def test_one_class_sends_both_attention_products() -> None:
    found: Any = find_registered(_sending("attn_scores", "attn_values", "lm_head"))
    assert sorted(found) == ["attention", "lm_head"]
