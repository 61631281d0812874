"""What was found, on disk (results.json) and as a page (docs/reliability.md)."""

from __future__ import annotations

import dataclasses
import json
import subprocess
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeAlias

from benchmarks.markdown import markdown
from tests.soak.row import Measured, Row, RowResult, alone, minutes, module_of
from tsqp.lab.bench.machine import describe_machine

ROOT = Path(__file__).resolve().parents[2]
RESULTS = Path(__file__).with_name("results.json")
PAGE = ROOT / "docs" / "reliability.md"

# What is recorded, by the module of the row.
Results: TypeAlias = dict[str, dict[str, Any]]

_HEAD = """\
# Reliability

For every fault of the GPU side or of the wire: **the right token, or one typed error at most one
second after the deadline**. Never a hang, a silently wrong token, or a pad used twice; other
sessions go on. [threat-model.md](threat-model.md) says what policies promise against a service that
lies.

`make soak` runs everything and writes this page: about an hour on two otherwise idle cores. `make
soak ONLY=ROW` repeats one row; its name and time are in the first column. `make test-slow` runs a
short form of every row, in which no time is judged. Rows that measure time run alone; the others,
{minutes:.0f} minutes one after the other, two at once.
"""


def read_results(path: Path = RESULTS) -> Results:
    """Read what is recorded; nothing if there is no file."""
    if not path.exists():
        return {}
    found: Results = json.loads(path.read_text(encoding="utf-8"))
    return found


def record(results: Results, row: Row, result: RowResult) -> Results:
    """Return the results with a new one of a row."""
    about = {
        "commit": commit(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": describe_machine(),
    }
    return {**results, module_of(row): {**dataclasses.asdict(result), **about}}


def write_results(results: Results, path: Path = RESULTS) -> None:
    """Write results.json, whole or not at all."""
    part = path.with_suffix(".part")
    in_order = dict(sorted(results.items()))
    part.write_text(json.dumps(in_order, indent=1) + "\n", encoding="utf-8")
    part.replace(path)


def commit() -> str:
    """Return the short commit that is checked out, with a plus where files differ from it."""

    def git(*arguments: str) -> str:
        done = subprocess.run(
            ["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False
        )
        return done.stdout.strip() if done.returncode == 0 else ""

    # What the last soak wrote is no change of what is tested.
    written = [f":(exclude){path.relative_to(ROOT)}" for path in (RESULTS, PAGE)]
    changed = git("status", "--porcelain", "--", ".", *written)
    return (git("rev-parse", "--short", "HEAD") or "unknown") + ("+" if changed else "")


def verdict(recorded: dict[str, Any] | None) -> str:
    """Say how a row ended."""
    if recorded is None:
        return "not run"
    return "pass" if recorded["passed"] else "FAIL"


def described(measured: dict[str, Measured]) -> str:
    """Write numbers in a line."""
    return "; ".join(f"{name}: {shown(value)}" for name, value in measured.items())


def shown(value: Measured) -> str:
    """Write a number so that it can be read."""
    if isinstance(value, float):
        return f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"
    return f"{value:,}" if isinstance(value, int) else value


def render(rows: Sequence[Row], results: Results) -> str:
    """Return docs/reliability.md."""
    lines: list[list[str]] = []
    machines: dict[str, None] = {}
    for row in rows:
        recorded = results.get(module_of(row))
        found, when = "", ""
        if recorded is not None:
            found = described(recorded["measured"])
            when = (
                f"{recorded['date'][:10]}, {recorded['commit']}, {recorded['seconds'] / 60:.1f} min"
            )
            machines[_machine(recorded["machine"])] = None
        test = f"{row.TEST} ({row.FULL:,})"
        name = f"{row.NAME} (`{module_of(row)}`, {minutes(row):g} min)"
        lines.append([name, test, row.PASS, found, verdict(recorded), when])
    table = markdown(["class", "test", "pass", "measured", "verdict", "when"], lines, texts=6)
    head = _HEAD.format(minutes=sum(minutes(row) for row in rows if not alone(row)))
    parts = [head, "## Scorecard", table]
    if machines:
        parts += ["Measured on:", "\n".join(f"- {machine}" for machine in machines)]
    return "\n\n".join(part.strip("\n") for part in parts) + "\n"


def _machine(machine: dict[str, Any]) -> str:
    about = {**machine}
    first = f"{about.pop('processor')}, {about.pop('cores')} cores, {about.pop('memory_gib')} GiB"
    return ", ".join([first, *(f"{name} {version}" for name, version in about.items())])
