"""A report as tables on a terminal of 80 columns or more, by rich (extra `bench`)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from io import StringIO
from typing import TYPE_CHECKING

from tee_side.words import PHASES
from tsqp.cli.tables import definitions
from tsqp.lab.bench.caveats import caveats
from tsqp.lab.bench.findings import findings, missing
from tsqp.lab.bench.model import Case, PolicyRun, Report
from tsqp.lab.bench.summary import case_key, distinct, main_kind, name_of
from tsqp.lab.bench.tables import (
    CPU_COLUMNS,
    STEP_COLUMNS,
    SUSTAINED_COLUMNS,
    SUSTAINED_NOTE,
    TRAFFIC_COLUMNS,
    Grid,
    Row,
    baselines_grid,
    facts,
    growth_grid,
    layers_grid,
    leakage_summaries,
    memory_grid,
    operators_grid,
    ping_pong_grid,
    requests_grid,
    setup_pairs,
    steps_grid,
)

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.table import Table

_LEAST_WIDTH = 80
# Columns of the two halves of an operator table, neither wider than a terminal.
_COST = ("operator", "where", "calls", "RPCs", "sent", "received", "total", "share")
_NO_STAGE = ("where", "calls", "RPCs", "sent", "received", "total", "share")


def render(report: Report, *, width: int = _LEAST_WIDTH, details: bool = False) -> str:
    """Return the tables as plain text of at most `width` columns (at least 80).

    `details`: each case's operators and layers, instead of the operators of one prefill and one
    decode step of each policy.
    """
    from rich.console import Console

    output = StringIO()
    # The width of a string is the caller's matter, whatever terminal there is.
    console = Console(
        file=output,
        width=max(width, _LEAST_WIDTH),
        markup=False,
        highlight=False,
        emoji=False,
        force_terminal=False,
    )
    show(report, console, details=details)
    return "\n".join(line.rstrip() for line in output.getvalue().splitlines()) + "\n"


def show(report: Report, console: Console, *, details: bool = False) -> None:
    """Print the tables."""
    from rich.table import Table

    for part in parts(report, details=details):
        console.print(part)
        if isinstance(part, Table) and part.caption:
            console.print()


def parts(report: Report, *, details: bool = False) -> Iterator[RenderableType]:
    """Yield what `show` prints, from the whole to its parts."""
    from rich.text import Text

    report = distinct(report)
    yield Text(facts(report), style="bold")
    yield ""
    warnings = [*caveats(report), *missing(report)]
    yield from (Text(f"! {sentence}", style="yellow") for sentence in warnings)
    yield from (Text(f"* {sentence}") for sentence in findings(report))
    yield ""
    if any(run.cases for run in report.policies):
        steps = steps_grid(report)
        yield _drawn(steps.select("Steps", STEP_COLUMNS), note=True)
        yield _drawn(steps.select("Traffic", TRAFFIC_COLUMNS))
        yield _drawn(steps.select("Processor time", CPU_COLUMNS))
        sustained = steps.select("With the making of pads", SUSTAINED_COLUMNS)
        yield _drawn(replace(sustained, note=SUSTAINED_NOTE), note=True)
    for grid in (
        requests_grid(report),
        memory_grid(report),
        growth_grid(report),
        baselines_grid(report),
        ping_pong_grid(report),
    ):
        if grid is not None:
            yield _drawn(grid, note=True)
    for run in report.policies:
        for case in _shown(report, run, details):
            if case.operators:
                yield from _split(run, case, layers=details)
    if report.policies:
        yield Text("What the GPU side learns", style="bold")
        yield definitions(leakage_summaries(report))
        yield ""
    yield Text("Setup", style="bold")
    yield definitions(setup_pairs(report))


def _shown(report: Report, run: PolicyRun, details: bool) -> list[Case]:
    if details:
        return list(run.cases)
    chosen = {phase: main_kind(report, phase) for phase in PHASES}
    return [case for case in run.cases if case_key(case) == chosen[case.phase]]


def _split(run: PolicyRun, case: Case, *, layers: bool) -> Iterator[RenderableType]:
    title = f"{run.policy}, {name_of(case)}"
    grid = operators_grid(case, title)
    yield _drawn(grid.select(f"{title}: cost per operator, ms", _COST, texts=2))
    yield _drawn(_stages(grid, f"{title}: its stages, ms"))
    if layers:
        grid = layers_grid(case, title, operators=False)
        traffic = ("layer", "calls", "RPCs", "sent", "received", "total")
        yield _drawn(grid.select(f"{title}: cost per layer, us", traffic))
        yield _drawn(_stages(grid, f"{title}: stages per layer, us"))


def _stages(grid: Grid, title: str) -> Grid:
    """Return the columns of stages, and the rows that have one of them."""
    made = grid.select(title, [name for name in grid.columns if name not in _NO_STAGE])
    return Grid(made.title, made.columns, tuple(row for row in made.rows if any(row.cells[1:])))


def _drawn(grid: Grid, *, note: bool = False) -> Table:
    import rich.box
    from rich.table import Table

    made = Table(
        title=grid.title,
        title_justify="left",
        title_style="bold",
        caption=grid.note if note and grid.note else None,
        caption_justify="left",
        caption_style="dim",
        box=rich.box.SIMPLE_HEAD,
        collapse_padding=True,
        pad_edge=False,
    )
    for place, name in enumerate(grid.columns):
        words = place < grid.texts
        made.add_column(name, justify="left" if words else "right", overflow="fold")
    grouped = any(row.kind == "group" for row in grid.rows)
    for place, row in enumerate(grid.rows):
        if row.kind == "total" or (row.kind == "group" and place):
            made.add_section()
        made.add_row(*_cells(row, grouped), style="bold" if row.kind != "plain" else None)
    return made


def _cells(row: Row, grouped: bool) -> tuple[str, ...]:
    """Indent what stands below a heading."""
    if grouped and row.kind == "plain":
        return (f"  {row.cells[0]}", *row.cells[1:])
    return row.cells
