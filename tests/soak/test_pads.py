"""The verdict on pads is about draws between which everything happened that is to happen."""

from __future__ import annotations

import pytest

from tests.soak.pads import KILLS, OUT, not_met

HAPPENED = {"failed steps": 1, "repeated operators": 1, OUT: 1}
CRASHES = {"abandoned": 3, **dict.fromkeys(KILLS, 1)}


def test_where_everything_happened_nothing_is_missing() -> None:
    assert not_met(CRASHES, HAPPENED, full=True) == not_met(CRASHES, HAPPENED, full=False) == []


@pytest.mark.parametrize("kind", KILLS)
def test_full_form_needs_every_kind_of_kill(kind: str) -> None:
    crashes = {end: times for end, times in CRASHES.items() if end != kind}
    assert not_met(crashes, HAPPENED, full=True) == [kind]
    assert not_met(crashes, HAPPENED, full=False) == []


@pytest.mark.parametrize("what", HAPPENED)
def test_full_form_needs_every_way_to_go_wrong(what: str) -> None:
    assert not_met(CRASHES, {**HAPPENED, what: 0}, full=True) == [what]


def test_lives_that_only_leave_are_no_crashes() -> None:
    assert not_met({"abandoned": 3}, {**HAPPENED, OUT: 0}, full=False) == ["a kill"]
