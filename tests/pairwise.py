"""Chooses cases of a product of parameters, so that every pair of values still occurs."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from heapq import heapify, heappop, heappush
from itertools import combinations


def covering(cases: Sequence[Sequence[Hashable]], strength: int = 2) -> list[int]:
    """Return the positions, ascending, of cases that cover all of them.

    `cases`: a value for each parameter, always in the same order. Every combination of values of
    `strength` parameters that occurs in some case occurs in a chosen one. Greedy: the case with
    most combinations that are missing comes next, the earliest of several.
    """
    combos = [frozenset(combinations(enumerate(case), strength)) for case in cases]
    missing: set[tuple[tuple[int, Hashable], ...]] = set().union(*combos)
    queue = [(-len(found), position) for position, found in enumerate(combos)]
    heapify(queue)
    chosen = []
    while missing:
        _, position = heappop(queue)
        # What a case brings only shrinks: an old number is counted again before it is believed.
        now = (-len(combos[position] & missing), position)
        if queue and now > queue[0]:
            heappush(queue, now)
            continue
        chosen.append(position)
        missing -= combos[position]
    return sorted(chosen)
