"""The document: what follows from it, and that it can be read again."""

from __future__ import annotations

import itertools
import json
import math

import pytest
from pydantic import ValidationError

from tests.unit.tsqp.leak.reports import N, policy, run, sample, score
from tsqp.lab.leak.interval import wilson
from tsqp.lab.leak.model import Point, Rate, Report, Score


def test_a_report_can_be_read_again() -> None:
    report = sample()
    assert Report.model_validate_json(report.model_dump_json()) == report


def test_a_rate_is_written_with_its_share_and_interval() -> None:
    written = json.loads(Rate(hits=3, n=40).model_dump_json())
    assert written == {
        "hits": 3,
        "n": 40,
        "value": 0.075,
        "low": wilson(3, 40)[0],
        "high": wilson(3, 40)[1],
    }


def test_what_is_unknown_is_refused() -> None:
    with pytest.raises(ValidationError):
        Rate.model_validate({"hits": 1, "n": 2, "share": 0.5})


def test_an_infinite_epsilon_is_written_and_read() -> None:
    point = Point(
        strength=math.inf,
        sigma=0.0,
        rate=Rate(hits=1, n=2),
        attack="a",
        where="here",
        chance=0.0,
        perplexity=2.0,
        output_error=0.0,
    )
    assert Point.model_validate_json(point.model_dump_json()) == point


def test_of_a_hundred_places_one_is_lucky() -> None:
    """Five of forty is beyond doubt at one place, and not at one of a hundred."""
    lucky = score(5, n=40, chance=0.01)
    others = [score(0, n=40, where=f"place {number}", chance=0.01) for number in range(99)]
    assert policy("p", run("a", lucky)).above_chance
    assert not policy("p", run("a", lucky, *others)).above_chance
    read = score(30, n=40, chance=0.005)
    assert policy("p", run("a", read, *others)).above_chance


def test_what_is_read_of_one_part_is_not_hidden_by_who_tried_both() -> None:
    """An attack that reads every answer beside one that tried prompts, too, in vain."""
    part = score(40, n=40, where="lm_head", chance=0.0)
    part = part.model_copy(update={"prompt": Rate(hits=0, n=0), "answer": Rate(hits=40, n=40)})
    made = policy("p", run("logits", part), run("nearest", score(0)))
    assert made.best is not None
    assert made.best[0].attack == "logits"
    assert made.above_chance


def test_of_those_that_read_everything_the_simplest_is_best() -> None:
    """A lower chance, as of one that leaves out what is easy, makes no attack a better one."""
    dear = run("dear", score(N)).model_copy(update={"compared": 10**9})
    searched = run("searched", score(N)).model_copy(update={"modelled": 10**6, "compared": 0})
    fewer = run("fewer", score(N - 100, n=N - 100, chance=0.0)).model_copy(update={"modelled": 0})
    almost = run("almost", score(N - 1, chance=0.0)).model_copy(update={"compared": 0})
    for order in itertools.permutations((dear, run("plain", score(N)), searched, fewer, almost)):
        made = policy("p", *order)
        assert made.best is not None
        assert made.best[0].attack == "plain"
    # All of fewer tokens leaves more open than nearly all of many.
    for n in (3, 192):
        made = policy("p", run("few", score(n, n=n, chance=0.0)), almost)
        assert made.best is not None
        assert made.best[0].attack == "almost"


def test_what_may_be_luck_is_compared_with_chance() -> None:
    """Of two rates near it the one that is farther above is the stronger."""
    often = score(40, n=1000, chance=0.03)
    seldom = score(30, n=1000, chance=0.001)
    assert often.top1.low > seldom.top1.low
    assert seldom.strength > often.strength
    assert score(100, n=1000, chance=0.03).strength > seldom.strength


def test_a_control_counts_place_by_place() -> None:
    """A look-up that works vouches for no search that does not."""
    shallow, deep = score(0), score(0, where="layer 3 o_proj")
    tried = run("a", shallow, deep)
    assert tried.control is not None
    places = {shallow.where: Rate(hits=99, n=100), deep.where: Rate(hits=3, n=100)}
    control = tried.control.model_copy(update={"places": places})
    tried = tried.model_copy(update={"control": control})
    assert tried.meaningful == (shallow,)
    made = policy("p", tried)
    assert made.excess_high == shallow.excess_high
    # What is beyond doubt counts all the same.
    sure = score(2000, where=deep.where)
    assert tried.model_copy(update={"scores": (shallow, sure)}).meaningful == (shallow, sure)


def given_up(hits: int = 1, where: str = "layer 1 o_proj") -> Score:
    return score(hits, n=192, where=where).model_copy(update={"guessed": 6})


def test_what_an_attack_gave_up_on_is_no_low_rate() -> None:
    """Nothing was read of 192 tokens, for six of which there was a guess."""
    looked_up = score(0, n=2000)
    searched = run("a", looked_up, given_up())
    assert searched.meaningful == (looked_up,)
    assert not searched.gave_up
    found = policy("p", searched)
    assert found.excess_high == looked_up.excess_high
    alone = run("a", given_up(), given_up(where="layer 2 o_proj"))
    assert alone.gave_up
    assert not alone.worked
    assert policy("p", alone).excess_high == 1.0
    # Beside one that did not, it takes nothing away.
    assert policy("p", alone, run("b", looked_up)).excess_high == looked_up.excess_high
    # Where it fails on its control, it does.
    assert policy("p", run("a", given_up(), worked=False)).excess_high == 1.0


def test_what_was_read_before_it_gave_up_counts() -> None:
    half = score(90, n=192).model_copy(update={"guessed": 93})
    assert half.gave_up
    assert run("a", half).meaningful == (half,)
    assert policy("p", run("a", half)).above_chance


def test_one_token_that_is_guessed_alike_everywhere_is_one_stroke_of_luck() -> None:
    """Under a mask that stays the same: ten of 860, nine of them the same word."""
    hits = score(10, n=860, chance=0.0)
    assert policy("p", run("a", hits)).above_chance
    lucky = hits.model_copy(update={"kinds": 2})
    assert not policy("p", run("a", lucky)).model_copy(update={"blind": 1 / 1024}).above_chance
    # So much of the text is no luck.
    much = score(172, n=860, chance=0.0).model_copy(update={"kinds": 1})
    assert policy("p", run("a", much)).above_chance
