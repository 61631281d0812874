"""The pictures of a report: policies side by side, bars per operator, growth, and timelines.

Timelines can also be had as a trace, which opens in ui.perfetto.dev and chrome://tracing. Trace
Event Format: a process for each step, a thread for each of TEE, wire and GPU of each micro-batch,
complete events (`"ph": "X"`) with times in microseconds.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby, pairwise, product
from typing import TYPE_CHECKING, Any

from tee_side.words import LAYERLESS, PHASES, Phase
from tsqp.lab.bench.results import STAGES, Case, PolicyRun, Report, Span, Timeline
from tsqp.lab.bench.summary import (
    REST_MEANING,
    REST_NAME,
    STAGE_NAMES,
    Growth,
    by_operator,
    case_name,
    comparable,
    dominant,
    find_case,
    growth,
    in_order,
    is_generation,
    main_cases,
    name_of,
    tokens_per_step,
)
from tsqp.lab.report import (
    COLOURS,
    GREY,
    LIGHT,
    WIDTH,
    Picture,
    bars,
    drawing,
    duration,
    figures,
    legend,
    logarithmic,
    marks,
    percent,
    picture,
    size,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Of Paul Tol's muted scheme, in the order of `STAGES`.
_STAGE_COLOURS = dict(
    zip(
        STAGES,
        (
            *("#332288", "#cc6677", "#882255", "#ddcc77", "#88ccee"),  # tee to wire
            *("#aa4499", "#117733", "#999933", "#44aa99"),  # queue to unmask
        ),
        strict=True,
    )
)
# Which side is busy during a stage, in the order of the timeline's lanes.
RESOURCES: tuple[str, ...] = ("TEE", "wire", "GPU")
_BUSY: dict[str, str] = {"wire": "wire", "queue": "GPU", "gpu": "GPU"}
# Clocks are read one after another: spans that touch may overlap by this much.
_TOUCH_US = 1.0

Event = dict[str, Any]
# A span thinner than this share of a timeline is drawn together with its neighbours.
_FINEST = 1 / 1500
# What the TEE does when no operator runs, nor waits for the service.
_BETWEEN = "between operators"
# Width of a letter of an operator's name, as a share of the plot's.
_LETTER = 0.0072


def plots(report: Report) -> list[Picture]:
    """Return all plots of a report but its timelines, in the order in which a person reads them."""
    made = [_side_by_side(report), *(_stage_bars(report, phase) for phase in PHASES)]
    return [plot for plot in (*made, _growth(report)) if plot is not None]


def _stage_legend(used: set[str]) -> list[tuple[str, str]]:
    return [(STAGE_NAMES[name], _STAGE_COLOURS[name]) for name in STAGES if name in used]


def _stage_bars(report: Report, phase: Phase) -> Picture | None:
    """Draw each operator's time by stage, a panel for each policy; None without such a case."""
    pairs = [(run, case) for run, case in main_cases(report, phase) if case.operators]
    if not pairs:
        return None
    costs = [total for _, case in pairs for total in by_operator(case)]
    names = in_order(total.operator for total in costs if total.stages.total_us > 0)
    used = {stage for stage in STAGES if any(getattr(total.stages, stage) for total in costs)}
    limit = _limit([case for _, case in pairs])
    columns = min(3, len(pairs))
    lines = -(-len(pairs) // columns)
    with drawing(lines * (0.235 * (len(names) + 1) + 0.75) + 0.55) as figure:
        axes = figure.subplots(lines, columns, sharey=True, squeeze=False)
        for axis in axes.flat[len(pairs) :]:
            axis.set_visible(False)
        for axis, (run, case) in zip(axes.flat, pairs, strict=False):
            totals = {total.operator: total.stages for total in by_operator(case)}
            parts = [
                *(
                    (colour, [*(getattr(totals.get(n), stage, 0.0) / 1e3 for n in names), 0.0])
                    for stage, colour in _STAGE_COLOURS.items()
                ),
                (LIGHT, [0.0] * len(names) + [max(case.rest_us, 0.0) / 1e3]),
            ]
            bars(axis, [*names, REST_NAME], parts, figures, limit, none="")
            axis.set_title(f"{run.policy}: {duration(case.step_ms.median * 1e3)}")
        legend(figure, [*_stage_legend(used), (REST_NAME, LIGHT)])
        figure.supxlabel("ms a step, all layers together", fontsize=9.5, color="#333333")
        about = [
            *(dominant(run, case) for run, case in pairs),
            f"{REST_NAME.capitalize()}: {REST_MEANING}. Embedding and LM head in the TEE are cut"
            " off where they would dwarf the rest.",
        ]
        return picture(figure, f"Where the time goes: {name_of(pairs[0][1])}", "\n".join(about))


def _limit(cases: Sequence[Case]) -> float:
    """Return how long the longest bar is drawn, in ms.

    Embedding and LM head in the TEE may dwarf everything that a policy can change: then they are
    cut off.
    """
    shown, vocabulary = max(0.0, *(case.rest_us / 1e3 for case in cases)), 0.0
    for total in (total for case in cases for total in by_operator(case)):
        if total.place == "tee" and total.operator in LAYERLESS:
            vocabulary = max(vocabulary, total.stages.total_us / 1e3)
        else:
            shown = max(shown, total.stages.total_us / 1e3)
    return shown if vocabulary > 1.5 * shown > 0 else max(shown, vocabulary)


def _side_by_side(report: Report) -> Picture | None:
    """Draw tokens/s, time and bytes of each policy, a row for each phase; None without a case."""
    rows = [pairs for phase in PHASES if (pairs := main_cases(report, phase))]
    if not rows:
        return None
    # A plot may be shown without its page, so it says what its speeds are worth.
    worth = {"null": "upper bound", "model": "modelled"}
    kinds = {
        "overhead": COLOURS[1],
        "all in the TEE": GREY,
        "Embedding, LM head in the TEE": "#f0c9a8",
        "sent": COLOURS[2],
        "received": "#99d8c4",
    }
    with drawing(sum(0.34 * len(pairs) + 1.15 for pairs in rows)) as figure:
        heights = [len(pairs) + 2 for pairs in rows]
        axes = figure.subplots(len(rows), 3, squeeze=False, height_ratios=heights)
        for pairs, (rate, time, traffic) in zip(rows, axes, strict=True):
            names, cases = [run.policy for run, _ in pairs], [case for _, case in pairs]
            tokens = [tokens_per_step(case) for case in cases]
            lengths = (
                # Overhead, all of it where a step makes no RPC, Embedding and LM head.
                [case.overhead_ms if case.rpcs else 0.0 for case in cases],
                [0.0 if case.rpcs else case.overhead_ms for case in cases],
                [case.heavy_ms for case in cases],
                [c.bytes_sent / n for c, n in zip(cases, tokens, strict=True)],
                [c.bytes_received / n for c, n in zip(cases, tokens, strict=True)],
            )
            parts = list(zip(kinds.values(), lengths, strict=True))
            bars(rate, names, [(COLOURS[0], [case.tokens_per_s for case in cases])], figures)
            rate.set_title(f"{name_of(cases[0])}: tokens/s")
            rate.set_xlabel(worth.get(report.setup.device.partition(":")[0], ""), fontsize=8.5)
            bars(time, [""] * len(names), parts[:3], figures)
            time.set_title("ms a step")
            bars(traffic, [""] * len(names), parts[3:], size)
            traffic.set_title("bytes a token")
        legend(figure, list(kinds.items()), "lower right")
        caption = "Of each phase the step by which policies are compared."
        return picture(figure, "Policies side by side", caption)


def _growth(report: Report) -> Picture | None:
    """Draw time against prompt, context and batch on logarithmic axes; None without three sizes."""
    curves = [one for one in growth(report) if one.cost == "step"]
    kinds = (("prefill", "prompt tokens"), ("decode", "context tokens"), ("decode", "batch"))
    panels = [
        chosen
        for kind in kinds
        if (chosen := _undivided([one for one in curves if (one.phase, one.against) == kind]))
    ]
    if not panels:
        return None
    order = [run.policy for run in report.policies]
    with drawing(4.3, max(WIDTH * len(panels) / 3, 5.2)) as figure:
        axes = figure.subplots(1, len(panels), squeeze=False)
        for found, axis in zip(panels, axes[0], strict=True):
            sizes = {x for one in found for x, _ in one.points}
            for one in found:
                label, line, law = one.policy, list[tuple[float, float]](), one.law
                if law is not None:
                    label += f": n^{law.exponent:.2f}, R2 {law.r_squared:.2f}"
                    line = [
                        (x, law.factor * x**law.exponent)
                        for x in (one.points[0][0], one.points[-1][0])
                    ]
                drawn = [point for point in one.points if point[1] > 0]
                marks(axis, drawn, order.index(one.policy), label, line)
            if found[0].against == "prompt tokens":
                sizes |= _baseline_marks(axis, report)
            logarithmic(axis, sorted(sizes))
            batch = found[0].against == "batch"
            axis.set_title(f"{found[0].phase} at {found[0].scope}" if batch else found[0].phase)
            axis.set_xlabel("sequences" if batch else found[0].against)
            axis.legend(loc="upper left", bbox_to_anchor=(-0.02, -0.17), borderpad=0)
        axes[0][0].set_ylabel("ms a step, without vocabulary")
        return picture(
            figure,
            "Cost against size",
            "Without vocabulary: less Embedding and LM head in the TEE. Lines are power laws,"
            " fitted by least squares; the legend has their exponents. Exponent 1: time in"
            " proportion to the size; 0: time that does not grow.",
        )


def _undivided(found: Sequence[Growth]) -> list[Growth]:
    """Return of each policy the curve with the most points, three at least, of one micro-batch."""
    chosen = [one for one in found if "micro" not in one.scope and len(one.points) > 2]
    by_policy = groupby(chosen, key=lambda one: one.policy)
    return [max(curves, key=lambda one: len(one.points)) for _, curves in by_policy]


def _baseline_marks(axis: Axes, report: Report) -> set[float]:
    """Draw the baselines that did what some policy did; return their numbers of tokens."""
    found: dict[str, list[tuple[float, float]]] = {}
    for one in report.baselines:
        cases = [find_case(run, "prefill", (one.tokens, 1, 1)) for run in report.policies]
        same = one.phase == "prefill" and not is_generation(one) and one.step_ms.median > 0
        if same and any(comparable(report, [case], one) for case in cases if case is not None):
            # What was timed against a service has its vocabulary there.
            label = f"{one.name} (baseline{'' if one.against == 'null' else ', whole step'})"
            found.setdefault(label, []).append((float(one.tokens), one.step_ms.median))
    for number, (label, points) in enumerate(found.items()):
        marks(axis, points, 7 + number, label, sorted(points), colour=GREY)
    return {x for points in found.values() for x, _ in points}


# ---------------------------------------------------------------------------------- timelines


def resource(span: Span) -> str:
    """Return the side that is busy during a span: TEE, wire or GPU."""
    return _BUSY.get(span.stage, "TEE")


def times_of(spans: Iterable[Span]) -> list[tuple[float, float]]:
    """Return start and end of each span."""
    return [(span.start_us, span.end_us) for span in spans]


def length_us(timeline: Timeline) -> float:
    """Return how long the step took, from its start to the end of the last span."""
    return max((stop for _, stop in times_of(timeline.spans)), default=0.0)


def merged(times: Iterable[tuple[float, float]], gap_us: float = 0.0) -> list[tuple[float, float]]:
    """Return starts and ends by start; those that are no further apart than this become one.

    In microseconds from the step's start.
    """
    made: list[tuple[float, float]] = []
    for begin, stop in sorted(times):
        if made and begin - made[-1][1] <= gap_us:
            made[-1] = (made[-1][0], max(stop, made[-1][1]))
        else:
            made.append((begin, stop))
    return made


def between_us(timeline: Timeline, lane: int) -> list[tuple[float, float]]:
    """Return starts and ends of what is between the operators of a lane, up to its last span.

    Nothing of the lane runs then, nor another lane's operator in the TEE. The first lane's begins
    with the step.
    """
    own = times_of(span for span in timeline.spans if span.lane == lane)
    others = [s for s in timeline.spans if s.lane != lane and resource(s) == "TEE"]
    first = 0.0 if lane == lanes(timeline)[0] else min(start for start, _ in own)
    last = max(stop for _, stop in own)
    ran = merged([(first, first), *own, *times_of(others)])
    gaps = [(stop, start) for (_, stop), (start, _) in pairwise(ran)]
    return [gap for gap in gaps if first <= gap[0] and gap[1] < last]


def lanes(timeline: Timeline) -> list[int]:
    """Return the numbers of the micro-batches."""
    return sorted({span.lane for span in timeline.spans})


def timelines(report: Report) -> list[tuple[str, list[Picture]]]:
    """Return the pictures of each policy's timelines, policies that have none left out."""
    return [
        (run.policy, [_timeline(run, one) for one in run.timelines if length_us(one) > 0])
        for run in report.policies
        if any(length_us(one) > 0 for one in run.timelines)
    ]


def _timeline(run: PolicyRun, timeline: Timeline) -> Picture:
    """Draw when each side is busy in one step, and two layers enlarged."""
    panels = [("the whole step", 0.0, length_us(timeline)), *_middle(timeline)]
    height = 0.26 * len(RESOURCES) * len(lanes(timeline)) + 0.85
    with drawing(len(panels) * height + 0.3) as figure:
        axes = figure.subplots(len(panels), 1, squeeze=False)[:, 0]
        for axis, (title, begin, end) in zip(axes, panels, strict=True):
            _lanes_panel(axis, timeline, (begin, end))
            axis.set_title(title, pad=16 if axis is not axes[0] else None)
        for axis, (_, begin, end) in zip(axes[1:], panels[1:], strict=True):
            _name_operators(axis, timeline, (begin, end))
            axes[0].axvspan(begin / 1e3, end / 1e3, color="#000000", alpha=0.07, linewidth=0)
        axes[-1].set_xlabel("ms from the step's start")
        used = {f"{span.stage}_us" for span in timeline.spans}
        legend(figure, [*_stage_legend(used), (_BETWEEN, LIGHT)])
        name = case_name(timeline.phase, timeline.tokens, timeline.batch)
        busy = {
            side: times_of(span for span in timeline.spans if resource(span) == side)
            for side in RESOURCES
        } | {
            # What no lane's operator did: two lanes may lack one at the same time.
            _BETWEEN: [gap for lane in lanes(timeline) for gap in between_us(timeline, lane)]
        }
        length = length_us(timeline)
        shares = {
            side: sum(stop - start for start, stop in merged(times)) / length
            for side, times in busy.items()
        }
        words = ", ".join(f"{side} {percent(share)}" for side, share in shares.items() if share)
        caption = f"Of {duration(length)}: {words}. What takes most is what to shorten first."
        return picture(figure, f"One step: {run.policy}, {name}", caption)


def _middle(timeline: Timeline) -> list[tuple[str, float, float]]:
    """Return two layers in the middle of the first lane, and when they start and end; or none."""
    own = [span for span in timeline.spans if span.lane == lanes(timeline)[0]]
    layers = sorted({span.layer for span in own if span.layer is not None})
    if len(layers) < 4:
        return []
    middle = layers[len(layers) // 2 - 1 : len(layers) // 2 + 1]
    times = times_of(span for span in own if span.layer in middle)
    begin, end = min(start for start, _ in times), max(stop for _, stop in times)
    return [(f"layers {middle[0]} and {middle[1]}", begin, end)] if end > begin else []


def _lanes_panel(axis: Axes, timeline: Timeline, window: tuple[float, float]) -> None:
    begin, end = window
    lines = [(busy, lane) for busy in RESOURCES for lane in lanes(timeline)]
    several = len(lanes(timeline)) > 1
    for place, (busy, lane) in enumerate(lines):
        own = [s for s in timeline.spans if s.lane == lane and resource(s) == busy]
        # First, so that what is an operator's lies above it.
        drawn = {LIGHT: between_us(timeline, lane) if busy == "TEE" else []} | {
            colour: times_of(span for span in own if f"{span.stage}_us" == stage)
            for stage, colour in _STAGE_COLOURS.items()
        }
        for colour, times in drawn.items():
            seen = [(start, stop) for start, stop in times if start < end and stop > begin]
            # Pieces nearer than can be seen become one.
            pieces = merged(seen, (end - begin) * _FINEST / 2)
            pieces = [(start / 1e3, (stop - start) / 1e3) for start, stop in pieces]
            if pieces:
                axis.broken_barh(pieces, (place - 0.38, 0.76), facecolors=colour, edgecolor="none")
        if several and place and busy != lines[place - 1][0]:
            axis.axhline(place - 0.5, color="#bbbbbb", linewidth=0.8)
    names = [f"{busy} {lane}" if several else busy for busy, lane in lines]
    axis.set_yticks(range(len(lines)), names)
    axis.set_ylim(len(lines) - 0.4, -0.6)
    axis.set_xlim(begin / 1e3, end / 1e3)
    axis.tick_params(axis="y", length=0)
    axis.grid(axis="x")


def _name_operators(axis: Axes, timeline: Timeline, window: tuple[float, float]) -> None:
    """Write the operators of the first lane above it, where there is room."""
    begin, end = window
    first = lanes(timeline)[0]
    found = [s for s in timeline.spans if s.lane == first and begin <= s.start_us < end]
    found.sort(key=lambda span: span.start_us)
    for (_, name), group in groupby(found, key=lambda span: (span.layer, span.operator)):
        times = times_of(group)
        start, stop = times[0][0], min(end, max(stop for _, stop in times))
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


# -------------------------------------------------------------------------------------- trace


def perfetto_json(report: Report) -> str:
    """Return the trace as the text of a file; without a timeline it has no events."""
    steps = [(run.policy, one) for run in report.policies for one in run.timelines]
    setup = report.setup
    trace = {
        "traceEvents": [
            event
            for process, (policy, step) in enumerate(steps, start=1)
            for event in _process(process, policy, step)
        ],
        "displayTimeUnit": "ms",
        "otherData": {
            "model": setup.model,
            "device": setup.device,
            "transport": setup.transport,
            "measured": setup.created,
            "note": "queue and GPU are the service's own claim, laid into the round trip",
        },
    }
    return json.dumps(trace, allow_nan=False, separators=(",", ":"))


def _process(pid: int, policy: str, timeline: Timeline) -> Iterator[Event]:
    name = case_name(timeline.phase, timeline.tokens, timeline.batch)
    yield _named("process_name", pid, 0, {"name": f"{policy}, {name}"})
    yield _named("process_sort_index", pid, 0, {"sort_index": pid})
    thread, numbers = 0, lanes(timeline)
    for busy, lane in product(RESOURCES, numbers):
        spans = [s for s in timeline.spans if s.lane == lane and resource(s) == busy]
        for row, placed in enumerate(rows(spans)):
            thread += 1
            label = busy if len(numbers) == 1 else f"{busy}, micro-batch {lane}"
            label += f" ({row + 1})" if row else ""
            yield _named("thread_name", pid, thread, {"name": label})
            yield _named("thread_sort_index", pid, thread, {"sort_index": thread})
            yield from (_complete(span, pid, thread) for span in placed)


def rows(spans: Iterable[Span]) -> list[list[Span]]:
    """Lay spans into as few rows as hold them without overlap: events of a thread may not cross.

    Spans that overlap by less than a microsecond count as touching; the later one is shortened.
    """
    made: list[list[Span]] = []
    for span in sorted(spans, key=lambda s: (s.start_us, -s.duration_us)):
        for row in made:
            if span.start_us >= row[-1].end_us - _TOUCH_US and span.end_us >= row[-1].end_us:
                start_us = max(span.start_us, row[-1].end_us)
                shorter = {"start_us": start_us, "duration_us": span.end_us - start_us}
                row.append(span.model_copy(update=shorter))
                break
        else:
            made.append([span])
    return made


def _named(what: str, pid: int, tid: int, args: Event) -> Event:
    return {"name": what, "ph": "M", "pid": pid, "tid": tid, "ts": 0, "args": args}


def _complete(span: Span, pid: int, tid: int) -> Event:
    stage = span.stage
    # To whole nanoseconds, both ends alike: spans that touch must not overlap by a rounding.
    start, stop = round(span.start_us, 3), round(span.end_us, 3)
    args: Event = {"operator": span.operator, "stage": stage, "micro_batch": span.lane}
    if span.layer is not None:
        args["layer"] = span.layer
    return {
        "name": span.operator if stage == "tee" else f"{span.operator} {stage}",
        "cat": stage,
        "ph": "X",
        "ts": start,
        "dur": round(stop - start, 3),
        "pid": pid,
        "tid": tid,
        "args": args,
    }
