"""Runs one row in this process: `python -m tests.soak.child MODULE COUNT`.

Prints a line `progress N` for each repetition that is done, and last a line of JSON. Whatever else
this process or one that it starts prints goes to stderr: when it has ended, stdout has too.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import sys
from importlib import import_module

from tests.soak.row import Row, report_progress_to
from tsqp.cli.logs import OWN_LOGGERS


def main(module: str, count: int) -> None:
    """Run a row and print what it found."""
    row = import_module(f"{__package__}.{module}")
    if not isinstance(row, Row):
        raise SystemExit(f"{module}: no row of the scorecard")
    # Warnings of lost services are what these rows are about.
    for name in OWN_LOGGERS:
        logging.getLogger(name).setLevel(logging.ERROR)
    # A copy that no child inherits.
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    report_progress_to(lambda done: print(f"progress {done}", file=out, flush=True))
    result = row.run(count)
    print(json.dumps(dataclasses.asdict(result)), file=out, flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
