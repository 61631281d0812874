"""Fuzz for as long as you like: python -m tests.fuzz [EXECUTIONS] [--processes N] [--only TARGET]

Adds what is new to the corpus, and to the number of executions. Prints every case that does not
pass, as a line of the corpus; the exit status is 1 if there is one.
"""

from __future__ import annotations

import argparse
import sys

from rich.progress import Progress

from tests.fuzz.engine import Report
from tests.fuzz.targets import TARGETS, count_executions, fuzz, read_executions


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("executions", type=int, nargs="?", default=1_000_000)
    parser.add_argument("--processes", type=int, default=2)
    names = [target.name for target in TARGETS]
    parser.add_argument("--only", action="append", choices=names, metavar="TARGET")
    options = parser.parse_args()
    report, before = Report(), sum(read_executions().values())
    only = frozenset(options.only or names)
    with Progress() as progress:
        task = progress.add_task("fuzzing", total=options.executions)
        for report in fuzz(options.executions, options.processes, before, only):
            progress.update(task, completed=sum(report.executions.values()))
    total = count_executions(report)
    executions = sum(report.executions.values())
    print(  # noqa: T201
        f"{executions:,} executions in {report.seconds:.0f} s, {total:,} in all;"
        f" slowest {report.slowest_s * 1000:.0f} ms, largest {report.largest_bytes / 2**20:.1f} MiB"
    )
    for finding in report.findings:
        print(finding)  # noqa: T201
    return 1 if report.findings else 0


if __name__ == "__main__":
    sys.exit(main())
