"""A row that hangs, dies or is interrupted takes with it whatever it has started."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys

import pytest
from rich.progress import Progress

from tests.soak import _left_behind
from tests.soak.__main__ import Groups, run_row
from tests.soak.page import ROOT
from tests.soak.row import RowResult

# What must not take time has so much of it.
_PATIENCE_S = 60.0


def is_over(pid: int) -> bool:
    """Wait until a process has ended, which may be nobody's child."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([descriptor], [], [], _PATIENCE_S)[0])
    finally:
        os.close(descriptor)


def run(count: int, limit_s: float) -> RowResult:
    progress = Progress(disable=True)
    task = progress.add_task("left behind", start=False)
    return run_row(_left_behind, count, progress, task, Groups(), limit_s)


@pytest.mark.parametrize(
    ("count", "limit_s", "measured"),
    [
        (1, _PATIENCE_S, {}),
        # Time enough for a process to start on a machine that is shared.
        (2, 12.0, {"ended": "by us, after 0.2 min"}),
        (3, _PATIENCE_S, {"ended": "with -9"}),
    ],
    ids=["passes", "hangs", "is killed"],
)
def test_row_ends_with_what_it_started(
    count: int, limit_s: float, measured: dict[str, str], capfd: pytest.CaptureFixture[str]
) -> None:
    result = run(count, limit_s)
    assert (result.measured, result.passed) == (measured, not measured)
    left, *_ = capfd.readouterr().err.splitlines()
    assert is_over(int(left))


@pytest.mark.parametrize("alone", [True, False])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_rows_end_when_the_scorecard_is_ended(number: signal.Signals, alone: bool) -> None:
    program = (
        "import sys; from tests.soak import __main__ as soak, _left_behind as row;"
        f" row.ALONE = {alone}; soak.find_rows = lambda: [row];"
        " sys.exit(soak.main(['--short']))"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program],
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stderr is not None
        left = int(process.stderr.readline())
        process.send_signal(number)
        try:
            process.wait(_PATIENCE_S)
            assert is_over(left)
        finally:
            process.kill()
    assert process.returncode == (128 + number if number == signal.SIGTERM else -number)
