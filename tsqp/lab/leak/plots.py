"""Plots of a leakage report: what each policy costs and leaks; what noise costs and hides.

No rate of an attack that does not work where it must is drawn.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from tsqp.lab.charts import Picture, drawing, picture
from tsqp.lab.leak.model import Curve, LeakReport, PolicyLeak, Rate
from tsqp.lab.leak.words import judged

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Colour, marker and words.
_KINDS = {
    "reads": ("#d55e00", "o", "reads more than chance"),
    "chance": ("#0072b2", "s", "not above chance"),
    "nothing": ("#666666", "D", "nothing crosses"),
}
_READS, _CHANCE = _KINDS["reads"][0], _KINDS["chance"][0]
_HARM = "#009e73"
# Beyond so many times the perplexity without noise no text is left to speak of.
_MOST = 1e4
_COST_CAPTION = (
    "Left: the time of a decoded token without Embedding and LM head, as tsqp bench measures it."
    " Right: the tokens that the best attack reads, with the 95% interval; dashed: the highest"
    " chance. The policies stand in the order of their cost. Left out: adversaries with the"
    " requests to more than one service, and policies whose cost was not measured, to which no"
    " attack applies, or of which an attack did not work."
)
_CURVE_CAPTION = (
    "Tokens that the best attack reads, with the 95% interval (dotted: chance), beside the harm to"
    " the output (dotted: perplexity without noise). Left out: strengths at which no attack worked,"
    " and a perplexity beyond 10,000 times that without noise."
)


def cost_against_leakage(
    report: LeakReport, cost_of: str = "", read_of: str = ""
) -> Picture | None:
    """Draw each policy's overhead beside its best rate; None where no policy has both.

    `cost_of`, `read_of`: what to write at the axes where cost and rate are of different models.
    """
    from matplotlib.lines import Line2D
    from matplotlib.ticker import FuncFormatter

    alone = [one for one in report.policies if one.adversary == "service" and one.cost]
    shown = [one for one in alone if one.nothing is not None or judged(one) is not None]
    if not shown:
        return None
    shown.sort(key=lambda one: one.cost.overhead_ms if one.cost else 0.0)
    names, places = [one.policy for one in shown], range(len(shown))
    costs = [one.cost.overhead_ms if one.cost else 0.0 for one in shown]
    kinds = [_KINDS[_kind(one)] for one in shown]
    scores = [score for one in shown if (score := judged(one)) is not None]
    with drawing(1.5 + 0.27 * len(shown)) as figure:
        left, right = figure.subplots(1, 2, sharey=True, width_ratios=(2, 3))
        left.barh(places, costs, height=0.6, color="#b9c2ca")
        left.set_xlabel(f"overhead of a decoded token, ms{_of(cost_of)}")
        if min(costs) > 0 and max(costs) / min(costs) > 8:
            left.set_xscale("log")
        left.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
        for place, one, (colour, marker, _) in zip(places, shown, kinds, strict=True):
            score = judged(one)
            rates = [score.top1 if score and not one.nothing else Rate(hits=0, n=0)]
            _rates(right, [place], rates, colour, marker, across=True)
        if scores:
            chance = max(score.chance for score in scores)
            right.axvline(chance * 100, color="#999999", linewidth=0.8, linestyle="--")
        right.set_xlabel(f"tokens read by the best attack{_of(read_of)}")
        _percents(right, "x")
        left.set_yticks(places, names)
        left.set_ylim(len(shown) - 0.4, -0.6)
        for axis in (left, right):
            axis.tick_params(axis="y", length=0)
            axis.grid(axis="both" if axis is right else "x")
        handles = [
            Line2D([], [], linestyle="none", marker=marker, color=colour, label=words)
            for colour, marker, words in dict.fromkeys(kinds)
        ]
        figure.legend(handles=handles, loc="outside upper right", ncols=len(handles))
        return picture(figure, "Cost against leakage", _COST_CAPTION)


def _kind(policy: PolicyLeak) -> str:
    if policy.nothing is not None:
        return "nothing"
    return "reads" if policy.above_chance else "chance"


def _of(what: str) -> str:
    return f" ({what})" if what else ""


def _rates(
    axis: Axes,
    places: Sequence[float],
    rates: Sequence[Rate],
    colour: str,
    marker: str,
    *,
    across: bool = False,
) -> None:
    """Draw rates in percent with their intervals; of none, 0 without one. `across`: along x."""
    values = [100 * (rate.value or 0.0) for rate in rates]
    lows = [100 * rate.low if rate.n else 0.0 for rate in rates]
    highs = [100 * rate.high if rate.n else 0.0 for rate in rates]
    reach = [
        [max(0.0, value - low) for value, low in zip(values, lows, strict=True)],
        [max(0.0, high - value) for value, high in zip(values, highs, strict=True)],
    ]
    axis.errorbar(
        values if across else places,
        places if across else values,
        xerr=reach if across else None,
        yerr=None if across else reach,
        marker=marker,
        color=colour,
        linewidth=1.4,
        capsize=3,
        zorder=3,
        clip_on=False,
    )


def _percents(axis: Axes, which: Literal["x", "y"]) -> None:
    """Lay out an axis of 0 to 100 %, with room for marks at its ends."""
    from matplotlib.ticker import PercentFormatter

    axis.set(**{f"{which}lim": (-4, 104), f"{which}ticks": range(0, 101, 20)})
    (axis.xaxis if which == "x" else axis.yaxis).set_major_formatter(PercentFormatter(decimals=0))


def curve(made: Curve) -> Picture | None:
    """Draw recovery against strength, and what the noise does to the output.

    None where no attack that works was tried at any strength.
    """
    from matplotlib.ticker import FuncFormatter, NullLocator

    points = [point for point in made.points if 0 < point.strength < math.inf]
    read = [point for point in points if point.rate.n]
    if not read:
        return None
    # Noise that is taken out of results again leaves the text as it is, and an error of rounding.
    harm = "output error" if made.parameter == "sigma" else "perplexity"
    with drawing(3.6, 5.6) as figure:
        left = figure.subplots()
        left.set_xscale("log")
        less = " (smaller: more noise)" if made.parameter == "epsilon" else " of the noise"
        left.set_xlabel(f"{made.parameter}{less}")
        places = [point.strength for point in read]
        _rates(left, places, [point.rate for point in read], _READS, "o")
        chances = [point.chance * 100 for point in read]
        left.plot(places, chances, color=_CHANCE, linestyle=":", linewidth=1.2)
        _percents(left, "y")
        left.grid(axis="y")
        left.set_ylabel("tokens read", color=_READS)
        strengths = [point.strength for point in points]
        left.set_xticks(strengths, [f"{strength:,.4g}" for strength in strengths])
        left.xaxis.set_minor_locator(NullLocator())
        right = left.twinx()
        right.spines["right"].set_visible(True)
        right.set_ylabel(harm, color=_HARM)
        lost = harm == "perplexity"
        harms = [point.perplexity if lost else point.output_error for point in points]
        limit = made.plain_perplexity * _MOST if lost else math.inf
        drawn = [value if value <= limit else math.nan for value in harms]
        right.plot(strengths, drawn, marker="^", color=_HARM, linestyle="--", linewidth=1.2)
        if lost:
            right.axhline(made.plain_perplexity, color=_HARM, linewidth=0.8, linestyle=":")
            right.set_yscale("log")
        right.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:,.4g}"))
        return picture(figure, f"{made.policy}: recovery against noise", _CURVE_CAPTION)


def plots(report: LeakReport) -> list[Picture]:
    """Return all plots of a report, in the order in which a person reads them."""
    found = [cost_against_leakage(report), *map(curve, report.curves)]
    return [plot for plot in found if plot is not None]
