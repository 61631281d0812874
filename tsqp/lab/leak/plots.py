"""Plots of a leakage report as SVG: what a policy costs and leaks, and what noise costs and hides.

No rate of an attack that does not work where it must is drawn.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from tsqp.lab.charts import Picture, drawing, picture
from tsqp.lab.leak.model import Curve, Point, PolicyLeak, Rate, Report
from tsqp.lab.leak.words import failed, judged, percent, rate_words
from tsqp.lab.report import figures

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Harm = Literal["perplexity", "output error"]

_READS, _CHANCE, _NOTHING, _HARM = "#d55e00", "#0072b2", "#666666", "#009e73"
_WIDTH = 7.2
# Beyond so many times the perplexity without noise no text is left to speak of.
_MOST = 1e4
# What it costs a name to cover another or leave the plot, a line to cross a name, and a line to
# cross a mark or a line; in points of distance.
_WORST, _BAD, _POOR = 1e6, 1e3, 40.0
_LETTERS = 8.5

_Point = tuple[float, float]
_Line = tuple[_Point, _Point]
# Left, lower, right and upper edge, in pixels.
_Box = tuple[float, float, float, float]
# From a mark to the near edge of its name, in points: the nearest first, with what it costs.
_OFFSETS: list[tuple[float, _Point]] = sorted(
    (abs(dy) + 1.5 * (abs(dx) - 9) + (dx < 0), (float(dx), float(dy)))
    for dx in (9, -9, 24, -24, 44, -44, 70)
    for dy in range(-198, 199, 6)
)


@dataclass(frozen=True)
class _Mark:
    """A policy in the plot. `kind`: its colour, marker and words."""

    policy: str
    overhead_ms: float
    rate: float
    low: float
    high: float
    kind: Literal["reads", "chance", "nothing"]


_KINDS: dict[str, tuple[str, str, str]] = {
    "reads": (_READS, "o", "reads more than chance"),
    "chance": (_CHANCE, "s", "not above chance"),
    "nothing": (_NOTHING, "D", "nothing crosses"),
}

# ----------------------------------------------------------------------- cost against leakage


def cost_against_leakage(report: Report, cost_of: str = "", read_of: str = "") -> Picture | None:
    """Draw the best rate of each policy against its overhead; None where no policy has both.

    Read by a service; adversaries with more than one service's requests are left out. `cost_of`,
    `read_of`: what to write at the axes where cost and rate are of different models.
    """
    alone = tuple(found for found in report.policies if found.adversary == "service")
    report = report.model_copy(update={"policies": alone})
    marks = [mark for policy in report.policies if (mark := _mark(policy)) is not None]
    if not marks:
        return None
    chance = _chance(report, marks)
    with drawing(4.6, _WIDTH) as figure:
        axis = figure.subplots()
        _overheads(axis, marks, cost_of)
        _percents(axis)
        axis.set_ylim(-8, 116)  # names stand above and below
        axis.set_ylabel(f"tokens read by the best attack{_of(read_of)}")
        if chance is not None:
            axis.axhline(chance * 100, color="#999999", linewidth=0.8, linestyle=(0, (4, 3)))
        for mark in marks:
            _draw(axis, mark)
        _kinds_legend(figure, marks, chance)
        _label(figure, axis, marks)
        caption = _cost_caption(report, marks)
        return picture(figure, "Cost against leakage", caption)


def _mark(policy: PolicyLeak) -> _Mark | None:
    if policy.cost is None:
        return None
    if policy.nothing is not None:
        return _Mark(policy.policy, policy.cost.overhead_ms, 0.0, 0.0, 0.0, "nothing")
    score = judged(policy)
    if score is None or score.top1.value is None:
        return None
    rate = score.top1
    kind: Literal["reads", "chance"] = "reads" if policy.above_chance else "chance"
    return _Mark(
        policy.policy, policy.cost.overhead_ms, score.top1.value, rate.low, rate.high, kind
    )


def _chance(report: Report, marks: Sequence[_Mark]) -> float | None:
    """Return the highest chance of what is drawn."""
    names = {mark.policy for mark in marks}
    scores = [judged(policy) for policy in report.policies if policy.policy in names]
    return max((score.chance for score in scores if score is not None), default=None)


def _of(what: str) -> str:
    return f" ({what})" if what else ""


def _overheads(axis: Axes, marks: Sequence[_Mark], cost_of: str) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    least, most = (f(mark.overhead_ms for mark in marks) for f in (min, max))
    axis.set_xlabel(f"overhead of a decoded token, ms{_of(cost_of)}")
    if least > 0 and most / least > 8:
        axis.set_xscale("log")
        axis.set_xlim(least / 2.4, most * 2)
        axis.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axis.xaxis.set_minor_formatter(NullFormatter())
    else:
        axis.set_xlim(0, most * 1.15 or 1.0)
    axis.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))


def _percents(axis: Axes) -> None:
    """Lay out a left axis of 0 to 100 %, with room for marks at its ends."""
    from matplotlib.ticker import PercentFormatter

    axis.set_ylim(-4, 104)
    axis.set_yticks(range(0, 101, 20))
    axis.spines["left"].set_bounds(0, 100)
    axis.yaxis.set_major_formatter(PercentFormatter(decimals=0))
    axis.grid(axis="y")


def _draw(axis: Axes, mark: _Mark) -> None:
    colour, marker, _ = _KINDS[mark.kind]
    axis.errorbar(
        [mark.overhead_ms],
        [mark.rate * 100],
        yerr=_spread([(mark.rate, mark.low, mark.high)]),
        fmt=marker,
        color=colour,
        markersize=6,
        markeredgecolor="white",
        markeredgewidth=0.6,
        elinewidth=1.4,
        capsize=3,
        zorder=3,
    )


def _spread(rates: Sequence[tuple[float, float, float]]) -> list[list[float]]:
    """Return how far an interval reaches below and above a rate, in percent."""
    below = [max(0.0, rate - low) * 100 for rate, low, _ in rates]
    above = [max(0.0, high - rate) * 100 for rate, _, high in rates]
    return [below, above]


def _kinds_legend(figure: Figure, marks: Sequence[_Mark], chance: float | None) -> None:
    from matplotlib.lines import Line2D

    handles = [
        Line2D([], [], linestyle="none", marker=marker, color=colour, label=words)
        for kind, (colour, marker, words) in _KINDS.items()
        if any(mark.kind == kind for mark in marks)
    ]
    if chance is not None:
        handles.append(
            Line2D(
                [],
                [],
                color="#999999",
                linewidth=0.8,
                linestyle=(0, (4, 3)),
                label=f"chance, at most {percent(chance)}",
            )
        )
    figure.legend(
        handles=handles,
        loc="outside upper left",
        ncols=len(handles),
        fontsize=8.5,
        handletextpad=0.4,
        columnspacing=1.4,
    )


def _cost_caption(report: Report, marks: Sequence[_Mark]) -> str:
    sentences = [
        "Best rate of tokens with its 95% interval, against the time of a decoded token without"
        " Embedding and LM head, as tsqp bench measures it."
    ]
    drawn = {mark.policy for mark in marks}
    scores = [judged(policy) for policy in report.policies if policy.policy in drawn]
    sizes = sorted({score.top1.n for score in scores if score is not None})
    if sizes:
        ends = f"{sizes[0]:,}" if len(sizes) == 1 else f"between {sizes[0]:,} and {sizes[-1]:,}"
        sentences.append(f"Each is of n = {ends} tokens.")
    left = [policy for policy in report.policies if policy.policy not in drawn]
    costless = [policy.policy for policy in left if policy.cost is None]
    if costless:
        sentences.append(f"Left out, as their cost was not measured: {', '.join(costless)}.")
    for policy in left:
        if policy.cost is not None and failed(policy):
            names = ", ".join(failed(policy))
            sentences.append(f"Left out: {policy.policy}, where an attack did not work ({names}).")
        elif policy.cost is not None:
            sentences.append(f"Left out: {policy.policy}, where no attack applies.")
    return " ".join(sentences)


# ------------------------------------------------------------------------------------- labels


def _label(figure: Figure, axis: Axes, marks: Sequence[_Mark]) -> None:
    """Write each name where it covers nothing, as near to its mark as can be.

    In a fixed order and at fixed distances, so that equal reports give equal pictures.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    FigureCanvasAgg(figure)  # which can measure letters
    figure.draw_without_rendering()
    # What is added must not move what was laid out.
    figure.set_layout_engine("none")
    points = [(mark.overhead_ms, mark.rate * 100) for mark in marks]
    at = [(float(x), float(y)) for x, y in axis.transData.transform(points)]
    taken = [(x - 6, y - 6, x + 6, y + 6) for x, y in at]
    for (x, _), mark in zip(at, marks, strict=True):
        ends = axis.transData.transform([(1.0, mark.low * 100), (1.0, mark.high * 100)])
        taken.append((x - 3, float(ends[0][1]), x + 3, float(ends[1][1])))
    x0, y0, x1, y1 = (float(edge) for edge in axis.bbox.extents)
    sizes = [_measured(figure, mark.policy) for mark in marks]
    places = _arranged(at, sizes, figure.dpi / 72, taken, (x0, y0, x1, y1))
    for mark, point, (dx, dy) in zip(marks, points, places, strict=True):
        axis.annotate(
            mark.policy,
            point,
            xytext=(dx, dy),
            textcoords="offset points",
            ha="left" if dx > 0 else "right",
            va="center",
            fontsize=_LETTERS,
            color="#222222",
            # So that letters can be read across a line of the grid.
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.6},
            zorder=4,
            arrowprops={
                "arrowstyle": "-",
                "color": _KINDS[mark.kind][0],
                "linewidth": 0.6,
                "shrinkA": 1,
                "shrinkB": 3,
                # From the edge of the name, not from its middle.
                "relpos": (0.0 if dx > 0 else 1.0, 0.5),
            }
            if abs(dy) > 9 or abs(dx) > 9
            else None,
        )


