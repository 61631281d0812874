"""Tables of placed operators: which pads they draw.

That each layer and phase calls its own placement: tests/contract/test_policies.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tee_side.model.operators import Operators, place
from tee_side.words import PHASES, Phase
from tests.kit.model import CLEAR, policy_of

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
