"""A part of the release gate passes if its command does, and no test of it was skipped."""

from __future__ import annotations

from pathlib import Path

from tests.kit.rows import each_row
from tests.release import run_part


@each_row(
    ("command", "result"),
    [
        ("echo 12 passed in 3.45s", "passed"),
        ("echo 12 passed, 1 skipped in 3.45s", "failed (1 skipped)"),
        ("false", "failed (1)"),
    ],
)
def test_a_part_passes_or_says_why_not(tmp_path: Path, command: str, result: str) -> None:
    assert run_part("part", command, tmp_path).result == result
    said = command.partition("echo ")[2]
    assert (tmp_path / "part.log").read_text() == (f"{said}\n" if said else "")
