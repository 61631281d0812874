"""The timeline of one step as SVG: when TEE, wire and GPU are busy, for each micro-batch."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import TYPE_CHECKING

from tsqp.lab.bench.model import STAGES, PolicyRun, Report, Timeline
from tsqp.lab.bench.plot_style import (
    REST_COLOUR,
    STAGE_COLOURS,
    Plot,
    new_figure,
    stage_legend,
    to_svg,
)
from tsqp.lab.bench.summary import case_name
from tsqp.lab.bench.timeline import RESOURCES, between_us, busy_us, lanes, length_us, resource
from tsqp.lab.bench.units import duration, percent

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# A span thinner than this share of a timeline is drawn together with its neighbours.
_FINEST = 1 / 1500
# What the TEE does when no operator runs, nor waits for the service.
_BETWEEN = "between operators"
# Width of a letter of an operator's name, as a share of the plot's.
_LETTER = 0.0072


def timeline_plot(run: PolicyRun, timeline: Timeline) -> Plot | None:
    """Draw when each side is busy in one step, and two layers enlarged; None if it is empty."""
    length = length_us(timeline)
    if length <= 0:
        return None
    lines = [(busy, lane) for busy in RESOURCES for lane in lanes(timeline)]
    window = _window(timeline)
    panels = 1 if window is None else 2
    gaps = {lane: between_us(timeline, lane) for lane in lanes(timeline)}
    with new_figure(panels * (0.26 * len(lines) + 0.85) + 0.3) as figure:
        axes = figure.subplots(panels, 1, squeeze=False)[:, 0]
        _lanes_panel(axes[0], timeline, lines, gaps, (0.0, length))
        axes[0].set_title("the whole step")
        if window is not None:
            layers, begin, end = window
            _lanes_panel(axes[1], timeline, lines, gaps, (begin, end))
            axes[1].set_title(layers, pad=16)
            _name_operators(axes[1], timeline, window[1:])
            axes[0].axvspan(begin / 1e3, end / 1e3, color="#000000", alpha=0.07, linewidth=0)
        axes[-1].set_xlabel("ms from the step's start")
        used = {span.stage.removesuffix("_us") for span in timeline.spans}
        stage_legend(
            figure,
            [name for name in STAGES if name.removesuffix("_us") in used],
            rest=_BETWEEN if any(gaps.values()) else None,
        )
        name = case_name(timeline.phase, timeline.tokens, timeline.batch)
        return Plot(f"One step: {run.policy}, {name}", to_svg(figure), _timeline_caption(timeline))


def _window(timeline: Timeline) -> tuple[str, float, float] | None:
    """Return two layers in the middle of the first lane, and when they start and end."""
    first = lanes(timeline)[0]
    layers = sorted({s.layer for s in timeline.spans if s.layer is not None and s.lane == first})
    if len(layers) < 4:
        return None
    middle = layers[len(layers) // 2 - 1 : len(layers) // 2 + 1]
    spans = [s for s in timeline.spans if s.layer in middle and s.lane == first]
    begin = min(span.start_us for span in spans)
    end = max(span.start_us + span.duration_us for span in spans)
    if end <= begin:
        return None
    return f"layers {middle[0]} and {middle[1]}", begin, end


def _lanes_panel(
    axis: Axes,
    timeline: Timeline,
    lines: Sequence[tuple[str, int]],
    gaps: dict[int, list[tuple[float, float]]],
    window: tuple[float, float],
) -> None:
    begin, end = window
    several = len(lanes(timeline)) > 1
    for place, (busy, lane) in enumerate(lines):
        spans = [
            s
            for s in timeline.spans
            if s.lane == lane
            and resource(s) == busy
            and s.start_us < end
            and s.start_us + s.duration_us > begin
        ]
        drawn = [
            (
                STAGE_COLOURS[stage],
                [
                    (s.start_us, s.start_us + s.duration_us)
                    for s in spans
                    if f"{s.stage.removesuffix('_us')}_us" == stage
                ],
            )
            for stage in STAGES
        ]
        if busy == "TEE":
            # First, so that what is an operator's lies above it.
            drawn.insert(0, (REST_COLOUR, [g for g in gaps[lane] if g[0] < end and g[1] > begin]))
        for colour, times in drawn:
            if times:
                axis.broken_barh(
                    [(s / 1e3, width / 1e3) for s, width in _pieces(times, end - begin)],
                    (place - 0.38, 0.76),
                    facecolors=colour,
                    edgecolor="none",
                )
    names = [f"{busy} {lane}" if several else busy for busy, lane in lines]
    axis.set_yticks(range(len(lines)), names)
    axis.set_ylim(len(lines) - 0.4, -0.6)
    axis.set_xlim(begin / 1e3, end / 1e3)
    axis.tick_params(axis="y", length=0)
    axis.grid(axis="x")
    if several:
        for place in range(1, len(lines)):
            if lines[place][0] != lines[place - 1][0]:
                axis.axhline(place - 0.5, color="#bbbbbb", linewidth=0.8)


def _name_operators(axis: Axes, timeline: Timeline, window: tuple[float, float]) -> None:
    """Write the operators of the first lane above it, where there is room."""
    begin, end = window
    first = lanes(timeline)[0]
    found = [s for s in timeline.spans if s.lane == first and begin <= s.start_us < end]
    for _, group in groupby(
        sorted(found, key=lambda s: s.start_us), key=lambda s: (s.layer, s.operator)
    ):
        spans = list(group)
        start = spans[0].start_us
        stop = min(end, max(s.start_us + s.duration_us for s in spans))
        name = spans[0].operator
        if (stop - start) / (end - begin) > _LETTER * (len(name) + 1):
            axis.annotate(
                name,
                ((start + stop) / 2e3, 1.0),
                xycoords=("data", "axes fraction"),
                xytext=(0, 3),
                textcoords="offset points",
                ha="center",
                fontsize=7.5,
                color="#444444",
            )
            axis.axvline(start / 1e3, color="#bbbbbb", linewidth=0.6, zorder=0)


def _pieces(times: Sequence[tuple[float, float]], length_us: float) -> list[tuple[float, float]]:
    """Return start and width of what to draw: pieces nearer than can be seen become one.

    `times`: starts and ends.
    """
    finest = length_us * _FINEST
    made: list[tuple[float, float]] = []
    for begin, stop in sorted(times):
        if made and begin - sum(made[-1]) < finest / 2:
            start = made[-1][0]
            made[-1] = (start, max(stop, sum(made[-1])) - start)
        else:
            made.append((begin, stop - begin))
    return made


def _timeline_caption(timeline: Timeline) -> str:
    length = length_us(timeline)
    shares = {
        busy: busy_us(s for s in timeline.spans if resource(s) == busy) / length
        for busy in RESOURCES
    }
    together = sum(shares.values())
    gaps = sorted(gap for lane in lanes(timeline) for gap in between_us(timeline, lane))
    # What no lane's operator did: two lanes may lack one at the same time.
    between, now = 0.0, 0.0
    for start, end in gaps:
        between += max(0.0, end - max(start, now))
        now = max(now, end)
    shares = {"TEE": shares["TEE"], _BETWEEN: between / length, **shares}
    words = ", ".join(f"{busy} {percent(share)}" for busy, share in shares.items() if share)
    longest = max(shares, key=lambda busy: shares[busy])
    text = f"Of {duration(length)}: {words}."
    if together > 1.02:
        text += f" They overlap: without what is {_BETWEEN}, together {percent(together)}."
    named = f"What is {_BETWEEN}" if longest == _BETWEEN else f"The {longest}"
    return text + (
        f" {named} is what to shorten first."
        if shares[longest] > 0.5
        else f" {named} takes most, but no more than half of the time."
    )


def timelines(report: Report) -> list[tuple[str, list[Plot]]]:
    """Return the plots of each policy's timelines, policies that have none left out."""
    made = [
        (run.policy, [plot for one in run.timelines if (plot := timeline_plot(run, one))])
        for run in report.policies
    ]
    return [(policy, found) for policy, found in made if found]
