"""The measured part of docs/leakage.md: what `tsqp leak --json` found, with its pictures.

    python -m benchmarks.leakage_page REPORT docs/leakage.md SECTION [COSTS]

That writes it between the two markers of a section. COSTS, a recorded report of `tsqp bench`, gives
the plot of cost against leakage the cost of a larger shape.
"""

import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from protocol.errors import SettingsError
from tsqp.lab.bench.results import Report as BenchReport
from tsqp.lab.leak.grids import curve_grid, facts, summary_grid
from tsqp.lab.leak.laboratory import cost_in, read_recorded
from tsqp.lab.leak.model import LeakReport
from tsqp.lab.leak.page import cost_against_leakage, curve, panels, svg
from tsqp.lab.report import Grid

# Of the other section tokens are random, and there is nothing to see.
PICTURES_OF = "demo"
# What the picture shows: a policy of each kind is enough to see what reading means.
PICTURED = ("attention-in-tee", "row-mix", "cloak", "float-noise", "shielded", "dealt")
_PICTURES = "leakage"


def _pictures(report: LeakReport, costs: BenchReport | None) -> Iterator[tuple[str, str, str, str]]:
    """Yield each picture's file name, what it shows, what makes it, and the SVG.

    `costs`: of a larger shape, for the plot of cost against leakage; None: those of the report.
    """
    model = report.setup.model.removesuffix("_model")
    says, made_by = "Cost against leakage", f"tsqp leak {model} --cost measure --plot cost.svg"
    if costs is None:
        plot = cost_against_leakage(report)
    else:
        # Policies whose cost was not recorded are left out.
        found = [
            one.model_copy(update={"cost": cost})
            for one in report.policies
            if (cost := cost_in(costs, one.policy)) is not None
        ]
        setup = costs.setup
        at = ", service answers at once" if setup.device == "null" else f", device {setup.device}"
        other = report.model_copy(update={"policies": tuple(found)})
        plot = cost_against_leakage(other, f" ({setup.model}{at})", f" ({report.setup.model})")
        says += f": read of {report.setup.model}, cost of {costs.setup.model}'s shape"
        made_by = "make leak"
    if plot is not None:
        yield "cost.svg", says, made_by, plot.svg
    shown = [
        one for one in report.policies if one.policy in PICTURED and one.adversary == "service"
    ]
    chosen = " ".join(f"--policy {one.policy}" for one in shown)
    yield (
        "reconstruction.svg",
        "The first session as each policy's best attack reads it, beside what was said",
        f"tsqp leak {model} {chosen} --picture reconstruction.svg",
        svg(panels(report.model_copy(update={"policies": tuple(shown)}))),
    )
    for made in report.curves:
        if (plot := curve(made)) is not None:
            yield (
                f"curve-{made.policy}.svg",
                f"{made.policy}: recovery against {made.parameter}, beside the harm that it does",
                f"tsqp leak {model} --policy {made.policy} --curves --html curves.html",
                plot.svg,
            )


def _measured(report: LeakReport) -> Iterator[str]:
    setup = report.setup
    machine = ", ".join(
        f"{name.replace('_', ' ')} {value}" for name, value in setup.machine.items()
    )
    yield f"Measured with `{setup.command}`, {setup.created[:10]}: {facts(report)}."
    yield f"Machine: {machine}."
    grid = summary_grid(report, parts=True)
    if not any(found.cost is not None for found in report.policies):
        grid = grid.select(grid.title, grid.columns[:-3], texts=grid.texts)
    rows = ((f"`{name}`", *cells) for name, *cells in (row.cells for row in grid.rows))
    yield "\n" + _markdown(grid, rows)
    for made in report.curves:
        grid = curve_grid(made)
        yield f"\n`{made.policy}`, perplexity {made.plain_perplexity:.3g} without noise:\n"
        yield _markdown(grid, (row.cells for row in grid.rows))


def _markdown(grid: Grid, rows: Iterable[Sequence[str]]) -> str:
    """Return the columns of a table with these rows in Markdown."""
    rule = ["---" if place < grid.texts else "---:" for place in range(len(grid.columns))]
    return "\n".join(
        "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
        for cells in (grid.columns, rule, *rows)
    )


def main(arguments: list[str]) -> None:
    """Replace what is measured in a section of a page, with pictures in a folder beside it.

    Raises SettingsError, also for a page without the section's markers.
    """
    SettingsError.unless(
        len(arguments) in (3, 4),
        "python -m benchmarks.leakage_page",
        repr(arguments),
        "REPORT PAGE SECTION, and COSTS or nothing",
    )
    measured, path, section = Path(arguments[0]), Path(arguments[1]), arguments[2]
    report = read_recorded(measured, LeakReport, "leak")
    costs = read_recorded(Path(arguments[3]), BenchReport, "bench") if arguments[3:] else None
    begin, end = f"<!-- measured {section}: begin -->", f"<!-- measured {section}: end -->"
    text = path.read_text(encoding="utf-8")
    before, begun, rest = text.partition(begin)
    _, ended, after = rest.partition(end)
    SettingsError.unless(
        begun and ended,
        str(path),
        "no markers",
        f"{begin} and {end}",
    )
    lines = list(_measured(report))
    path.with_name(_PICTURES).mkdir(exist_ok=True)
    for name, says, made_by, drawn in _pictures(report, costs) if section == PICTURES_OF else ():
        path.with_name(_PICTURES).joinpath(name).write_text(drawn + "\n", encoding="utf-8")
        lines += ["", f"{says} (`{made_by}`):", "", f"![{says}]({_PICTURES}/{name})"]
    path.write_text("\n".join([f"{before}{begin}", *lines, f"{end}{after}"]), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
