"""Drafts equal a search through the whole text, after every token."""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import given

from tee_side.engine.drafts import Drafts

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
