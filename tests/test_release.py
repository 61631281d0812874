"""A part of the release gate passes if its command does, and nothing that can be had was absent."""

from pathlib import Path

import pytest

from tests.kit.rows import each_row
from tests.release import run_part

REASONS = {"a processor without AVX-512": "passed", "no chromium": "failed (skipped: no chromium)"}


def test_a_part_does_not_hear_which_parts_were_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ONLY", "part")
    monkeypatch.setenv("MAKEFLAGS", " -- ONLY=part")
    (tmp_path / "Makefile").write_text("part:\n\t@test -z '$(ONLY)'\n")
    assert run_part("part", f"make -f {tmp_path}/Makefile part", tmp_path).result == "passed"


@each_row("reason", REASONS)
def test_a_part_with_what_was_skipped(tmp_path: Path, reason: str) -> None:
    (tmp_path / "said").write_text(
        f"SKIPPED [7] tests/test_a.py:88: {reason}\n3 passed, 7 skipped\n"
    )
    assert run_part("part", f"cat {tmp_path}/said", tmp_path).result == REASONS[reason]
    assert run_part("part", "false", tmp_path).result == "failed (1)"