def _measured(figure: Figure, words: str) -> tuple[float, float]:
    """Return the width and height of a name in pixels."""
    text = figure.text(0, 0, words, fontsize=_LETTERS)
    extent = text.get_window_extent()
    text.remove()
    return extent.width, extent.height


def _arranged(
    at: Sequence[_Point],
    sizes: Sequence[tuple[float, float]],
    scale: float,
    marks: Sequence[_Box],
    frame: _Box,
) -> list[_Point]:
    """Return how far each name stands from its mark, in points.

    Names are placed one after another, in several orders, of which the cheapest counts.
    """
    across = sorted(range(len(at)), key=lambda place: (at[place], place))
    widest = sorted(across, key=lambda place: (-sizes[place][0], place))
    best: tuple[float, list[_Point]] = (math.inf, [])
    for order in (across, across[::-1], widest, widest[::-1]):
        total, names, lines = 0.0, list[_Box](), list[_Line]()
        offsets: list[_Point] = [(0.0, 0.0)] * len(at)
        for place in order:
            cost, offsets[place], box, line = _nearest(
                at[place], sizes[place], scale, (marks, names, lines, frame)
            )
            total += cost
            names.append(box)
            lines.append(line)
        best = min(best, (total, offsets))
    return best[1]


def _nearest(
    at: _Point,
    size: tuple[float, float],
    scale: float,
    there: tuple[Sequence[_Box], Sequence[_Box], Sequence[_Line], _Box],
) -> tuple[float, _Point, _Box, _Line]:
    """Return the cheapest place of a name: cost, offset, its box, and the line to its mark."""
    marks, names, lines, frame = there
    width, height = size
    best: tuple[float, _Point, _Box, _Line] | None = None
    for least, (dx, dy) in _OFFSETS:
        if best is not None and best[0] <= least:
            break
        near = at[0] + dx * scale, at[1] + dy * scale
        left = near[0] if dx > 0 else near[0] - width
        box = (left - 1, near[1] - height / 2, left + width + 1, near[1] + height / 2)
        line = (at, near)
        cost = least + _WORST * (not _within(box, frame))
        cost += _WORST * sum(_overlap(box, other) for other in (*marks, *names))
        cost += _BAD * sum(_crosses(other, box) for other in lines)
        cost += _BAD * sum(_crosses(line, other) for other in names)
        cost += _POOR * sum(_crosses(line, other) for other in marks)
        cost += _POOR * sum(_meet(line, other) for other in lines)
        if best is None or cost < best[0]:
            best = (cost, (dx, dy), box, line)
    return best or (math.inf, (0.0, 0.0), (0.0, 0.0, 0.0, 0.0), (at, at))


