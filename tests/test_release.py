"""A part of the release gate passes if its command does, and nothing that can be had was absent."""

from pathlib import Path

from tests.kit.rows import each_row
from tests.release import run_part

REASONS = {"a processor without AVX-512": "passed", "no chromium": "failed (skipped: no chromium)"}


@each_row("reason", REASONS)
def test_a_part_with_what_was_skipped(tmp_path: Path, reason: str) -> None:
    (tmp_path / "said").write_text(
        f"SKIPPED [7] tests/test_a.py:88: {reason}\n3 passed, 7 skipped\n"
    )
    assert run_part("part", f"cat {tmp_path}/said", tmp_path).result == REASONS[reason]
    assert run_part("part", "false", tmp_path).result == "failed (1)"
