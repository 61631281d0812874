"""Fuzz for as long as you like: python -m tests.fuzz [SECONDS] [--processes N] [--only TARGET]

Adds what is new to the corpus, and to the number of executions. Prints every case that does not
pass, as a line of the corpus; the exit status is 1 if there is one.
"""

import argparse
import sys
import time

from tests.fuzz.engine import Report
from tests.fuzz.targets import TARGETS, count_executions, fuzz, merge, read_executions

_ROUND = 200_000


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("seconds", type=float, nargs="?", default=600)
    parser.add_argument("--processes", type=int, default=2)
    names = [target.name for target in TARGETS]
    parser.add_argument("--only", action="append", choices=names, default=[], metavar="TARGET")
    options = parser.parse_args()
    total, until = Report(), time.monotonic() + options.seconds
    while time.monotonic() < until:
        seed = sum(read_executions().values())
        *_, report = fuzz(_ROUND, options.processes, seed, frozenset(options.only))
        merge(total, report)
        count = count_executions(report)
        print(f"{sum(total.executions.values()):,} executions, {count:,} in all")  # noqa: T201
    print(*total.findings, sep="\n")  # noqa: T201
    return 1 if total.findings else 0


if __name__ == "__main__":
    sys.exit(main())
