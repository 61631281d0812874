"""Runs the reliability scorecard and writes docs/reliability.md.

    python -m tests.faults [--only ROW ...] [--share N] [--page]

The long run of each row is a process of its own, with all that it starts in its group. It has
failed if it does not end well, or takes three times as long as the row says. One whose times alone
are not as they have to be is run once more. results.json keeps
what was found, of a row that is not run the last result. An N-th of each row is judged alike, but
for growth of memory, and is no result; what fuzzing finds joins the corpus. The exit status is 1 if
a row fails.
"""

import argparse
import dataclasses
import json
import logging
import os
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from tests.faults.row import Found, Row, note, shown_all
from tests.faults.scorecard import PAGE, ROWS, read_results, record, render, write_results
from tsqp.end_with_parent import end_with
from tsqp.run.process import OWN_LOGGERS

_PATIENCE = 3.0
# Several torch processes share the cores.
_ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "GOMP_SPINCOUNT": "0"}


def run_apart(row: Row, share: int) -> Found:
    """Make the long run of a row, or a share of it, in a process of its own; record a whole one."""
    began, limit = time.monotonic(), _PATIENCE * max(1, row.minutes / share)
    with tempfile.NamedTemporaryFile("r") as file:
        command = [sys.executable, "-m", "tests.faults", "--share", str(share)]
        command += ["--run", row.name, file.name]
        process = subprocess.Popen(command, env=_ENVIRONMENT, start_new_session=True)
        try:
            status = process.wait(60 * limit)
            ended = f"with {status}" if status else ""
        except subprocess.TimeoutExpired:
            ended = f"by us, after {limit:g} min"
        finally:
            with suppress(ProcessLookupError):  # none is left
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        found = Found({"ended": ended}, {f"ended {ended}": False})
        if not ended:
            found = Found(**json.load(file))
    if share == 1:
        write_results(record(read_results(), row, found, time.monotonic() - began))
    return found


def run_here(row: Row, share: int, file: Path) -> None:
    """Make the long run of a row in this process, or a share of it, and write what was found."""
    end_with(os.getppid())
    # Warnings of lost services are what these rows are about.
    for name in OWN_LOGGERS:
        logging.getLogger(name).setLevel(logging.ERROR)
    found = dataclasses.asdict(row.run(max(row.short, row.long // share), True))
    file.write_text(json.dumps(found), encoding="utf-8")


def main() -> int:
    rows = {row.name: row for row in ROWS}
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--only", action="append", choices=sorted(rows), metavar="ROW")
    parser.add_argument("--share", type=int, default=1, metavar="N", help="an N-th of each row")
    parser.add_argument("--page", action="store_true", help="only write the page from the results")
    parser.add_argument("--run", nargs=2, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.share < 1:
        parser.error(f"--share: got {given.share}, expected at least 1")
    if given.run:
        run_here(rows[given.run[0]], given.share, Path(given.run[1]))
        return 0
    # As after Ctrl-C: with what runs.
    signal.signal(signal.SIGTERM, lambda number, _frame: sys.exit(128 + number))
    all_passed = True
    for row in () if given.page else ROWS:
        if not given.only or row.name in given.only:
            note(f"{row.name} ...")
            found = run_apart(row, given.share)
            failed = found.failed(timed=True)
            if failed and not found.failed(timed=False):
                # A machine that others use, too, may stand still for longer than a row allows.
                note(
                    f"{row.name}: {'; '.join(failed)} ({shown_all(found.measured)}); once more ..."
                )
                found = run_apart(row, given.share)
                failed = found.failed(timed=True)
            note(f"{row.name}: {'; '.join(failed) or 'passed'} ({shown_all(found.measured)})")
            all_passed &= not failed
    PAGE.write_text(render(read_results()), encoding="utf-8")
    return 0 if all_passed else 1


if __name__ == "__main__":
    sys.exit(main())
