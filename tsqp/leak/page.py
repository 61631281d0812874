"""Writes what `tsqp leak --json` found into docs/leakage.md, with its pictures.

    python -m tsqp.leak.page REPORT docs/leakage.md

The text of the page is a person's; what stands between two markers is replaced.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path

from pydantic import ValidationError

from protocol.errors import SettingsError
from tsqp.leak.model import PolicyLeak, Report
from tsqp.leak.plots import cost_against_leakage, curve, harm_of
from tsqp.leak.reconstruction import panels, svg
from tsqp.leak.table import NONE, facts, interval_words, judged, percent, verdict

BEGIN, END = "<!-- measured: begin -->", "<!-- measured: end -->"
# What the picture shows: a policy of each kind is enough to see what reading means.
PICTURED = ("attention-in-tee", "row-mix", "cloak", "float-noise", "shielded", "two-server")
_PICTURES = "leakage"
_COLUMNS = (
    "policy",
    "overhead a token",
    "RPCs",
    "bytes",
    "best attack",
    "where",
    "read",
    "n",
    "95 % interval",
    "chance",
    "whole sessions",
    "verdict",
)


def write_page(report: Report, page: Path) -> None:
    """Replace what is measured in a page, and write its pictures into the folder beside it.

    Raises SettingsError for a page without the markers.
    """
    text = page.read_text(encoding="utf-8")
    before, begun, rest = text.partition(BEGIN)
    _, ended, after = rest.partition(END)
    if not begun or not ended:
        raise SettingsError(str(page), got="no markers", expected=f"{BEGIN} and {END}")
    folder = page.with_name(_PICTURES)
    folder.mkdir(exist_ok=True)
    pictures = dict(_pictures(report))
    for name, content in pictures.items():
        (folder / name).write_text(content + "\n", encoding="utf-8")
    measured = "\n".join(_measured(report))
    page.write_text(f"{before}{BEGIN}\n{measured}\n{END}{after}", encoding="utf-8")


def _pictures(report: Report) -> Iterable[tuple[str, str]]:
    if (plot := cost_against_leakage(report)) is not None:
        yield "cost.svg", plot.svg
    for made in report.curves:
        if (plot := curve(made, harm_of(made))) is not None:
            yield f"curve-{made.policy}.svg", plot.svg
    shown = report.model_copy(
        update={"policies": tuple(found for found in report.policies if found.policy in PICTURED)}
    )
    yield "reconstruction.svg", svg(panels(shown))


def _measured(report: Report) -> Iterable[str]:
    setup = report.setup
    machine = ", ".join(
        f"{name.replace('_', ' ')} {value}" for name, value in setup.machine.items()
    )
    yield f"Measured with `{setup.command}`, {setup.created[:10]}: {facts(report)}."
    yield f"Machine: {machine}."
    yield ""
    yield from _row(_COLUMNS)
    yield from _row(("---",) * len(_COLUMNS))
    for found in report.policies:
        yield from _row(_cells(found))
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


def _cells(found: PolicyLeak) -> tuple[str, ...]:
    cost, score = found.cost, judged(found)
    spent = (NONE,) * 3
    if cost is not None:
        sent = cost.bytes_sent + cost.bytes_received
        spent = (f"{cost.overhead_ms:.2f} ms", f"{cost.rpcs:.0f}", f"{sent:,.0f}")
    if score is None or found.best is None:
        return (f"`{found.policy}`", *spent, *(NONE,) * 7, verdict(found))
    run, _ = found.best
    service = f" (service {run.service})" if found.services > 1 else ""
    return (
        f"`{found.policy}`",
        *spent,
        run.attack,
        f"{score.where}{service}",
        percent(score.top1.value or 0.0),
        f"{score.top1.n:,}",
        interval_words(score.top1),
        percent(score.chance),
        f"{score.whole.hits} of {score.whole.n}",
        verdict(found),
    )


def _row(cells: Iterable[str]) -> Iterable[str]:
    yield "| " + " | ".join(cells) + " |"


def main(arguments: list[str]) -> None:
    """Write the page. Raises SettingsError."""
    if len(arguments) != 2:
        raise SettingsError(
            "python -m tsqp.leak.page", got=repr(arguments), expected="a report and a page"
        )
    path, page = map(Path, arguments)
    try:
        report = Report.model_validate_json(path.read_bytes())
    except ValidationError:
        raise SettingsError(
            str(path), got="something else", expected="a report of tsqp leak --json"
        ) from None
    write_page(report, page)


if __name__ == "__main__":
    main(sys.argv[1:])