def _overlap(one: _Box, other: _Box) -> bool:
    return one[0] < other[2] and other[0] < one[2] and one[1] < other[3] and other[1] < one[3]


def _within(box: _Box, frame: _Box) -> bool:
    return frame[0] <= box[0] and frame[1] <= box[1] and box[2] <= frame[2] and box[3] <= frame[3]


def _meet(one: _Line, other: _Line) -> bool:
    """Whether two lines cross."""

    def side(line: _Line, point: _Point) -> bool:
        (x0, y0), (x1, y1) = line
        return (x1 - x0) * (point[1] - y0) > (y1 - y0) * (point[0] - x0)

    first, second = (side(one, end) for end in other)
    third, fourth = (side(other, end) for end in one)
    return first != second and third != fourth


def _crosses(line: _Line, box: _Box) -> bool:
    """Whether a line that begins outside a box enters it."""
    (x, y), _ = line
    if box[0] < x < box[2] and box[1] < y < box[3]:
        return False
    rising, falling = ((box[0], box[1]), (box[2], box[3])), ((box[0], box[3]), (box[2], box[1]))
    return _meet(line, rising) or _meet(line, falling)


# ------------------------------------------------------------------------------------- curves


def curve(made: Curve, harm: Harm = "perplexity") -> Picture | None:
    """Draw recovery against strength, and what the noise does to the output.

    None where no attack that works was tried at any strength.
    """
    read = [point for point in made.points if point.rate.n]
    if not read:
        return None
    places = _places(made)
    with drawing(3.6, 5.6) as figure:
        left = figure.subplots()
        left.set_xscale("log")
        less = " (smaller: more noise)" if made.parameter == "epsilon" else " of the noise"
        left.set_xlabel(f"{made.parameter}{less}")
        _strengths(left, made, places)
        _percents(left)
        left.set_ylabel("tokens read", color=_READS)
        left.errorbar(
            [places[point.strength] for point in read],
            [(point.rate.value or 0.0) * 100 for point in read],
            yerr=_spread([(p.rate.value or 0.0, p.rate.low, p.rate.high) for p in read]),
            fmt="o-",
            color=_READS,
            markersize=5,
            linewidth=1.4,
            capsize=3,
            zorder=3,
        )
        left.axhline(
            max(point.chance for point in read) * 100,
            color="#999999",
            linewidth=0.8,
            linestyle=(0, (4, 3)),
        )
        _harm(left, made, places, harm)
        title = f"{made.policy}: recovery and {harm} against {made.parameter}"
        return picture(figure, title, _curve_caption(made, harm))


