"""Runs the reliability scorecard and writes docs/reliability.md.

    python -m tests.faults [--only ROW ...] [--page]

The long run of each row is a process of its own, with all that it starts in its group. It has
failed if it does not end well, or takes three times as long as the row says. results.json keeps
what was found, of a row that is not run the last result. The exit status is 1 if a row fails.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from tests.faults.row import Found, Row, end_on_sigterm, run_side_by_side
from tests.faults.scorecard import (
    PAGE,
    ROOT,
    ROWS,
    read_results,
    record,
    render,
    write_results,
)
from tsqp.cli.logs import OWN_LOGGERS
from tsqp.end_with_parent import end_with

_PATIENCE = 3.0


def run_rows(rows: Sequence[Row], console: Console) -> list[tuple[Row, Found, float]]:
    """Make the long run of each, and record what was found."""
    together = [row for row in rows if not row.alone]
    turns = [[row] for row in rows if row.alone]
    turns += [together[at : at + 2] for at in range(0, len(together), 2)]
    results: list[tuple[Row, Found, float]] = []
    with tempfile.TemporaryDirectory(prefix="tsqp-soak-") as name:
        for turn in turns:
            console.print(f"{', '.join(row.name for row in turn)} ...")
            files = [Path(name) / row.name for row in turn]
            commands = [
                (sys.executable, "-m", "tests.faults", "--run", row.name, str(file))
                for row, file in zip(turn, files, strict=True)
            ]
            limits_s = [60 * _PATIENCE * row.minutes for row in turn]
            ends = run_side_by_side(commands, limits_s)
            for row, file, (ended, seconds) in zip(turn, files, ends, strict=True):
                found = Found({"ended": ended}, {f"ended {ended}": False})
                if not ended:
                    found = Found(**json.loads(file.read_text(encoding="utf-8")))
                results.append((row, found, seconds))
                write_results(record(read_results(), row, found, seconds))
    return results


def run_here(row: Row, file: Path) -> None:
    """Make the long run of a row in this process, and write what was found."""
    end_with(os.getppid())
    # Warnings of lost services are what these rows are about.
    for name in OWN_LOGGERS:
        logging.getLogger(name).setLevel(logging.ERROR)
    found = dataclasses.asdict(row.run(row.long, True))
    file.write_text(json.dumps(found), encoding="utf-8")


def main() -> int:
    rows = {row.name: row for row in ROWS}
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--only", action="append", choices=sorted(rows), metavar="ROW")
    parser.add_argument("--page", action="store_true", help="only write the page from the results")
    parser.add_argument("--run", nargs=2, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.run:
        run_here(rows[given.run[0]], Path(given.run[1]))
        return 0
    end_on_sigterm()
    console, results = Console(), []
    if not given.page:
        chosen = [row for row in ROWS if not given.only or row.name in given.only]
        results = run_rows(chosen, console)
        for row, found, seconds in results:
            failed = "; ".join(found.failed(timed=True))
            console.print(f"{row.name}, {seconds / 60:.1f} min: {failed or 'passed'}")
    PAGE.write_text(render(ROWS, read_results()), encoding="utf-8")
    console.print(f"wrote {PAGE.relative_to(ROOT)}")
    return 1 if any(found.failed(timed=True) for _, found, _ in results) else 0


if __name__ == "__main__":
    sys.exit(main())
