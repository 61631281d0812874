"""Writes what `tsqp leak --json` found into docs/leakage.md, with its pictures.

    python -m tsqp.lab.leak.page REPORT docs/leakage.md SECTION [COSTS]

What stands between the two markers of a section is replaced. COSTS, a recorded report of `tsqp
bench`, gives the plot of cost against leakage the cost of a larger shape.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from protocol.errors import SettingsError
from tsqp.lab.bench.model import Report as BenchReport
from tsqp.lab.leak.cost import cost_in, read_recorded
from tsqp.lab.leak.model import PolicyLeak, Report
from tsqp.lab.leak.plots import cost_against_leakage, curve, harm_of
from tsqp.lab.leak.reconstruction import panels, svg
from tsqp.lab.leak.words import (
    NONE,
    count_words,
    facts,
    interval_words,
    judged,
    percent,
    rate_words,
    verdict,
)

BEGIN, END = "<!-- measured {}: begin -->", "<!-- measured {}: end -->"
# Of the other one tokens are random, and there is nothing to see.
PICTURES_OF = "demo"
# What the picture shows: a policy of each kind is enough to see what reading means.
PICTURED = ("attention-in-tee", "row-mix", "cloak", "float-noise", "shielded", "two-server")
_PICTURES = "leakage"
_COSTS = ("overhead a token", "RPCs", "bytes")
_COLUMNS = (
    "best attack",
    "where",
    "read",
    "n",
    "95 % interval",
    "chance",
    "of prompts",
    "of answers",
    "whole prompts",
    "verdict",
)


@dataclass(frozen=True)
class _Picture:
    name: str
    says: str
    made_by: str
    svg: str


def write_page(report: Report, page: Path, section: str, costs: BenchReport | None = None) -> None:
    """Replace what is measured in a section of a page, with pictures in a folder beside it.

    `costs`: of a larger shape, for the plot of cost against leakage; None: those of the report.
    Raises SettingsError for a page without the section's markers.
    """
    begin, end = BEGIN.format(section), END.format(section)
    text = page.read_text(encoding="utf-8")
    before, begun, rest = text.partition(begin)
    _, ended, after = rest.partition(end)
    if not begun or not ended:
        raise SettingsError(str(page), got="no markers", expected=f"{begin} and {end}")
    pictures = list(_pictures(report, costs)) if section == PICTURES_OF else []
    page.with_name(_PICTURES).mkdir(exist_ok=True)
    for one in pictures:
        page.with_name(_PICTURES).joinpath(one.name).write_text(one.svg + "\n", encoding="utf-8")
    measured = "\n".join([*_measured(report), *_shown(pictures)])
    page.write_text(f"{before}{begin}\n{measured}\n{end}{after}", encoding="utf-8")


def _pictures(report: Report, costs: BenchReport | None) -> Iterable[_Picture]:
    model = report.setup.model.removesuffix("_model")
    says, made_by = "Cost against leakage", f"tsqp leak {model} --cost measure --plot cost.svg"
    if costs is None:
        plot = cost_against_leakage(report)
    else:
        plot = cost_against_leakage(*at_another_shape(report, costs))
        says += f": read of {report.setup.model}, cost of {costs.setup.model}'s shape"
        made_by = "make leak"
    if plot is not None:
        yield _Picture("cost.svg", says, made_by, plot.svg)
    shown = report.model_copy(
        update={
            "policies": tuple(
                found
                for found in report.policies
                if found.policy in PICTURED and found.adversary == "service"
            )
        }
    )
    chosen = " ".join(f"--policy {found.policy}" for found in shown.policies)
    yield _Picture(
        "reconstruction.svg",
        "The first session as each policy's best attack reads it, beside what was said",
        f"tsqp leak {model} {chosen} --picture reconstruction.svg",
        svg(panels(shown)),
    )
    for made in report.curves:
        if (plot := curve(made, harm_of(made))) is not None:
            yield _Picture(
                f"curve-{made.policy}.svg",
                f"{made.policy}: recovery against {made.parameter}, beside the harm that it does",
                f"tsqp leak {model} --policy {made.policy} --curves --html curves.html",
                plot.svg,
            )


def at_another_shape(report: Report, costs: BenchReport) -> tuple[Report, str, str]:
    """Return a report with the costs of another shape, and what to write at both axes.

    Policies whose cost was not recorded are left out.
    """
    found = [
        one.model_copy(update={"cost": cost})
        for one in report.policies
        if (cost := cost_in(costs, one.policy)) is not None
    ]
    setup = costs.setup
    at_once = ", service answers at once" if setup.device == "null" else f", device {setup.device}"
    return (
        report.model_copy(update={"policies": tuple(found)}),
        f"{setup.model}{at_once}",
        report.setup.model,
    )


def _shown(pictures: Iterable[_Picture]) -> Iterable[str]:
    for one in pictures:
        yield from ("", f"{one.says} (`{one.made_by}`):")
        yield f"![{one.says}]({_PICTURES}/{one.name})"


def _measured(report: Report) -> Iterable[str]:
    setup = report.setup
    machine = ", ".join(
        f"{name.replace('_', ' ')} {value}" for name, value in setup.machine.items()
    )
    yield f"Measured with `{setup.command}`, {setup.created[:10]}: {facts(report)}."
    yield f"Machine: {machine}."
    yield ""
    costs = any(found.cost is not None for found in report.policies)
    columns = ("policy", *(_COSTS if costs else ()), *_COLUMNS)
    yield from _row(columns)
    yield from _row(("---",) * len(columns))
    for found in report.policies:
        yield from _row((f"`{found.title}`", *(_spent(found) if costs else ()), *_read(found)))
    for made in report.curves:
        yield ""
        yield f"`{made.policy}`, perplexity {made.plain_perplexity:.3g} without noise:"
        yield ""
        yield from _row(
            ("sigma", made.parameter, "read", "n", "attack", "perplexity", "error of logits")
            if made.parameter != "sigma"
            else ("sigma", "read", "n", "attack", "perplexity", "error of logits")
        )
        yield from _row(("---",) * (7 if made.parameter != "sigma" else 6))
        for point in sorted(made.points, key=lambda one: one.sigma):
            share = percent(point.rate.value) if point.rate.value is not None else NONE
            strength = () if made.parameter == "sigma" else (f"{point.strength:.4g}",)
            yield from _row(
                (
                    f"{point.sigma:g}",
                    *strength,
                    share,
                    f"{point.rate.n:,}",
                    f"{point.attack}, {point.where}",
                    f"{point.perplexity:.4g}",
                    f"{point.output_error:.3g}",
                )
            )


def _spent(found: PolicyLeak) -> tuple[str, ...]:
    cost = found.cost
    if cost is None:
        return (NONE,) * len(_COSTS)
    sent = cost.bytes_sent + cost.bytes_received
    return (f"{cost.overhead_ms:.2f} ms", f"{cost.rpcs:.0f}", f"{sent:,.0f}")


def _read(found: PolicyLeak) -> tuple[str, ...]:
    score = judged(found)
    if score is None or found.best is None:
        return (*(NONE,) * (len(_COLUMNS) - 1), verdict(found))
    run, _ = found.best
    service = f" (service {run.service})" if found.apart else ""
    return (
        run.attack,
        f"{score.where}{service}",
        percent(score.top1.value or 0.0),
        f"{score.top1.n:,}",
        interval_words(score.top1),
        percent(score.chance),
        rate_words(score.prompt),
        rate_words(score.answer),
        count_words(score.whole),
        verdict(found),
    )


def _row(cells: Iterable[str]) -> Iterable[str]:
    yield "| " + " | ".join(cells) + " |"


def main(arguments: list[str]) -> None:
    """Write the page. Raises SettingsError."""
    if len(arguments) not in (3, 4):
        raise SettingsError(
            "python -m tsqp.lab.leak.page",
            got=repr(arguments),
            expected="REPORT PAGE SECTION, and COSTS or nothing",
        )
    path, page, section = Path(arguments[0]), Path(arguments[1]), arguments[2]
    try:
        report = Report.model_validate_json(path.read_bytes())
    except ValidationError:
        raise SettingsError(
            str(path), got="something else", expected="a report of tsqp leak --json"
        ) from None
    costs = read_recorded(Path(arguments[3])) if len(arguments) == 4 else None
    write_page(report, page, section, costs)


if __name__ == "__main__":
    main(sys.argv[1:])