def _places(made: Curve) -> dict[float, float]:
    """Return where each strength stands: 0 and infinity have no place on a logarithmic axis."""
    finite = sorted({p.strength for p in made.points if 0 < p.strength < math.inf}) or [1.0]
    places = {strength: strength for strength in finite}
    step = max(2.0, (finite[-1] / finite[0]) ** (1 / max(1, len(finite) - 1)))
    return places | {0.0: finite[0] / step, math.inf: finite[-1] * step}


def _strengths(axis: Axes, made: Curve, places: dict[float, float]) -> None:
    from matplotlib.ticker import NullLocator

    shown = sorted({point.strength for point in made.points})
    names = ["none" if s in (0.0, math.inf) else f"{s:,.4g}" for s in shown]
    axis.set_xticks([places[strength] for strength in shown], names)
    axis.xaxis.set_minor_locator(NullLocator())
    first, last = places[shown[0]], places[shown[-1]]
    margin = max(1.15, (last / first) ** 0.05)
    axis.set_xlim(first / margin, last * margin)


def _harm(left: Axes, made: Curve, places: dict[float, float], harm: Harm) -> None:
    from matplotlib.ticker import FuncFormatter

    right = left.twinx()
    right.spines["right"].set_visible(True)
    right.set_ylabel(harm, color=_HARM)
    limit = made.plain_perplexity * _MOST if harm == "perplexity" else math.inf
    drawn = [
        (places[point.strength], value)
        for point in made.points
        if math.isfinite(value := _harm_of(point, harm)) and value <= limit
    ]
    right.plot(
        [place for place, _ in drawn],
        [value for _, value in drawn],
        marker="^",
        markersize=5,
        color=_HARM,
        linestyle="--",
        linewidth=1.2,
    )
    if harm == "perplexity":
        right.axhline(made.plain_perplexity, color=_HARM, linewidth=0.8, linestyle=":")
    values = [value for _, value in drawn if value > 0]
    if harm == "perplexity" and values and max(values) / min(values) > 8:
        right.set_yscale("log")
    right.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:,.4g}"))


