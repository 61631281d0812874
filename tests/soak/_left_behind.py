"""No row of the scorecard: one that leaves a process, for the tests of what runs rows.

It says the number of that process, which has its stdout and stderr, on a line of stderr.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys

from tests.soak.row import RowResult, note

NAME = TEST = PASS = "left behind"
FULL, SHORT = 3, 2
ALONE = False


def run(count: int) -> RowResult:
    """Pass, at 1; hang, at 2; be killed, at 3."""
    left = subprocess.Popen(["sleep", "600"])
    note(str(left.pid))
    if count == 2:
        signal.pause()
    if count == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    sys.stdout.write("what a row prints is no result\n")
    return RowResult(NAME, TEST, PASS, count, {}, 0.0, passed=True)
