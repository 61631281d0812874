"""Plots are well-formed SVG that is the same each time; what means nothing is not drawn."""

from __future__ import annotations

import re
from itertools import combinations, product
from xml.etree import ElementTree as ET

import pytest

from tsqp.lab.bench.plot_style import Plot
from tsqp.lab.leak.plots import _arranged, cost_against_leakage, curve, plots

from .reports import curve as noise
from .reports import (
    epsilon_curve,
    point,
    policy,
    refused,
    report,
    run,
    sample,
    score,
    shielded,
    unjudged,
)


def checked(plot: Plot | None) -> Plot:
    assert plot is not None
    assert ET.fromstring(plot.svg).tag == "{http://www.w3.org/2000/svg}svg"
    assert plot.caption == plot.caption.strip() != ""
    return plot


def says(plot: Plot, text: str) -> bool:
    """Whether the text is drawn: matplotlib leaves it in a comment beside its outlines."""
    return f"<!-- {text} -->" in plot.svg


def test_every_policy_with_a_cost_and_a_rate_is_named() -> None:
    plot = checked(cost_against_leakage(sample()))
    for one in sample().policies:
        drawn = one.policy not in ("row-mix", "pad-low-dimensional")
        assert says(plot, one.policy) == drawn, one.policy
    for words in ("reads more than chance", "not above chance", "nothing crosses"):
        assert says(plot, words)
    assert says(plot, "chance, at most 0.4%")
    assert "n = 4,096 tokens" in plot.caption
    assert "cost was not measured: pad-low-dimensional." in plot.caption


def test_an_attack_that_did_not_work_gives_no_point() -> None:
    plot = checked(cost_against_leakage(report(shielded(), unjudged())))
    assert not says(plot, "row-mix")
    assert "Left out: row-mix, where an attack did not work (row-space)." in plot.caption
    alone = report(policy("p", refused("a")), shielded())
    assert "Left out: p, where no attack applies." in checked(cost_against_leakage(alone)).caption


def test_the_n_of_a_caption_is_of_what_is_drawn() -> None:
    few = policy("few", run("a", score(20, n=40)), cost_ms=None)
    plot = checked(cost_against_leakage(report(shielded(), few)))
    assert "n = 4,096 tokens" in plot.caption


def test_without_costs_there_is_no_plot() -> None:
    assert cost_against_leakage(report(policy("p", run("a", score(9)), cost_ms=None))) is None
    assert cost_against_leakage(report()) is None
    assert plots(report()) == []


@pytest.mark.parametrize("costs", [(2.0, 3.0), (0.0, 3.0), (0.0,), (2.0, 2.0, 2.0, 2.0)])
def test_any_costs_can_be_drawn(costs: tuple[float, ...]) -> None:
    made = [policy(f"p{i}", run("a", score(4000)), cost_ms=cost) for i, cost in enumerate(costs)]
    plot = checked(cost_against_leakage(report(*made)))
    assert all(says(plot, one.policy) for one in made)


def test_costs_that_span_are_on_a_logarithmic_axis() -> None:
    def ticks(*costs: float) -> bool:
        made = [policy(f"p{i}", run("a", score(9)), cost_ms=c) for i, c in enumerate(costs)]
        return says(checked(cost_against_leakage(report(*made))), "5")

    assert ticks(2.0, 60.0)
    assert not ticks(2.0, 3.0)


@pytest.mark.parametrize("left", [300.0, 8.0, 740.0])
def test_names_cover_nothing_and_stay_within(left: float) -> None:
    at = [(left + 8 * i, 430.0 - i % 2) for i in range(6)]
    marks = [(x - 6, y - 6, x + 6, y + 6) for x, y in at]
    sizes = [(100.0, 14.0)] * len(at)
    placed = _arranged(at, sizes, 1.0, marks, (0.0, 0.0, 800.0, 450.0))
    names = []
    for (x, y), (dx, dy), (width, height) in zip(at, placed, sizes, strict=True):
        start = x + dx if dx > 0 else x + dx - width
        names.append((start, y + dy - height / 2, start + width, y + dy + height / 2))
    for one, other in [*combinations(names, 2), *product(names, marks)]:
        apart = one[2] <= other[0] or other[2] <= one[0] or one[3] <= other[1] or other[3] <= one[1]
        assert apart
    for box in names:
        assert min(box) >= 0
        assert box[2] <= 800
        assert box[3] <= 450


def test_a_curve_has_both_axes_and_says_what_follows() -> None:
    plot = checked(curve(noise()))
    for words in ("tokens read", "perplexity", "sigma of the noise", "none", "16"):
        assert says(plot, words), words
    assert plot.caption.startswith(
        "Recovery is not above chance at sigma 16 (0.4% of 4,096 tokens), where perplexity is 890."
    )
    error = checked(curve(noise(), "output error"))
    assert says(error, "output error")
    assert not says(error, "perplexity")
    assert "dotted" not in error.caption


def test_the_weakest_noise_that_hides_is_the_one_that_is_named() -> None:
    hidden = noise().model_copy(
        update={"points": (*noise().points[:-2], point(8, 8, 15, 160.0), point(16, 16, 14, 890.0))}
    )
    assert "not above chance at sigma 8 " in checked(curve(hidden)).caption
    never = noise().model_copy(update={"points": noise().points[:-1]})
    words = "At no strength that was tried is recovery down to chance: 10.0% of 4,096 tokens at"
    assert checked(curve(never)).caption.startswith(f"{words} sigma 8.")


def test_where_no_attack_worked_nothing_is_drawn() -> None:
    plot = checked(curve(epsilon_curve()))
    assert "No attack worked at epsilon 1.7: nothing is drawn there." in plot.caption
    assert "Perplexity at epsilon 1.7 is beyond the axis." in plot.caption
    assert "not above chance at epsilon 27.5" in plot.caption
    made = epsilon_curve()
    assert curve(made.model_copy(update={"points": made.points[:1]})) is None
    assert curve(made.model_copy(update={"points": ()})) is None


def test_equal_reports_give_equal_plots() -> None:
    for one, other in zip(plots(sample()), plots(sample()), strict=True):
        assert one == other
        assert not re.search(r"\d{4}-\d\d-\d\dT", one.svg)
