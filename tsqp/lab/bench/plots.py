"""Plots of a report as SVG: bars per operator, policies side by side, cost against size."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from tee_side.words import LAYERLESS, PHASES, Phase
from tsqp.lab.bench.caveats import speed
from tsqp.lab.bench.compare import alike, comparable, is_generation
from tsqp.lab.bench.findings import dominant
from tsqp.lab.bench.growth import Growth, growth
from tsqp.lab.bench.model import STAGES, Case, PolicyRun, Report
from tsqp.lab.bench.plot_style import (
    REST_COLOUR,
    STAGE_COLOURS,
    WIDTH,
    Plot,
    new_figure,
    stage_legend,
    to_svg,
)
from tsqp.lab.bench.summary import (
    REST_MEANING,
    REST_NAME,
    Measured,
    by_operator,
    case_stages,
    find_case,
    main_cases,
    name_of,
    tokens_per_step,
)
from tsqp.lab.bench.units import duration, figures, size

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_BASELINE_COLOUR = "#888888"
_POLICY_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
_MARKERS = "os^DvPX"
_DASHES: tuple[Any, ...] = ("-", "--", "-.", (0, (1, 1.5)), (0, (5, 1, 1, 1, 1, 1)))

# --- stacked bars per operator -----------------------------------------------------------------


def stage_bars(report: Report, phase: Phase) -> Plot | None:
    """Draw each operator's time by stage, a panel for each policy; None without such a case."""
    pairs = [(run, case) for run, case in main_cases(report, phase) if case.operators]
    if not pairs:
        return None
    names = _operators(pairs)
    columns = min(3, len(pairs))
    lines = -(-len(pairs) // columns)
    with new_figure(lines * (0.235 * (len(names) + 1) + 0.75) + 0.55) as figure:
        axes = figure.subplots(lines, columns, sharex=True, sharey=True, squeeze=False)
        for place, axis in enumerate(axes.flat):
            if place < len(pairs):
                _stage_panel(axis, *pairs[place], names, limit=_limit(pairs))
            else:
                axis.set_visible(False)
        used = [n for n in STAGES if any(getattr(case_stages(c), n) for _, c in pairs)]
        stage_legend(figure, used)
        axes.flat[0].set_xlim(0, _limit(pairs) * 1.18 or 1.0)
        figure.supxlabel("ms a step, all layers together", fontsize=9.5, color="#333333")
        return Plot(
            f"Where the time goes: {name_of(pairs[0][1])}",
            to_svg(figure),
            _bars_caption(pairs),
        )


def _operators(pairs: Sequence[tuple[PolicyRun, Case]]) -> list[str]:
    """Return the operators that cost anything, in the order of a step."""
    order: list[str] = []
    for _, case in pairs:
        found = [total.operator for total in by_operator(case) if total.stages.total_us > 0]
        for place, name in enumerate(found):
            if name not in order:
                # After the one that it follows in this policy.
                after = order.index(found[place - 1]) + 1 if place else 0
                order.insert(after, name)
    return order


def _limit(pairs: Sequence[tuple[PolicyRun, Case]]) -> float:
    """Return how long the longest bar is drawn, in ms.

    Embedding and LM head in the TEE may dwarf everything that a policy can change: then they are
    cut off.
    """
    shown, vocabulary = 0.0, 0.0
    for _, case in pairs:
        shown = max(shown, case.rest_us / 1e3)
        for total in by_operator(case):
            if total.place == "tee" and total.operator in LAYERLESS:
                vocabulary = max(vocabulary, total.stages.total_us / 1e3)
            else:
                shown = max(shown, total.stages.total_us / 1e3)
    return shown if vocabulary > 1.5 * shown > 0 else max(shown, vocabulary)


def _stage_panel(
    axis: Axes, run: PolicyRun, case: Case, names: Sequence[str], *, limit: float
) -> None:
    totals = {total.operator: total.stages for total in by_operator(case)}
    left = [0.0] * len(names)
    for stage in STAGES:
        widths = [getattr(totals[name], stage) / 1e3 if name in totals else 0.0 for name in names]
        if any(widths):
            axis.barh(
                range(len(names)),
                widths,
                left=left,
                height=0.74,
                color=STAGE_COLOURS[stage],
                edgecolor="white",
                linewidth=0.4,
            )
        left = [begin + width for begin, width in zip(left, widths, strict=True)]
    rest = max(case.rest_us, 0.0) / 1e3
    axis.barh([len(names)], [rest], height=0.74, color=REST_COLOUR)
    for place, total in enumerate([*left, rest]):
        if total > 0:
            cut = total > limit * 1.001
            axis.annotate(
                f"{figures(total)}, cut off" if cut else figures(total),
                (limit if cut else total, place),
                xytext=(3, 0),
                textcoords="offset points",
                va="center",
                ha="right" if cut else "left",
                fontsize=8,
                color="white" if cut else "#444444",
            )
    axis.set_yticks(range(len(names) + 1), [*names, REST_NAME])
    axis.set_ylim(len(names) + 0.6, -0.6)
    axis.tick_params(axis="y", length=0)
    axis.grid(axis="x")
    axis.set_title(f"{run.policy}: {duration(case.step_ms.median * 1e3)}")


def _bars_caption(pairs: Sequence[tuple[PolicyRun, Case]]) -> str:
    sentences = [dominant(run, case) for run, case in pairs]
    sentences += [
        f"{run.policy}: parts that ran at the same time add up to {duration(-case.rest_us)} more"
        " than the step took."
        for run, case in pairs
        if case.rest_us < 0
    ]
    if any(case.rest_us > 0 for _, case in pairs):
        sentences.append(f"{REST_NAME.capitalize()}: {REST_MEANING}.")
    limit = _limit(pairs)
    if any(t.stages.total_us / 1e3 > limit * 1.001 for _, c in pairs for t in by_operator(c)):
        sentences.append("Embedding and LM head in the TEE are cut off: they would dwarf the rest.")
    return "\n".join(sentences)


# --- policies side by side ---------------------------------------------------------------------


def side_by_side(report: Report) -> Plot | None:
    """Draw tokens/s, time and bytes of each policy, a row for each phase; None without a case."""
    rows = [(phase, pairs) for phase in PHASES if (pairs := main_cases(report, phase))]
    if not rows:
        return None
    with new_figure(sum(0.34 * len(pairs) + 1.15 for _, pairs in rows)) as figure:
        axes = figure.subplots(
            len(rows),
            3,
            squeeze=False,
            gridspec_kw={"height_ratios": [len(pairs) + 2 for _, pairs in rows]},
        )
        for (_, pairs), (rate, time, traffic) in zip(rows, axes, strict=True):
            name = name_of(pairs[0][1])
            _bars(rate, pairs, [("", "#0072b2", lambda c: c.tokens_per_s)], figures)
            rate.set_title(f"{name}: tokens/s")
            rate.set_xlabel(_worth(report), fontsize=8.5)
            _bars(
                time,
                pairs,
                [
                    ("overhead", "#d55e00", lambda c: c.overhead_ms if c.rpcs else 0.0),
                    ("no RPC: all in the TEE", "#888888", lambda c: 0 if c.rpcs else c.overhead_ms),
                    ("vocabulary in the TEE", "#f0c9a8", lambda c: c.heavy_ms),
                ],
                figures,
            )
            time.set_title("ms a step")
            _bars(
                traffic,
                pairs,
                [
                    ("sent", "#009e73", lambda c: c.bytes_sent / tokens_per_step(c)),
                    ("received", "#99d8c4", lambda c: c.bytes_received / tokens_per_step(c)),
                ],
                size,
            )
            traffic.set_title("bytes a token")
            for axis in (time, traffic):
                axis.set_yticklabels([])
        labelled = {
            bars.get_label(): bars
            for axis in axes.flat
            for bars in axis.containers
            if not bars.get_label().startswith("_") and any(bar.get_width() for bar in bars)
        }
        figure.legend(
            handles=list(labelled.values()), loc="outside lower right", ncols=5, fontsize=8.5
        )
        return Plot("Policies side by side", to_svg(figure), _side_caption(report, rows))


def _worth(report: Report) -> str:
    """Return what to write below speeds: a plot may be shown without its page."""
    kind = report.setup.device.partition(":")[0]
    return {"null": "upper bound", "model": "modelled"}.get(kind, "")


_Part = tuple[str, str, Callable[[Case], float]]


def _bars(
    axis: Axes,
    pairs: Sequence[tuple[PolicyRun, Case]],
    parts: Sequence[_Part],
    render: Callable[[float], str],
) -> None:
    from matplotlib.ticker import FuncFormatter

    places = range(len(pairs))
    left = [0.0] * len(pairs)
    for label, colour, value in parts:
        widths = [value(case) for _, case in pairs]
        axis.barh(places, widths, left=left, height=0.66, color=colour, label=label)
        left = [begin + width for begin, width in zip(left, widths, strict=True)]
    for place, total in zip(places, left, strict=True):
        axis.annotate(
            render(total) or "none",
            (total, place),
            xytext=(3, 0),
            textcoords="offset points",
            va="center",
            fontsize=8.5,
            color="#333333",
        )
    axis.set_yticks(places, [run.policy for run, _ in pairs])
    axis.set_ylim(len(pairs) - 0.4, -0.6)
    axis.set_xlim(0, max(left) * 1.3 or 1.0)
    axis.tick_params(axis="y", length=0)
    axis.locator_params(axis="x", nbins=4)
    if not any(left):
        axis.set_xticks([])
    axis.xaxis.set_major_formatter(FuncFormatter(lambda number, _: render(number) or "0"))
    axis.grid(axis="x")


def _side_caption(report: Report, rows: Sequence[tuple[Phase, Sequence[Measured]]]) -> str:
    sentences = []
    for _, pairs in rows:
        name = name_of(pairs[0][1]).capitalize()
        if len(pairs) == 1:
            sentences.append(f"{name}: {speed(report, *pairs[0])}.")
            continue
        groups = alike(report, pairs)
        said = [_fastest(report, group, len(groups) > 1) for group in groups if len(group) > 1]
        if len(groups) > 1 and not said:
            said.append(
                "no two policies compute the same in the TEE, so none is called the fastest"
            )
        said += _leanest(pairs)
        if said:
            sentences.append(f"{name}: {', '.join(said)}.")
    return "\n".join(sentences)


def _leanest(pairs: Sequence[Measured]) -> list[str]:
    """Say which policy moves nothing, or the least; nothing where policies move the same."""
    moved = {run.policy: case.bytes_sent + case.bytes_received for run, case in pairs}
    least = min(moved.values())
    names = [policy for policy, count in moved.items() if count == least]
    if len(names) == len(moved):
        return []
    verb = "moves" if len(names) == 1 else "move"
    return [f"{' and '.join(names)} {verb} {'the least' if least else 'nothing'}"]


def _fastest(report: Report, group: Sequence[Measured], among: bool) -> str:
    run, case = max(group, key=lambda pair: pair[1].tokens_per_s)
    text = f"{run.policy} is the fastest"
    if among:
        names = " and ".join(other.policy for other, _ in group)
        text += f" of {names}, which compute the same in the TEE"
    return f"{text}, {speed(report, run, case)}"


# --- cost against size -------------------------------------------------------------------------


def growth_plot(report: Report) -> Plot | None:
    """Draw time against prompt, context and batch on logarithmic axes; None without three sizes."""
    panels = [
        (title, axis, chosen)
        for title, axis, phase in (
            ("prefill", "prompt tokens", "prefill"),
            ("decode", "context tokens", "decode"),
            ("decode", "batch", "decode"),
        )
        if (chosen := _undivided(growth(report), phase, axis))
    ]
    if not panels:
        return None
    width = max(WIDTH * len(panels) / 3, 5.2)
    with new_figure(4.3, width=width) as figure:
        axes = figure.subplots(1, len(panels), squeeze=False)
        order = [run.policy for run in report.policies]
        for (title, against, found), axis in zip(panels, axes[0], strict=True):
            axis.set_xscale("log", base=2)
            axis.set_yscale("log")
            for one in found:
                _growth_line(axis, one, order.index(one.policy))
            if against == "prompt tokens":
                _baseline_lines(axis, report)
            _plain_ticks(axis)
            axis.grid(which="major")
            axis.set_title(title if against != "batch" else f"{title} at {found[0].scope}")
            axis.set_xlabel(against if against != "batch" else "sequences")
            axis.legend(loc="upper left", bbox_to_anchor=(-0.02, -0.17), fontsize=8.5, borderpad=0)
        axes[0][0].set_ylabel("ms a step, without vocabulary")
        return Plot("Cost against size", to_svg(figure), _growth_caption(panels), width)


def _undivided(found: Sequence[Growth], phase: str, against: str) -> list[Growth]:
    """Return of each policy the one whole-step curve with the most points, three at least."""
    best: dict[str, Growth] = {}
    for one in found:
        same = (one.phase, one.against, one.cost) == (phase, against, "step")
        if same and "micro" not in one.scope and len(one.points) > 2:
            held = best.get(one.policy)
            if held is None or len(one.points) > len(held.points):
                best[one.policy] = one
    return list(best.values())


def _growth_line(axis: Axes, found: Growth, number: int) -> None:
    colour = _POLICY_COLOURS[number % len(_POLICY_COLOURS)]
    drawn = [(x, cost) for x, cost in found.points if cost > 0]
    label = found.policy
    if found.law is not None:
        law = found.law
        label += f": n^{law.exponent:.2f}, R2 {law.r_squared:.2f}"
        ends = [found.points[0][0], found.points[-1][0]]
        dashes = _DASHES[number % len(_DASHES)]
        axis.plot(ends, [law.at(x) for x in ends], linestyle=dashes, color=colour, linewidth=1.2)
    axis.plot(
        [x for x, _ in drawn],
        [cost for _, cost in drawn],
        linestyle="none",
        marker=_MARKERS[number % len(_MARKERS)],
        markersize=5.5,
        color=colour,
        label=label,
    )


def _baseline_lines(axis: Axes, report: Report) -> None:
    found: dict[str, list[tuple[int, float]]] = {}
    for baseline in report.baselines:
        same = baseline.phase == "prefill" and not is_generation(baseline)
        beside = any(
            comparable(report, [case], baseline)
            for run in report.policies
            if (case := find_case(run, "prefill", (baseline.tokens, 1, 1))) is not None
        )
        if same and beside and baseline.step_ms.median > 0:
            # What was timed against a service has its vocabulary there.
            whole = "" if baseline.against == "null" else ", whole step"
            label = f"{baseline.name} (baseline{whole})"
            found.setdefault(label, []).append((baseline.tokens, baseline.step_ms.median))
    for number, (label, points) in enumerate(found.items()):
        points.sort()
        axis.plot(
            [x for x, _ in points],
            [cost for _, cost in points],
            linestyle=":",
            marker="x+"[number % 2],
            color=_BASELINE_COLOUR,
            label=label,
        )


def _plain_ticks(axis: Axes) -> None:
    """Label the axes with plain numbers, not powers."""
    from matplotlib.ticker import FuncFormatter, MaxNLocator, NullFormatter, NullLocator

    sizes = sorted({float(x) for line in axis.get_lines() for x in np.asarray(line.get_xdata())})
    # Labels that lie too close together would cover each other.
    shown = [x for before, x in pairwise([0.0, *sizes]) if before == 0 or x / before > 1.3]
    axis.set_xticks(shown, [f"{x:,.0f}" for x in shown])
    axis.set_xticks([], minor=True)
    low, high = axis.get_ylim()
    if high / low < 5:
        # Powers of ten and their halves would leave such an axis without a number.
        axis.yaxis.set_major_locator(MaxNLocator(5))
        axis.yaxis.set_minor_locator(NullLocator())
    axis.yaxis.set_major_formatter(FuncFormatter(lambda number, _: figures(number)))
    axis.yaxis.set_minor_formatter(
        FuncFormatter(lambda number, _: figures(number) if f"{number:e}"[0] in "25" else "")
        if high / low < 30
        else NullFormatter()
    )


def _growth_caption(panels: Sequence[tuple[str, str, Sequence[Growth]]]) -> str:
    sentences = ["Lines are power laws: a slope of 1 doubles with the size, 0 does not grow."]
    for title, against, found in panels:
        laws = [(one.law.exponent, one.policy) for one in found if one.law is not None]
        if laws:
            steepest = max(laws)
            growing = "faster than" if steepest[0] > 1.05 else "no faster than"
            sentences.append(
                f"{title.capitalize()} time grows {growing} its {against} (at most"
                f" n^{steepest[0]:.2f}, {steepest[1]})."
            )
    return " ".join(sentences)


def plots(report: Report) -> list[Plot]:
    """Return all plots of a report but its timelines, in the order in which a person reads them."""
    made = [side_by_side(report)]
    made += [stage_bars(report, phase) for phase in PHASES]
    made.append(growth_plot(report))
    return [plot for plot in made if plot is not None]
