"""Readings, written by hand, are counted as they should be."""

from __future__ import annotations

import pytest

from tests.unit.tsqp.leak.leaks import truth_of
from tsqp.lab.leak.attack import AttackError, Reading
from tsqp.lab.leak.model import Rate, Score
from tsqp.lab.leak.record_session import Truth
from tsqp.lab.leak.score import score, stream

WHERE = "layer 0 qkv_proj"
# A prompt of three tokens, and an answer of three, the last of which went through no model.
TRUTH = truth_of([10, 11, 12, 20, 21], 3, last=22)
OTHER = truth_of([10, 31, 12, 40, 41], 3, last=42)


def reading(
    guesses: dict[int, tuple[int, ...]],
    tokens: range = range(6),
    session: int = 0,
    where: str = WHERE,
) -> Reading:
    return Reading(where, session, tokens, guesses)


def one(*readings: Reading, truths: tuple[Truth, ...] = (TRUTH,)) -> Score:
    (found,) = score(readings, truths)
    return found


def rates(found: Score) -> dict[str, tuple[int, int]]:
    names = ("top1", "top5", "prompt", "answer", "whole")
    return {name: (getattr(found, name).hits, getattr(found, name).n) for name in names}


def right(tokens: range, truth: Truth = TRUTH) -> dict[int, tuple[int, ...]]:
    return {index: (stream(truth)[index][0],) for index in tokens}


def test_a_stream_is_what_was_sent_and_the_last_token() -> None:
    assert stream(TRUTH) == [
        (10, False),
        (11, False),
        (12, False),
        (20, True),
        (21, True),
        (22, True),
    ]
    assert stream(Truth((1, 2), (), (1, 2), (False, False))) == [(1, False), (2, False)]
    # Where the prompt stays.
    assert stream(Truth((1, 2), (5, 6), (5,), (True,), 6)) == [(5, True), (6, True)]


def test_everything_right() -> None:
    assert rates(one(reading(right(range(6))))) == {
        "top1": (6, 6),
        "top5": (6, 6),
        "prompt": (3, 3),
        "answer": (3, 3),
        "whole": (1, 1),
    }


def test_only_what_was_tried_counts() -> None:
    assert rates(one(reading(right(range(2, 4)), range(2, 4)))) == {
        "top1": (2, 2),
        "top5": (2, 2),
        "prompt": (1, 1),
        "answer": (1, 1),
        "whole": (0, 0),
    }
    # Even where there is a guess.
    assert one(reading(right(range(6)), range(1))).top1 == Rate(hits=1, n=1)


def test_what_has_no_guess_is_not_read() -> None:
    assert rates(one(reading({0: (10,), 3: (20,), 4: ()}))) == {
        "top1": (2, 6),
        "top5": (2, 6),
        "prompt": (1, 3),
        "answer": (1, 3),
        "whole": (0, 1),
    }


def test_the_first_guess_counts_and_the_first_five() -> None:
    guesses: dict[int, tuple[int, ...]] = {
        0: (10, 1, 2, 3, 4),
        1: (1, 11),
        2: (1, 2, 3, 4, 12),
        3: (1, 2, 3, 4, 5, 20),
        4: (1, 2),
    }
    found = one(reading(guesses, range(5)))
    assert (found.top1.hits, found.top5.hits, found.top1.n, found.top5.n) == (1, 3, 5, 5)


@pytest.mark.parametrize(("wrong", "whole"), [(2, 1), (3, 2), (5, 2)])
def test_one_wrong_token_is_no_whole_prompt(wrong: int, whole: int) -> None:
    """Of the answer none is asked for."""
    found = one(
        reading({**right(range(6)), wrong: (99,)}),
        reading(right(range(6), OTHER), session=1),
        truths=(TRUTH, OTHER),
    )
    assert found.whole == Rate(hits=whole, n=2)
    assert found.top1 == Rate(hits=11, n=12)


def test_a_prompt_that_was_not_tried_to_its_end_is_not_counted() -> None:
    assert one(reading(right(range(2)), range(2))).whole == Rate(hits=0, n=0)
    assert one(reading(right(range(3)), range(3))).whole == Rate(hits=1, n=1)
    # It was tried, and given up.
    assert one(reading(right(range(2)), range(3))).whole == Rate(hits=0, n=1)


