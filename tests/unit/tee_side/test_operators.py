"""Placed operators call what the policy says, per operator, layer and phase."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import pytest

from tee_side.model.operators import Operators, place
from tee_side.policy.placement import Policy
from tee_side.remote.overlap import run
from tee_side.words import LAYERLESS, OPERATORS, PHASES, PRODUCTS, Operator, Phase
from tests.unit.tee_side.policy_texts import CLEAR

LAYERS = 4


def _here(*words: object) -> Any:
    return lambda *_: " ".join(str(word) for word in words if word is not None)


def _saying(*words: object) -> Any:
    async def call(*_: Any) -> str:
        return str(_here(*words)())

    return call


def _placed(operators: dict[str, Any], *, withheld: bool = False) -> Mapping[Phase, Operators]:
    policy = Policy.model_validate(
        {
            "name": "n",
            "summary": "s",
            "arithmetic": "int8",
            "operators": {**dict.fromkeys(OPERATORS, "tee"), **operators},
        }
    )
    policy.check(LAYERS)

    def remote(operator: Operator, layer: int, phase: Phase) -> Any:
        placement = policy.at(operator, 0 if operator in LAYERLESS else layer, phase)
        named = placement.mask.name if placement.mask else "clear"
        return _saying(named, "verified" if placement.verify != "none" else None, layer)

    return place(policy, LAYERS, lambda _, layer: _here("tee", layer), remote, withheld=withheld)


def _called(table: Operators, operator: str, layer: int = 0) -> str:
    calls: Any = table
    if operator in LAYERLESS:
        return str(run(getattr(calls, operator)("x")))
    if operator in PRODUCTS:
        product = table.products[layer]
        return "tee" if product is None else str(run(cast(Any, product)("x")))
    found = str(run(getattr(calls, operator)[layer]("x")))
    where, _, said = found.rpartition(" ")
    assert said == str(layer)
    return where


@pytest.mark.parametrize("phase", PHASES)
def test_without_layers_and_phases_there_is_one_table(phase: Phase) -> None:
    ops = _placed({"embedding": CLEAR, "o_proj": {"place": "gpu", "mask": "pad", "verify": "none"}})
    assert ops["prefill"] is ops["decode"]
    found = {operator: _called(ops[phase], operator) for operator in OPERATORS}
    assert found == dict.fromkeys(OPERATORS, "tee") | {"embedding": "clear 0", "o_proj": "pad"}


def test_every_layer_calls_its_own_placement() -> None:
    ops = _placed(
        {
            "qkv_proj": [
                {"place": "tee", "layers": 0},
                {"place": "gpu", "layers": "1-2", "mask": "pad", "verify": "none"},
                {"place": "gpu", "layers": "3-", "mask": "none", "verify": "none"},
            ]
        }
    )
    assert ops["prefill"] is ops["decode"]
    called = [_called(ops["decode"], "qkv_proj", layer) for layer in range(LAYERS)]
    assert called == ["tee", "pad", "pad", "clear"]
    with pytest.raises(IndexError):
        _called(ops["decode"], "qkv_proj", LAYERS)


def test_phases_have_tables_of_their_own() -> None:
    ops = _placed(
        {
            "o_proj": [
                {"place": "tee", "phase": "prefill"},
                {
                    "place": "gpu",
                    "phase": "decode",
                    "layers": "0-1",
                    "mask": "pad",
                    "verify": "none",
                },
                {"place": "tee", "phase": "decode", "layers": "2-"},
            ],
            "attn_scores": {"place": "gpu", "mask": "row-permutation", "verify": "none"},
        }
    )
    assert ops["prefill"] is not ops["decode"]
    found = {
        phase: [_called(ops[phase], "o_proj", layer) for layer in range(LAYERS)] for phase in PHASES
    }
    assert found == {"prefill": ["tee"] * 4, "decode": ["pad", "pad", "tee", "tee"]}
    assert {_called(ops[phase], "attn_scores") for phase in PHASES} == {"row-permutation 0"}


PAD = {"place": "gpu", "mask": "pad", "verify": "none"}


def test_what_is_under_pads_stays_where_they_are_withheld_and_nothing_else_does() -> None:
    operators = {"embedding": CLEAR, "lm_head": PAD, "o_proj": PAD, "down_proj": CLEAR}
    leaves, stays = (_placed(operators, withheld=withheld)["decode"] for withheld in (False, True))
    names = ("embedding", "lm_head", "o_proj", "down_proj")
    assert [_called(leaves, name) for name in names] == ["clear 0", "pad 3", "pad", "clear"]
    assert [_called(stays, name) for name in names] == ["clear 0", "tee", "tee", "clear"]
    assert [mask.name for mask in leaves.masks] == ["pad"]
    assert not stays.masks
    assert (leaves.head_apart, stays.head_apart) == (True, False)


def test_a_table_draws_for_the_masks_of_its_own_phase_only() -> None:
    ops = _placed({"o_proj": [{"place": "tee", "phase": "prefill"}, {**PAD, "phase": "decode"}]})
    assert [mask.name for mask in ops["decode"].masks] == ["pad"]
    assert not ops["prefill"].masks


@pytest.mark.parametrize(
    ("phase", "split", "withheld", "turns"),
    [
        ("prefill", True, False, 1),
        ("decode", True, False, 0),
        ("prefill", False, False, 0),
        ("decode", False, True, 1),
    ],
)
def test_rows_beside_which_others_are_under_way_let_them_have_their_turn_first(
    phase: Phase, split: bool, withheld: bool, turns: int
) -> None:
    placed = [{"place": "tee", "phase": "prefill"}, {**PAD, "phase": "decode"}]
    table = _placed({"o_proj": placed if split else PAD}, withheld=withheld)[phase]
    running = cast(Any, table.down_proj[0]("x"))
    for _ in range(turns):
        assert running.send(None) is None
    with pytest.raises(StopIteration):
        running.send(None)


def test_the_lm_head_goes_where_the_last_layer_is() -> None:
    remote = lambda operator, layer, _phase: _saying(operator, layer)  # noqa: E731
    policy = Policy.model_validate(
        {"name": "n", "summary": "s", "operators": dict.fromkeys(OPERATORS, CLEAR)}
    )
    decode = place(policy, LAYERS, lambda *_: _here("tee"), remote)["decode"]
    assert _called(decode, "lm_head") == f"lm_head {LAYERS - 1}"
    assert _called(decode, "embedding") == "embedding 0"


@pytest.mark.parametrize(
    ("products", "stays"),
    [
        ({}, [True, True, True, True]),
        ({"attn_scores": CLEAR}, [False, False, False, False]),
        ({"attn_values": CLEAR}, [False, False, False, False]),
        (
            {
                "attn_scores": [
                    {"place": "gpu", "layers": 0, "mask": "none", "verify": "none"},
                    {"place": "tee", "layers": "1-"},
                ],
                "attn_values": [
                    {"place": "tee", "layers": "0-2"},
                    {"place": "gpu", "layers": 3, "mask": "none", "verify": "none"},
                ],
            },
            [False, True, True, False],
        ),
    ],
)
def test_attention_stays_in_a_layer_that_keeps_both_of_its_products(
    products: dict[str, Any], stays: list[bool]
) -> None:
    table = _placed(products)["decode"]
    assert [product is None for product in table.products] == stays


def test_attention_may_stay_in_one_phase_only() -> None:
    ops = _placed(
        {
            "attn_values": [
                {"place": "tee", "phase": "prefill"},
                {"place": "gpu", "phase": "decode", "mask": "none", "verify": "none"},
            ]
        }
    )
    assert {phase: ops[phase].products[1] is None for phase in PHASES} == {
        "prefill": True,
        "decode": False,
    }


@pytest.mark.parametrize("mask", [None, "pad"])
def test_what_is_verified_goes_to_what_verifies_and_nothing_else_does(mask: str | None) -> None:
    """One mask, in one layer verified and in the others not."""
    placed = [
        {"layers": "0", "place": "gpu", "mask": mask or "none", "verify": "freivalds"},
        {"layers": "1-", "place": "gpu", "mask": mask or "none", "verify": "none"},
    ]
    table = _placed({"o_proj": placed})["decode"]
    named = mask or "clear"
    assert [_called(table, "o_proj", layer) for layer in range(LAYERS)] == [
        f"{named} verified",
        *[named] * (LAYERS - 1),
    ]
