"""Tables of placed operators: which pads they draw, and which rows let others have a turn first.

That each layer and phase calls its own placement: tests/contract/test_policies.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import pytest

from tee_side.model.operators import Operators, place
from tee_side.words import PHASES, Phase
from tests.kit.model import CLEAR, policy_of
from tests.kit.rows import each_row

PAD = CLEAR | {"mask": "pad"}
TEE = {"place": "tee"}


def _placed(operators: dict[str, Any], *, withheld: bool = False) -> Mapping[Phase, Operators]:
    call: Any = lambda *_: lambda x: x  # noqa: E731
    return place(policy_of(operators, arithmetic="int8"), 4, call, call, withheld=withheld)


def test_pads_are_drawn_in_their_own_phase_and_not_where_they_are_withheld() -> None:
    leaves, stays = (
        _placed({"lm_head": PAD, "o_proj": PAD}, withheld=withheld)["decode"]
        for withheld in (False, True)
    )
    assert [[mask.name for mask in table.masks] for table in (leaves, stays)] == [["pad"], []]
    assert (leaves.head_apart, stays.head_apart) == (True, False)
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
