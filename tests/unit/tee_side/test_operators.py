"""Placed operators call what the policy says, per operator, layer and phase."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import pytest

from protocol.channel import Exchange
from tee_side.light import LightOperators
from tee_side.masks.pad import Pad
from tee_side.masks.row_permutation import RowPermutation
from tee_side.observer import AnyOperator, Observer
from tee_side.operators import Cover, Operators, PlacedOperators, place
from tee_side.overlap import run
from tee_side.policy import Policy
from tee_side.vocabulary import LAYERLESS, OPERATORS, PHASES, Operator, Phase, Place, TeeStage

LAYERS = 4


class Table:
    """Operators that say who was called."""

    def __init__(self, name: str) -> None:
        self._name = name

    async def _say(self, operator: str, *arguments: Any) -> tuple[Any, ...]:
        return (self._name, operator, *arguments)


def _method(operator: str) -> Callable[..., Any]:
    return lambda self, *arguments: self._say(operator, *arguments)


for _operator in OPERATORS:
    setattr(Table, _operator, _method(_operator))


class Noted:
    """An observer that keeps what it is told."""

    def __init__(self) -> None:
        self.calls: list[tuple[AnyOperator, int | None, Place]] = []
        self.spans: list[tuple[AnyOperator, int | None, TeeStage]] = []

    def lane(self, index: int) -> Noted:
        raise AssertionError("the lane is chosen by who places")

    def called(self, operator: AnyOperator, layer: int | None, place: Place) -> None:
        self.calls.append((operator, layer, place))

    def spent(
        self,
        operator: AnyOperator,
        layer: int | None,
        stage: TeeStage,
        started_ns: int,
        ended_ns: int,
    ) -> None:
        assert 0 < started_ns <= ended_ns
        self.spans.append((operator, layer, stage))

    def exchanged(
        self, operator: Operator, layer: int | None, exchanges: Sequence[Exchange]
    ) -> None:
        raise AssertionError("no exchange is made here")


LIGHT = LightOperators(1e-5)


def _placed(operators: dict[str, Any], observer: Observer | None = None) -> PlacedOperators:
    policy = Policy.model_validate(
        {
            "name": "n",
            "summary": "s",
            "arithmetic": "int8",
            "operators": {**dict.fromkeys(OPERATORS, "tee"), **operators},
        }
    )
    policy.check(LAYERS)
    remote: dict[Cover, Operators] = {
        (None, "none"): cast(Operators, Table("clear")),
        (None, "freivalds"): cast(Operators, Table("clear verified")),
        (Pad(), "none"): cast(Operators, Table("pad")),
        (Pad(), "freivalds"): cast(Operators, Table("pad verified")),
        (RowPermutation(), "none"): cast(Operators, Table("row")),
    }
    return place(policy, LAYERS, cast(Operators, Table("tee")), remote, LIGHT, observer)


def _called(table: Any, operator: str, layer: int = 0) -> str:
    arguments = ("x",) if operator in LAYERLESS else (layer, "x")
    found = run(getattr(table, operator)(*arguments))
    assert found[1:] == (operator, *arguments)
    return str(found[0])


@pytest.mark.parametrize("phase", PHASES)
def test_without_layers_and_phases_there_is_one_table(phase: Phase) -> None:
    ops = _placed({"embedding": "gpu", "o_proj": {"place": "gpu", "mask": "pad"}})
    assert ops.one_table
    assert ops.prefill is ops.decode is ops[phase]
    assert ops.light is LIGHT
    found = {operator: _called(ops[phase], operator) for operator in OPERATORS}
    assert found == dict.fromkeys(OPERATORS, "tee") | {"embedding": "clear", "o_proj": "pad"}


def test_every_layer_calls_its_own_placement() -> None:
    ops = _placed(
        {
            "qkv_proj": [
                {"place": "tee", "layers": 0},
                {"place": "gpu", "layers": "1-2", "mask": "pad"},
                {"place": "gpu", "layers": "3-"},
            ]
        }
    )
    assert ops.one_table
    called = [_called(ops["decode"], "qkv_proj", layer) for layer in range(LAYERS)]
    assert called == ["tee", "pad", "pad", "clear"]
    with pytest.raises(IndexError):
        _called(ops["decode"], "qkv_proj", LAYERS)


def test_phases_have_tables_of_their_own() -> None:
    ops = _placed(
        {
            "o_proj": [
                {"place": "tee", "phase": "prefill"},
                {"place": "gpu", "phase": "decode", "layers": "0-1", "mask": "pad"},
                {"place": "tee", "phase": "decode", "layers": "2-"},
            ],
            "attn_scores": {"place": "gpu", "mask": "row-permutation"},
        }
    )
    assert not ops.one_table
    assert ops.light is LIGHT
    found = {
        phase: [_called(ops[phase], "o_proj", layer) for layer in range(LAYERS)] for phase in PHASES
    }
    assert found == {"prefill": ["tee"] * 4, "decode": ["pad", "pad", "tee", "tee"]}
    assert {_called(ops[phase], "attn_scores") for phase in PHASES} == {"row"}


def test_an_observer_is_told_of_what_runs_in_the_tee() -> None:
    """What leaves tells it by itself, with the stages that only it knows."""
    noted = Noted()
    ops = _placed(
        {"down_proj": [{"place": "tee", "layers": 0}, {"place": "gpu", "layers": "1-"}]}, noted
    )
    for layer in range(3):
        _called(ops["decode"], "down_proj", layer)
    _called(ops["decode"], "lm_head")
    assert noted.calls == [("down_proj", 0, "tee"), ("lm_head", None, "tee")]
    assert noted.spans == noted.calls


def test_without_an_observer_the_table_holds_the_methods_themselves() -> None:
    local = Table("tee")
    policy = Policy.model_validate(
        {"name": "n", "summary": "s", "operators": dict.fromkeys(OPERATORS, "tee")}
    )
    table = place(policy, LAYERS, cast(Operators, local), {}, LIGHT)["decode"]
    assert [getattr(table, operator).__self__ for operator in OPERATORS] == [local] * 8


@pytest.mark.parametrize(
    ("products", "stays"),
    [
        ({}, [True, True, True, True]),
        ({"attn_scores": "gpu"}, [False, False, False, False]),
        ({"attn_values": "gpu"}, [False, False, False, False]),
        (
            {
                "attn_scores": [{"place": "gpu", "layers": 0}, {"place": "tee", "layers": "1-"}],
                "attn_values": [{"place": "tee", "layers": "0-2"}, {"place": "gpu", "layers": 3}],
            },
            [False, True, True, False],
        ),
    ],
)
def test_attention_stays_in_a_layer_that_keeps_both_of_its_products(
    products: dict[str, Any], stays: list[bool]
) -> None:
    table = _placed(products)["decode"]
    assert [table.attention_stays(layer) for layer in range(LAYERS)] == stays


def test_attention_may_stay_in_one_phase_only() -> None:
    ops = _placed(
        {
            "attn_values": [
                {"place": "tee", "phase": "prefill"},
                {"place": "gpu", "phase": "decode"},
            ]
        }
    )
    assert {phase: ops[phase].attention_stays(1) for phase in PHASES} == {
        "prefill": True,
        "decode": False,
    }


@pytest.mark.parametrize("mask", [None, "pad"])
def test_what_is_verified_goes_to_what_verifies_and_nothing_else_does(mask: str | None) -> None:
    """One mask, in one layer verified and in the others not."""
    placed = [
        {"layers": "0", "place": "gpu", "mask": mask, "verify": "freivalds"},
        {"layers": "1-", "place": "gpu", "mask": mask},
    ]
    table = _placed({"o_proj": placed})["decode"]
    named = mask or "clear"
    assert [_called(table, "o_proj", layer) for layer in range(LAYERS)] == [
        f"{named} verified",
        *[named] * (LAYERS - 1),
    ]


def test_a_placement_that_nothing_was_made_for_is_a_mistake_of_the_caller() -> None:
    with pytest.raises(KeyError):
        _placed({"attn_values": {"place": "gpu", "mask": "row-mix"}})
