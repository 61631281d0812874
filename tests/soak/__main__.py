"""Runs the reliability scorecard and writes docs/reliability.md.

    python -m tests.soak [--short] [--only ROW ...] [--jobs N]

Each row is a process of its own. Rows that measure time run alone; of the others, `--jobs` at once.
The full form is recorded in tests/soak/results.json, where a row that is not run keeps its last
result; short forms are only shown. The exit status is 1 if a row fails. However this ends, the
processes of its rows do too.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import FrameType

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)
from rich.table import Table

from tests.soak.page import (
    PAGE,
    RESULTS,
    ROOT,
    described,
    read_results,
    record,
    render,
    write_results,
)
from tests.soak.row import Row, RowResult, alone, find_rows, minutes, module_of
from tsqp import end_with_parent

# Several torch processes share the cores.
_ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "GOMP_SPINCOUNT": "0"}
_END_WITH_PARENT = Path(end_with_parent.__file__)
# How many times as long as it says a row may take.
_PATIENCE = 3.0


class Groups:
    """The process groups of the rows that run: whatever a row has started ends with it.

    Ctrl-C in a terminal does not reach them. From any thread.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # Their leaders, which nobody has waited for: no other process can have their numbers.
        self._leaders: set[int] = set()
        self._ended = False

    def add(self, leader: int) -> None:
        """Take a group in; if all have been ended, it ends too."""
        with self._lock:
            self._leaders.add(leader)
            if self._ended:
                os.killpg(leader, signal.SIGKILL)

    def end(self, leader: int) -> None:
        """End a group whose leader, dead or alive, nobody has waited for."""
        with self._lock:
            if leader in self._leaders:
                os.killpg(leader, signal.SIGKILL)

    def forget(self, leader: int) -> None:
        """Leave a group out from now on."""
        with self._lock:
            self._leaders.discard(leader)

    def end_all(self) -> None:
        """End all there are, and all to come."""
        with self._lock:
            self._ended = True
            for leader in self._leaders:
                os.killpg(leader, signal.SIGKILL)


def run_row(
    row: Row,
    count: int,
    progress: Progress,
    task: TaskID,
    groups: Groups,
    limit_s: float | None = None,
) -> RowResult:
    """Run a row in a process of its own; one that fails to end well, or in time, has failed.

    `limit_s`: None for some times as long as the row says.
    """
    began = time.monotonic()
    progress.start_task(task)
    # It ends when this thread does, which waits for it: however this process ends.
    command = [
        *(sys.executable, "-I", "-S", str(_END_WITH_PARENT), str(os.getpid())),
        *(sys.executable, "-m", "tests.soak.child", module_of(row), str(count)),
    ]
    last = ""
    limit_s = 60 * _PATIENCE * minutes(row) if limit_s is None else limit_s
    hung = threading.Event()
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        text=True,
        env=_ENVIRONMENT,
        cwd=ROOT,
        start_new_session=True,
    ) as process:
        groups.add(process.pid)

        def end() -> None:
            hung.set()
            groups.end(process.pid)

        timer = threading.Timer(limit_s, end)
        timer.daemon = True
        timer.start()
        try:
            for line in process.stdout or ():
                word, _, number = line.partition(" ")
                if word == "progress":
                    progress.update(task, completed=int(number))
                else:
                    last = line
            # It stays a zombie, so that the group keeps its number.
            os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        finally:
            timer.cancel()
            groups.end(process.pid)
            groups.forget(process.pid)
    seconds = time.monotonic() - began
    if process.returncode == 0 and last:
        progress.update(task, completed=count)
        return RowResult(**json.loads(last))
    how = f"by us, after {limit_s / 60:g} min" if hung.is_set() else f"with {process.returncode}"
    measured = {"ended": how}
    return RowResult(row.NAME, row.TEST, row.PASS, count, {**measured}, seconds, passed=False)


def run_rows(rows: Sequence[Row], *, short: bool, jobs: int, console: Console) -> list[RowResult]:
    """Run rows, and return their results in the same order; full forms are recorded."""
    results: dict[str, RowResult] = {}
    lock = threading.Lock()
    groups = Groups()
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console) as progress:
        counts = {module_of(row): row.SHORT if short else row.FULL for row in rows}
        tasks = {
            name: progress.add_task(name, total=count, start=False)
            for name, count in counts.items()
        }

        def one(row: Row) -> None:
            name = module_of(row)
            result = run_row(row, counts[name], progress, tasks[name], groups)
            with lock:
                results[name] = result
                if not short:
                    write_results(record(read_results(), row, result))

        # Those that measure time first, one after the other: nothing else runs then.
        for row in rows:
            if alone(row):
                one(row)
        with ThreadPoolExecutor(jobs) as pool:
            try:
                list(pool.map(one, [row for row in rows if not alone(row)]))
            except BaseException:
                # Or the threads, which are waited for, would wait for their rows.
                groups.end_all()
                raise
    return [results[module_of(row)] for row in rows]


def show(results: Sequence[RowResult], console: Console) -> None:
    """Print the scorecard."""
    table = Table(title="scorecard", show_lines=True)
    for heading in ("class", "test", "pass", "measured", "verdict", "s"):
        table.add_column(heading, justify="right" if heading == "s" else "left")
    for result in results:
        verdict = "[green]pass" if result.passed else "[bold red]FAIL"
        test = f"{result.test} ({result.count:,})"
        found = described(result.measured)
        seconds = f"{result.seconds:.0f}"
        table.add_row(result.name, test, result.passes, found, verdict, seconds)
    console.print(table)


def _end(number: int, frame: FrameType | None) -> None:
    """End as after Ctrl-C: what runs is cleaned up."""
    raise SystemExit(128 + number)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:  # as nohup has it
            signal.signal(number, _end)
    rows = {module_of(row): row for row in find_rows()}
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--short", action="store_true", help="the form that make test-more runs")
    parser.add_argument("--only", action="append", choices=sorted(rows), metavar="ROW")
    parser.add_argument("--jobs", type=int, default=2, help="rows at once (default: 2)")
    parser.add_argument("--page", action="store_true", help="only write the page from the results")
    options = parser.parse_args(arguments)
    console = Console()
    chosen = [row for name, row in rows.items() if not options.only or name in options.only]
    results: list[RowResult] = []
    if not options.page:
        results = run_rows(chosen, short=options.short, jobs=options.jobs, console=console)
        show(results, console)
    if not options.short:
        PAGE.write_text(render(list(rows.values()), read_results()), encoding="utf-8")
        console.print(f"wrote {RESULTS.relative_to(ROOT)} and {PAGE.relative_to(ROOT)}")
    return 0 if all(result.passed for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
