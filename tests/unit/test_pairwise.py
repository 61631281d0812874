"""Fewer cases in which every pair still occurs."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from itertools import combinations, product

import pytest

from tests.pairwise import covering


def _found(cases: Sequence[Sequence[Hashable]], strength: int) -> set[tuple[object, ...]]:
    return {combo for case in cases for combo in combinations(enumerate(case), strength)}


@pytest.mark.parametrize("strength", [1, 2, 3])
@pytest.mark.parametrize("sizes", [(3,), (2, 5), (3, 3, 3), (7, 3, 5, 2)])
def test_every_combination_occurs_in_a_chosen_case(sizes: Sequence[int], strength: int) -> None:
    cases = list(product(*map(range, sizes)))
    chosen = [cases[position] for position in covering(cases, strength)]
    assert _found(chosen, strength) == _found(cases, strength)


def test_few_cases_are_chosen_and_always_the_same() -> None:
    cases = list(product(range(7), range(3), range(5), range(3)))
    chosen = covering(cases)
    assert len(cases) == 315
    assert 7 * 5 <= len(chosen) <= 45
    assert chosen == covering(cases) == sorted(set(chosen))


def test_a_pair_that_no_case_has_is_not_asked_for() -> None:
    cases = [case for case in product("abc", range(4), "xy") if case[:2] != ("b", 2)]
    chosen = [cases[position] for position in covering(cases)]
    assert _found(chosen, 2) == _found(cases, 2)
    assert covering([]) == []


def test_with_fewer_parameters_than_that_nothing_is_asked_for() -> None:
    assert covering([("a",), ("b",)]) == []