def _harm_of(point: Point, harm: Harm) -> float:
    return point.perplexity if harm == "perplexity" else point.output_error


def _curve_caption(made: Curve, harm: Harm) -> str:
    read = [point for point in made.points if point.rate.n]
    sentences = [_falls(made, read)]
    silent = [point.strength for point in made.points if not point.rate.n]
    if silent:
        names = ", ".join(f"{strength:.4g}" for strength in silent)
        sentences.append(f"No attack worked at {made.parameter} {names}: nothing is drawn there.")
    if harm == "perplexity":
        most = made.plain_perplexity * _MOST
        cut = [point.strength for point in made.points if not point.perplexity <= most]
        if cut:
            names = ", ".join(f"{strength:.4g}" for strength in cut)
            sentences.append(f"Perplexity at {made.parameter} {names} is beyond the axis.")
        plain = figures(made.plain_perplexity) or "0"
        sentences.append(f"Perplexity without noise: {plain} (dotted).")
    return " ".join(sentences)


def _falls(made: Curve, read: Sequence[Point]) -> str:
    """Say at which strength, and at which price, recovery is no more than chance."""
    hidden = [point for point in read if point.rate.low <= point.chance]
    if not hidden:
        lowest = min(read, key=lambda point: (point.rate.value or 0.0, point.strength))
        return (
            f"At no strength that was tried is recovery down to chance: {_said(lowest.rate)} at"
            f" {made.parameter} {lowest.strength:.4g}."
        )
    weakest = min(hidden, key=lambda point: point.sigma)
    return (
        f"Recovery is not above chance at {made.parameter} {weakest.strength:.4g}"
        f" ({_said(weakest.rate)}), where perplexity is {figures(weakest.perplexity) or '0'}."
    )


def _said(rate: Rate) -> str:
    return f"{rate_words(rate)} tokens"


def plots(report: Report) -> list[Picture]:
    """Return all plots of a report, in the order in which a person reads them."""
    found = [cost_against_leakage(report), *(curve(made, harm_of(made)) for made in report.curves)]
    return [plot for plot in found if plot is not None]


def harm_of(made: Curve) -> Harm:
    """Say which harm a curve is drawn beside.

    Noise that is taken out of results again leaves the text as it is, and an error of rounding.
    """
    return "output error" if made.parameter == "sigma" else "perplexity"
