"""A leakage report for people: on a terminal, as a page, and as pictures.

The pictures show what each policy costs and leaks, what noise does, and what was read. No rate of
an attack that does not work where it must is drawn. Text that was read comes from the model: what
would break the layout or act on a terminal is written as an escape.
"""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from io import StringIO
from typing import TYPE_CHECKING, Literal

from rich.console import Console
from rich.rule import Rule
from rich.table import Column, Table
from rich.terminal_theme import DEFAULT_TERMINAL_THEME
from rich.text import Text

from tsqp.lab.leak.grids import (
    curve_grid,
    details_of,
    facts,
    judged,
    lengths_grid,
    setup_pairs,
    summary_grid,
    verdict,
    warnings,
)
from tsqp.lab.leak.model import Curve, LeakReport, PolicyLeak, Rate
from tsqp.lab.report import Picture, drawing, page, picture, terminal
from tsqp.tables import definitions

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


def show(report: LeakReport, console: Console, *, details: bool = False) -> None:
    """Print the tables, from the whole to its parts.

    `details`: with every attack and place, controls, work and refusals, and what was read.
    """
    console.print(Text(facts(report), style="bold"))
    for sentence in warnings(report):
        console.print(Text(f"! {sentence}", style="yellow"))
    console.print()
    grids = [summary_grid(report)] if report.policies else []
    grids += [lengths_grid(report)] if any(one.lengths for one in report.policies) else []
    grids += map(curve_grid, report.curves)
    for policy in report.policies if details else ():
        grids += details_of(policy)
    for grid in grids:
        for part in terminal(grid, console):
            console.print(part)
    if not report.policies:
        console.print("No policy was attacked.")
    console.print(Text("Setup", style="bold"))
    console.print(definitions(setup_pairs(report)))
    for panel in panels(report, ascii_only=console.options.ascii_only) if details else ():
        if panel.outcome:
            draw(panel, console)


def render_html(report: LeakReport) -> str:
    """Return the page. Needs matplotlib (extra `bench`): see `report.check_installed`."""
    return page(
        "leak",
        program="tsqp leak",
        report=report,
        facts=facts(report),
        warnings=warnings(report),
        summary=summary_grid(report) if report.policies else None,
        lengths=lengths_grid(report) if any(one.lengths for one in report.policies) else None,
        pictures=list(filter(None, [cost_against_leakage(report), *map(curve, report.curves)])),
        curves=[curve_grid(curve) for curve in report.curves],
        readings=panels(report),
        policies=[(one, verdict(one), details_of(one)) for one in report.policies],
        setup=setup_pairs(report),
    )


# ------------------------------------------------------------------------------------------ plots


