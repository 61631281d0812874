"""Tables of placed operators: what stays where pads are withheld, and who has a turn first.

That each layer and phase calls its own placement: tests/contract/test_policies.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import pytest

from tee_side.model.operators import Operators, place
from tee_side.remote.overlap import run
from tee_side.words import LAYERLESS, PHASES, Operator, Phase
from tests.kit.model import CLEAR, policy_of
from tests.kit.rows import each_row

LAYERS = 4
PAD = CLEAR | {"mask": "pad"}
TEE = {"place": "tee"}


def _placed(operators: dict[str, Any], *, withheld: bool = False) -> Mapping[Phase, Operators]:
    policy = policy_of(operators, arithmetic="int8")
    policy.check(LAYERS)

    def remote(operator: Operator, layer: int, phase: Phase) -> Any:
        at = policy.at(operator, 0 if operator in LAYERLESS else layer, phase)

        async def call(*_: Any) -> str:
            return f"{at.mask.name if at.mask else 'clear'} {layer}"

        return call

    def local(_: Operator, layer: int | None) -> Any:
        return lambda *_: f"tee {layer}"

    return place(policy, LAYERS, local, remote, withheld=withheld)


def _called(table: Operators, operator: str) -> str:
    """Return what an operator's call says, of layer 1."""
    found = getattr(table, operator)
    return str(run((found if operator in LAYERLESS else found[1])("x")))


def test_what_is_under_pads_stays_where_they_are_withheld_and_nothing_else_does() -> None:
    operators = {"embedding": CLEAR, "lm_head": PAD, "o_proj": PAD, "down_proj": CLEAR}
    leaves, stays = (_placed(operators, withheld=withheld)["decode"] for withheld in (False, True))
    said = {name: _called(leaves, name) for name in operators}
    assert said["o_proj"] == "pad 1"
    assert said["lm_head"] == f"pad {LAYERS - 1}"  # of the service that has the last layer
    assert {name: _called(stays, name) for name in operators} == said | {
        "lm_head": "tee None",
        "o_proj": "tee 1",
    }
    assert [mask.name for mask in leaves.masks] == ["pad"]
    assert not stays.masks
    assert (leaves.head_apart, stays.head_apart) == (True, False)
    # A table draws for the masks of its own phase only.
    phases = _placed({"o_proj": [TEE | {"phase": "prefill"}, PAD | {"phase": "decode"}]})
    assert [bool(phases[phase].masks) for phase in PHASES] == [False, True]


@each_row(
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
    placed = [TEE | {"phase": "prefill"}, PAD | {"phase": "decode"}]
    table = _placed({"o_proj": placed if split else PAD}, withheld=withheld)[phase]
    running = cast(Any, table.down_proj[0]("x"))
    for _ in range(turns):
        assert running.send(None) is None
    with pytest.raises(StopIteration):
        running.send(None)
