"""What a leakage report says, as tables on a terminal of 80 columns or more, by rich.

The page draws the same tables: `Grid` is text in cells. No rate is shown without its n, and none of
an attack that does not work where it must.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from tsqp.lab.leak.model import AttackRun, Curve, PolicyLeak, Rate, Report, Score
from tsqp.lab.leak.words import (
    NONE,
    count_words,
    facts,
    failure_words,
    interval_words,
    judged,
    meaningless,
    percent,
    rate_words,
    setup_pairs,
    verdict,
    warnings,
)
from tsqp.lab.report import Grid, Row, figures, size, whole
from tsqp.tables import definitions, table

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

_NAME = 24
_COST = ("ms/token", "RPCs", "bytes")
_READ = ("read", "n", "95% interval", "chance")
_NOTE = (
    "read: tokens whose first guess is right, of n that the best attack tried, with Wilson's 95%"
    " interval, which begins highest for the best. chance: what the same guesses get right in the"
    " other sessions. ms/token, RPCs, bytes: of one decoded token, by tsqp bench, without Embedding"
    " and LM head in the TEE."
)


def _place(policy: PolicyLeak, run: AttackRun, score: Score) -> str:
    return f"{score.where}, service {run.service}" if policy.apart else score.where


# ------------------------------------------------------------------------------------- grids


def summary_grid(report: Report) -> Grid:
    """Compare the policies, a row for each."""
    columns = ("policy", "verdict", "best attack", "where", *_READ, *_COST)
    rows = tuple(
        Row((one.title, verdict(one), *_best_cells(one), *_cost_cells(one)))
        for one in report.policies
    )
    return Grid("Leakage", columns, rows, texts=4, note=_NOTE)


def _best_cells(policy: PolicyLeak) -> tuple[str, ...]:
    score = judged(policy)
    if score is None or policy.best is None:
        return (NONE,) * 6
    run, _ = policy.best
    return (run.attack, _place(policy, run, score), *_read_cells(score.top1), percent(score.chance))


def _read_cells(rate: Rate) -> tuple[str, str, str]:
    """Render a rate for three columns: read, n, interval."""
    if rate.value is None:
        return (NONE,) * 3
    return percent(rate.value), f"{rate.n:,}", interval_words(rate)


def _cost_cells(policy: PolicyLeak) -> tuple[str, str, str]:
    cost = policy.cost
    if cost is None:
        return (NONE,) * 3
    crossed = cost.bytes_sent + cost.bytes_received
    return figures(cost.overhead_ms) or "0", whole(cost.rpcs) or "0", size(crossed) or "0 B"


def lengths_grid(report: Report) -> Grid | None:
    """Show of how many sessions the lengths are visible; None where nothing was attacked."""
    rows = []
    for one in report.policies:
        if one.lengths is None:
            seen = (NONE, NONE)
        else:
            prompt = one.lengths.prompt
            stays = "prefill stays"
            seen = (
                stays if prompt is None else count_words(prompt),
                count_words(one.lengths.answer),
            )
        rows.append(Row((one.title, *seen)))
    if not any(one.lengths for one in report.policies):
        return None
    note = (
        "Sessions whose number of tokens follows from what crossed. No mask hides that; nor the"
        " time of each request."
    )
    columns = ("policy", "prompt length", "answer length")
    return Grid("Lengths, visible under every mask", columns, tuple(rows), note=note)


def attacks_grid(policy: PolicyLeak) -> Grid | None:
    """Show what each attack read at each place; None where none gave a reading."""
    columns = (
        *("attack", "where", "top-1", "top-5", "n", "95% interval", "chance"),
        *("prompt", "answer", "whole prompts"),
    )
    rows: list[Row] = []
    for run in policy.runs:
        if meaningless(run):
            words = f"attack {failure_words(run)}"
            rows.append(Row((run.attack, words, *(NONE,) * 8)))
        else:
            rows += [Row((run.attack, *_cells_of(policy, run, one))) for one in run.scores]
    if not rows:
        return None
    return Grid(f"{policy.title}: every attack and place", columns, tuple(rows), texts=2)


def _cells_of(policy: PolicyLeak, run: AttackRun, score: Score) -> tuple[str, ...]:
    """Render a place; no rate where the attack does not work at that place of its control."""
    if score in run.meaningful:
        return _score_cells(policy, run, score)
    if score.gave_up:
        words = f"gave up, with {score.guessed:,} guesses for {score.top1.n:,} tokens"
        return (f"{_place(policy, run, score)}: {words}", *(NONE,) * 8)
    return (f"{_place(policy, run, score)}: did not work on its control", *(NONE,) * 8)


def _score_cells(policy: PolicyLeak, run: AttackRun, score: Score) -> tuple[str, ...]:
    return (
        _place(policy, run, score),
        NONE if score.top1.value is None else percent(score.top1.value),
        NONE if score.top5.value is None else percent(score.top5.value),
        f"{score.top1.n:,}",
        interval_words(score.top1),
        percent(score.chance),
        rate_words(score.prompt),
        rate_words(score.answer),
        count_words(score.whole),
    )


def work_grid(policy: PolicyLeak) -> Grid | None:
    """Show how each attack was checked and what it cost the attacker; None without attacks."""
    rows = []
    for run in policy.runs:
        if run.refused is not None:
            continue
        control = run.control
        rows.append(
            Row(
                (
                    f"{run.attack}, service {run.service}" if policy.apart else run.attack,
                    NONE if control is None else control.policy,
                    NONE if control is None else rate_words(control.rate),
                    NONE if control is None else percent(control.published),
                    whole(run.compared) or "0",
                    whole(run.modelled) or "0",
                    figures(run.cpu_s) or "0",
                )
            )
        )
    if not rows:
        return None
    note = (
        "control: where the attack must read the share below 'must', or its rates mean nothing."
        " compared: candidates with something observed; modelled: token positions run through the"
        " public model."
    )
    columns = ("attack", "control", "read there", "must", "compared", "modelled", "CPU s")
    title = f"{policy.title}: controls and work"
    return Grid(title, columns, tuple(rows), texts=2, note=note)


def refusals(policy: PolicyLeak) -> list[tuple[str, str]]:
    """Return why attacks found nothing to do, with those that say so."""
    reasons: dict[str, list[str]] = {}
    for run in policy.runs:
        if run.refused is not None:
            names = reasons.setdefault(run.refused, [])
            names += [] if run.attack in names else [run.attack]
    return [(reason, ", ".join(names)) for reason, names in reasons.items()]


def curve_grid(curve: Curve) -> Grid:
    """Show recovery against strength."""
    noise = () if curve.parameter == "sigma" else ("sigma",)
    rows = []
    for point in curve.points:
        if point.rate.n:
            read = (f"{point.attack}, {point.where}", *_read_cells(point.rate))
            chance = percent(point.chance)
        else:
            read, chance = ("no attack worked", *(NONE,) * 3), NONE
        rows.append(
            Row(
                (
                    f"{point.strength:.4g}",
                    *read,
                    chance,
                    *(f"{point.sigma:g}" for _ in noise),
                    f"{point.perplexity:.4g}",
                    f"{point.output_error:.2g}",
                )
            )
        )
    columns = (curve.parameter, "best attack", *_READ, *noise, "perplexity", "output error")
    note = (
        f"Perplexity without noise: {curve.plain_perplexity:.4g}. Output error: of logits, relative"
        f" (root of the mean square). Searches: {curve.search_sessions} a place, through a session"
        f" each, with the {curve.search_candidates:,} most expected candidates for a token. A curve"
        " ends where no attack reads anything."
    )
    if noise:
        note += " Attacked place by place: an attack on all places together may read more."
    title = f"{curve.policy}: recovery against {curve.parameter}"
    return Grid(title, columns, tuple(rows), texts=2, note=note)


# ------------------------------------------------------------------------------------ drawing


def show(report: Report, console: Console, *, details: bool = False) -> None:
    """Print the tables. `details`: with every attack and place, controls, work and refusals."""
    for part in parts(report, console.width, details=details):
        console.print(part)


def parts(report: Report, width: int, *, details: bool = False) -> Iterator[RenderableType]:
    """Yield what `show` prints, from the whole to its parts."""
    from rich.text import Text

    yield Text(facts(report), style="bold")
    yield from (Text(f"! {sentence}", style="yellow") for sentence in warnings(report))
    yield ""
    if not report.policies:
        yield Text("No policy was attacked.")
    else:
        grid = summary_grid(report)
        narrow = (
            grid.select("Leakage", ("policy", "verdict", *_COST), texts=2),
            _joined(grid, "Best attack of each policy", "best attack", "where"),
        )
        yield from _fitting(grid, narrow, width, least=150)
        yield from _drawn(lengths_grid(report))
    for curve in report.curves:
        grid = curve_grid(curve)
        harm = (curve.parameter, *(name for name in grid.columns[2:] if name not in _READ))
        narrow = (
            grid.select(grid.title, (curve.parameter, "best attack", *_READ), texts=2),
            grid.select(f"{curve.policy}: what it does to the output", harm),
        )
        yield from _fitting(grid, narrow, width, least=110)
    if details:
        for policy in report.policies:
            yield from _details(policy, width)
    yield Text("Setup", style="bold")
    yield definitions(setup_pairs(report))


def _details(policy: PolicyLeak, width: int) -> Iterator[RenderableType]:
    from rich.text import Text

    grid = attacks_grid(policy)
    if grid is not None:
        split = ("attack", "where", "prompt", "answer", "whole prompts")
        narrow = (
            grid.select(grid.title, grid.columns[:7], texts=2),
            grid.select(f"{policy.title}: prompts and answers", split, texts=2),
        )
        yield from _fitting(grid, narrow, width, least=150)
    grid = work_grid(policy)
    if grid is not None:
        narrow = (
            grid.select(grid.title, ("attack", "control", "read there", "must"), texts=2),
            grid.select(f"{policy.title}: work", ("attack", "compared", "modelled", "CPU s")),
        )
        yield from _fitting(grid, narrow, width, least=110)
    found = refusals(policy)
    if found:
        yield Text(f"{policy.title}: attacks that find nothing to do", style="bold")
        yield from (Text(f"  {reason}: {names}") for reason, names in found)
        yield ""


def _fitting(
    grid: Grid, narrow: Sequence[Grid], width: int, *, least: int
) -> Iterator[RenderableType]:
    """Yield one table where there is room for it, its parts where there is not."""
    if width >= least:
        yield from _drawn(grid)
        return
    for part in narrow[:-1]:
        yield from _drawn(part, note=False)
    yield from _drawn(narrow[-1])


def _joined(grid: Grid, title: str, first: str, second: str) -> Grid:
    """Join two columns of text into the first of them, and leave out what was said before."""
    places = [grid.columns.index(name) for name in ("policy", first, second, *_READ)]
    rows = []
    for row in grid.rows:
        policy, one, other, *rest = (row.cells[place] for place in places)
        rows.append(Row((policy, one if other == NONE else f"{one}, {other}", *rest)))
    return Grid(title, ("policy", first, *_READ), tuple(rows), texts=2, note=grid.note)


def _drawn(grid: Grid | None, *, note: bool = True) -> Iterator[RenderableType]:
    """Yield title, table and note, each as wide as the terminal allows."""
    from rich.text import Text

    if grid is None:
        return
    columns = [(name, place >= grid.texts) for place, name in enumerate(grid.columns)]
    made = table("", columns, [row.cells for row in grid.rows])
    made.collapse_padding = True
    # Names are cited: they stay whole, unless they would leave no room for what is said of them.
    made.columns[0].no_wrap = max((len(row.cells[0]) for row in grid.rows), default=0) <= _NAME
    yield Text(grid.title, style="bold")
    yield made
    if note and grid.note:
        yield Text(grid.note, style="dim")
        yield ""