def cost_against_leakage(
    report: LeakReport, cost_of: str = "", read_of: str = ""
) -> Picture | None:
    """Draw each policy's overhead beside its best rate; None where no policy has both.

    `cost_of`, `read_of`: what to write behind the axes' names, as in " (demo)", where cost and rate
    are of different models.
    """
    from matplotlib.lines import Line2D
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    shown = [
        one
        for one in report.policies
        if one.adversary == "service"
        and one.cost
        and (one.nothing is not None or judged(one) is not None)
    ]
    if not shown:
        return None
    shown.sort(key=lambda one: one.cost.overhead_ms if one.cost else 0.0)
    names, places = [one.policy for one in shown], range(len(shown))
    costs = [one.cost.overhead_ms if one.cost else 0.0 for one in shown]
    kinds = [
        _KINDS["nothing" if one.nothing is not None else "reads" if one.above_chance else "chance"]
        for one in shown
    ]
    chances = [score.chance for one in shown if (score := judged(one)) is not None]
    with drawing(1.5 + 0.27 * len(shown)) as figure:
        left, right = figure.subplots(1, 2, sharey=True, width_ratios=(2, 3))
        left.barh(places, costs, height=0.6, color="#b9c2ca")
        if min(costs) > 0 and max(costs) / min(costs) > 8:
            left.set_xscale("log")
            left.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
            left.xaxis.set_minor_formatter(NullFormatter())
        left.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
        for place, one, (colour, marker, _) in zip(places, shown, kinds, strict=True):
            score = judged(one)
            rates = [score.top1 if score and not one.nothing else Rate(hits=0, n=0)]
            _rates(right, [place], rates, colour, marker, across=True)
        if chances:
            right.axvline(max(chances) * 100, color="#999999", linewidth=0.8, linestyle="--")
        right.set_xlabel(f"tokens read by the best attack{read_of}")
        _percents(right, "x")
        left.set(
            xlabel=f"overhead of a decoded token, ms{cost_of}",
            yticks=places,
            yticklabels=names,
            ylim=(len(shown) - 0.4, -0.6),
        )
        for axis in (left, right):
            axis.tick_params(axis="y", length=0)
            axis.grid(axis="both" if axis is right else "x")
        handles = [
            Line2D([], [], linestyle="none", marker=marker, color=colour, label=words)
            for colour, marker, words in dict.fromkeys(kinds)
        ]
        figure.legend(handles=handles, loc="outside upper right", ncols=len(handles))
        return picture(figure, "Cost against leakage", _COST_CAPTION)


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
    ends = [(100 * rate.low, 100 * rate.high) if rate.n else (0.0, 0.0) for rate in rates]
    reach = [
        [max(0.0, value - low) for value, (low, _) in zip(values, ends, strict=True)],
        [max(0.0, high - value) for value, (_, high) in zip(values, ends, strict=True)],
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
        less = " (smaller: more noise)" if made.parameter == "epsilon" else " of the noise"
        left.set(xscale="log", xlabel=f"{made.parameter}{less}")
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


# ------------------------------------------------------------------------------------ what was read

# Of a token where nothing was guessed.
_NO_GUESS = "[?]"
# Tokens of each part that are shown: a picture is to be taken in, and the report has all.
_MOST_TOKENS = 240
# Of a picture, in letters, and the colours of right and wrong tokens in it.
_WIDTH = 132
_RIGHT, _WRONG = "#0b5c33 on #d9f2e3", "underline #a11d10 on #fde0dc"
_SAID = "#1d2329 on #f3f5f7"
# Controls, formats and separators: what moves a cursor or turns the direction of writing.
_HIDDEN = ("Cc", "Cf", "Cn", "Co", "Cs", "Zl", "Zp")
# Without the window and the fonts of the web that rich draws.
_SVG = """\
<svg viewBox="0 40 {width} {height}" width="{width}" xmlns="http://www.w3.org/2000/svg">
<title>What was said, and what the service read</title>
<style>.{unique_id}-matrix {{ font: {char_height}px "DejaVu Sans Mono", Menlo, Consolas, monospace;
}} {styles}</style>
<rect y="40" width="100%" height="100%" fill="#fff"/>
<defs>{lines}</defs>
<g transform="translate({terminal_x}, {terminal_y})">{backgrounds}
<g class="{unique_id}-matrix">{matrix}</g></g>
</svg>"""


@dataclass(frozen=True)
class Panel:
    """A policy, its verdict, and a session as its best attack reads it, unless there is none.

    `outcome`: how much was read, by which attack; empty without one. `unseen`: what stayed.
    `parts`: the prompt and the answer: the name, of each token what was said, what was read, and
    whether it is right, and how many tokens are left out; empty if none are.
    """

    policy: str
    verdict: str
    outcome: str = ""
    unseen: str = ""
    parts: tuple[tuple[str, tuple[tuple[str, str, bool], ...], str], ...] = ()


def panels(report: LeakReport, *, ascii_only: bool = False) -> list[Panel]:
    """Return a panel for each policy.

    Where an attack did not work, what another one misread is not shown: it would look like cover.
    """
    return [_panel(policy, ascii_only) for policy in report.policies]


def _panel(policy: PolicyLeak, ascii_only: bool) -> Panel:
    made = policy.reconstruction
    if made is None or judged(policy) is None:
        return Panel(policy.title, verdict(policy))
    right, every = sum(piece.right for piece in made.pieces), len(made.pieces)
    outcome = f"{right:,} of {every:,} tokens read, by {made.attack} at {made.where}"
    stayed = f"{made.unseen:,} token" if made.unseen == 1 else f"{made.unseen:,} tokens"
    unseen = f"({stayed} of the prompt never left the TEE)" if made.unseen else ""
    parts = []
    for name in ("prompt", "answer"):
        pieces = [piece for piece in made.pieces if piece.part == name]
        tokens = tuple(
            (
                visible(piece.real, ascii_only=ascii_only),
                _NO_GUESS if piece.read is None else visible(piece.read, ascii_only=ascii_only),
                piece.right,
            )
            for piece in pieces[:_MOST_TOKENS]
        )
        left = len(pieces) - len(tokens)
        parts += [(name, tokens, f" (and {left:,} more)" if left else "")] if tokens else []
    return Panel(policy.title, verdict(policy), outcome, unseen, tuple(parts))


def visible(text: str, *, ascii_only: bool = False) -> str:
    """Return a text of one line without anything invisible: those characters as escapes."""
    # A mark at the beginning would stand on the last letter of the token before. The backslash
    # is escaped, so that an escape can be told from text that looks like one.
    return "".join(
        character.encode("unicode_escape").decode("ascii")
        if unicodedata.category(character) in _HIDDEN
        or character == "\\"
        or (place == 0 and unicodedata.combining(character))
        or (ascii_only and not character.isascii())
        else character
        for place, character in enumerate(text)
    )


def draw(
    panel: Panel, console: Console, right: str = "green", wrong: str = "red", said: str = ""
) -> None:
    """Print a panel: what was said beside what was read. `right`, `wrong`, `said`: styles.

    On a console without colours wrong tokens are in brackets, and brackets of the text are escaped.
    """
    marked = console.color_system is None or console.no_color
    head = Table.grid(Column(), Column(justify="right"), expand=True)
    head.add_row(Text(panel.policy, style="bold"), panel.verdict)
    console.print("", head, Rule(style="dim", characters="\u2500"))
    if not panel.outcome:
        console.print(Text("There is nothing to show as read.", style="dim"))
        return
    console.print(Text("\n".join(filter(None, (panel.outcome, panel.unseen))), style="dim"))
    halves = (Column(ratio=1, overflow="fold") for _ in range(2))
    table = Table.grid(*halves, expand=True, padding=(0, 2, 0, 0))
    for name, tokens, more in panel.parts:
        real, read = Text(), Text()
        for token, guess, is_right in tokens:
            real.append(_escaped(token) if marked else token, style=said)
            shown = _escaped(guess) if marked and guess != _NO_GUESS else guess
            bare = is_right or not marked or guess == _NO_GUESS
            read.append(shown if bare else f"[{shown}]", style=right if is_right else wrong)
        table.add_row(
            *(Text(f"{name}{more}, as it was {end}", style="dim") for end in ("said", "read"))
        )
        table.add_row(real, read)
    console.print(table)


def _escaped(words: str) -> str:
    return words.replace("[", "\\[").replace("]", "\\]")


def svg(shown: list[Panel]) -> str:
    """Draw panels as a picture on white; wrong tokens are underlined.

    Equal panels give equal pictures.
    """
    console = Console(
        record=True, width=_WIDTH, file=StringIO(), force_terminal=True, color_system="truecolor"
    )
    for panel in shown:
        draw(panel, console, _RIGHT, _WRONG, _SAID)
    return console.export_svg(
        title="", theme=DEFAULT_TERMINAL_THEME, code_format=_SVG, unique_id="tsqp"
    )