def test_guesses_and_different_tokens_are_counted() -> None:
    """What repeats is one of a kind; what was given up is no guess."""
    truth = Truth((7, 7, 8), (9, 9), (7, 7, 8, 9), (False, False, False, True), 9)
    guesses: dict[int, tuple[int, ...]] = {0: (7,), 1: (7,), 2: (1,), 3: (9,)}
    found = one(reading(guesses, range(5)), truths=(truth,))
    assert (found.top1.hits, found.kinds) == (3, 2)
    assert (found.guessed, found.top1.n, found.gave_up) == (4, 5, False)
    assert one(reading({0: (7,), 1: ()}, range(3)), truths=(truth,)).gave_up


@pytest.mark.parametrize(
    ("tokens", "counted"), [(range(4, 9), 2), (range(9), 6), (range(6, 9), 0), (range(0), 0)]
)
def test_what_is_behind_the_last_token_is_left_out(tokens: range, counted: int) -> None:
    """Such as rows that a mask added: they are no tokens."""
    found = one(reading(right(range(6)), tokens))
    assert found.top1 == Rate(hits=counted, n=counted)
    # The prompt of a session that was not tried from its beginning is none.
    whole = int(counted == 6)
    assert found.whole == Rate(hits=whole, n=whole)
    assert found.chance == 0


def test_places_stay_apart_in_the_order_of_their_appearance() -> None:
    found = score(
        [
            reading(right(range(6)), where="b"),
            reading({}, where="a"),
            reading(right(range(6), OTHER), session=1, where="b"),
        ],
        (TRUTH, OTHER),
    )
    assert [(s.where, s.top1.hits, s.top1.n) for s in found] == [("b", 12, 12), ("a", 0, 6)]
    assert score([], (TRUTH,)) == ()


# --------------------------------------------------------------------------------------- chance


def test_chance_is_what_the_guesses_hit_in_other_sessions() -> None:
    """Both prompts have 10 and 12 in the same places: two guesses of six hit the other text."""
    found = one(reading(right(range(6))), truths=(TRUTH, OTHER))
    assert found.chance == pytest.approx(2 / 6)
    assert found.top1.hits == 6


def test_chance_is_averaged_over_the_other_sessions() -> None:
    third = truth_of([10, 50, 51, 52, 53], 3, last=54)
    found = one(reading({0: (10,), 2: (12,)}, range(3)), truths=(TRUTH, OTHER, third))
    # 10 is there in both, 12 in one of two; the token without a guess hits nothing.
    assert found.chance == pytest.approx((1 + 0.5 + 0) / 3)


def test_chance_does_not_depend_on_what_is_right() -> None:
    """Guesses that name another session's token are wrong, and would be right there."""
    found = one(reading({1: (31,), 3: (40,)}, range(6)), truths=(TRUTH, OTHER))
    assert found.top1.hits == 0
    assert found.chance == pytest.approx(2 / 6)


def test_chance_leaves_out_the_session_itself() -> None:
    twin = TRUTH
    assert one(reading(right(range(6)))).chance == 0
    assert one(reading(right(range(6))), truths=(TRUTH, twin)).chance == 1


def test_a_shorter_session_has_no_say_behind_its_end() -> None:
    short = truth_of([10], 1, last=11)
    long = truth_of([10, 11, 12, 20, 0], 3, last=0)
    found = one(reading(right(range(6))), truths=(TRUTH, short, long))
    # 10 and 11 in both, 12 and 20 in the long one, which is the only one there.
    assert found.chance == pytest.approx((1 + 1 + 1 + 1 + 0 + 0) / 6)


def test_the_interval_less_chance() -> None:
    found = one(reading({}), truths=(TRUTH, OTHER))
    assert found.chance == 0
    assert found.excess_high == found.top1.high == Rate(hits=0, n=6).high
    guessed = one(reading(right(range(6))), truths=(TRUTH, OTHER))
    assert guessed.excess_high == pytest.approx(1 - 2 / 6)


@pytest.mark.parametrize(
    "readings",
    [
        [Reading("here", 0, range(2), {}), Reading("here", 0, range(2), {})],
        [Reading("here", 1, range(2), {})],
        [Reading("here", -1, range(2), {})],
        [Reading("here", 0, range(-1, 2), {})],
    ],
    ids=["twice", "session", "negative", "token"],
)
def test_readings_that_would_be_counted_wrongly_are_refused(readings: list[Reading]) -> None:
    with pytest.raises(AttackError, match="reading of session"):
        score(readings, [Truth((1, 2), (), (1, 2), (False, False))])
