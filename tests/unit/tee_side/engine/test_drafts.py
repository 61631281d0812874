"""Drafts equal a search through the whole text, after every token."""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import given

from tee_side.engine.drafts import Drafts
from tests.kit.rows import each_row

# Few different tokens, so that runs repeat.
IDS = st.lists(st.integers(0, 3), max_size=60)


def _searched(ids: list[int], count: int, longest: int) -> list[int]:
    for length in range(longest, 1, -1):
        suffix = ids[len(ids) - length :]
        for start in range(len(ids) - length - 1, -1, -1):
            if ids[start : start + length] == suffix:
                text = list(ids)
                for i in range(count):
                    text.append(text[start + length + i])
                return text[len(ids) :]
    return []


@given(
    prompt=IDS,
    answer=IDS,
    tokens=st.integers(1, 6),
    longest=st.integers(2, 4),
    most=st.integers(0, 8),
)
def test_drafts_are_what_a_search_finds(
    prompt: list[int], answer: list[int], tokens: int, longest: int, most: int
) -> None:
    drafts, ids = Drafts(prompt, tokens=tokens, longest=longest), list(prompt)
    for token_id in answer:
        assert drafts.propose(most) == _searched(ids, min(most, tokens), longest)
        drafts.append(token_id)
        ids.append(token_id)
    assert drafts.propose(most) == _searched(ids, min(most, tokens), longest)


@each_row(
    ("ids", "expected"),
    [
        # One token that was there before is not enough.
        ([7, 8, 7], []),
        # The latest one counts.
        ([1, 2, 5, 1, 2, 6, 4, 1, 2], [6, 4, 1, 2]),
        # Three tokens before two, though the two were seen later.
        ([9, 1, 2, 5, 0, 1, 2, 6, 9, 1, 2], [5, 0, 1, 2]),
        # A period goes on.
        ([1, 2, 3, 1, 2, 3], [1, 2, 3, 1]),
    ],
)
def test_examples(ids: list[int], expected: list[int]) -> None:
    assert Drafts(ids).propose(4) == expected
