"""The short run of every row of the scorecard, and the page that is made of the long ones."""

from __future__ import annotations

import os
import select
import sys
from pathlib import Path

import pytest

from tests.faults.row import Found, Row, run_side_by_side
from tests.faults.scorecard import PAGE, ROWS, read_results, record, render, write_results
from tests.kit.rows import each_row

# What must not take time has so much of it.
_PATIENCE_S = 60.0


@pytest.mark.parametrize("row", ROWS, ids=[row.name for row in ROWS])
def test_short_run(row: Row) -> None:
    assert not row.run(row.short, False).failed(timed=False)


def test_page_is_what_the_results_say() -> None:
    results = read_results()
    assert PAGE.read_text(encoding="utf-8") == render(ROWS, results), "tests.faults --page"
    assert set(results) == {row.name for row in ROWS}
    assert len(results) == len(ROWS)
    assert all(0 < row.short < row.long for row in ROWS)


def test_page_shows_a_failure_and_what_was_never_run(tmp_path: Path) -> None:
    path, (row, other, *_) = tmp_path / "results.json", ROWS
    late = Found({"missed": "0 of 7", "p95, s": 0.12345, "most": 12_000}, {}, {"soon": False})
    first = record({}, other, Found({}, {"right": True}), 1.0)
    write_results(record(record(first, row, Found({}, {}), 1.0), row, late, 90.0), path)
    lines = render(ROWS, read_results(path)).splitlines()
    (shown,) = (line for line in lines if line.startswith(f"| {row.title} (`{row.name}`, "))
    assert "| missed: 0 of 7; p95, s: 0.123; most: 12,000 | FAIL |" in shown
    assert sum("| pass | 2" in line for line in lines) == 1
    assert sum("| not run |" in line for line in lines) == len(ROWS) - 2


# Starts a process, says which, and hangs, dies or ends well.
_ROW = """
import os, signal, subprocess, sys
left = subprocess.Popen(["sleep", "600"])
print(left.pid, file=open(sys.argv[1], "w"), flush=True)
if sys.argv[2] == "hangs":
    signal.pause()
if sys.argv[2] == "is killed":
    os.kill(os.getpid(), signal.SIGKILL)
"""


@each_row(
    ("how", "limit_s", "ended"),
    [
        ("passes", _PATIENCE_S, ""),
        ("is killed", _PATIENCE_S, "with -9"),
        ("hangs", 3.0, "by us, after 0.05 min"),
    ],
)
def test_a_row_ends_with_what_it_started(
    tmp_path: Path, how: str, limit_s: float, ended: str
) -> None:
    command = sys.executable, "-c", _ROW, str(tmp_path / how), how
    ((said, _),) = run_side_by_side([command], [limit_s])
    assert said == ended
    left = int((tmp_path / how).read_text())
    try:
        descriptor = os.pidfd_open(left)
    except ProcessLookupError:
        return
    assert select.select([descriptor], [], [], _PATIENCE_S)[0]
    os.close(descriptor)
