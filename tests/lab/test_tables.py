"""The page of figures: it is fresh, and it hides nothing that is missing or missed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from benchmarks.record import RECORDINGS, RESULTS
from benchmarks.sections import GAINED, SECTIONS
from benchmarks.tables import benchmarks_page, read_results
from protocol.errors import SettingsError

PAGE = Path(__file__).parents[2] / "docs" / "benchmarks.md"


def _section(page: str, title: str) -> str:
    (found,) = re.findall(
        rf"^## {re.escape(title)}\n(.*?)(?=^## |\Z)", page, re.DOTALL | re.MULTILINE
    )
    return str(found)


def test_the_page_is_fresh() -> None:
    page = benchmarks_page(read_results(RESULTS))
    assert PAGE.read_text(encoding="utf-8") == page, "stale: make docs"


def test_every_recording_is_shown_somewhere() -> None:
    shown = {name for section in SECTIONS for name in section.sources}
    assert shown == {recording.name for recording in RECORDINGS}


def test_nothing_recorded_is_said_of_every_target() -> None:
    page = benchmarks_page({})
    for section in SECTIONS:
        text = _section(page, section.title)
        assert "Not recorded yet:" in text
        assert all(f"`make bench ONLY={name}`" in text for name in section.sources)
    summary = _section(page, "Targets")
    (line,) = (line for line in summary.splitlines() if line.startswith("- "))
    assert line.startswith("- **Not recorded:** ")
    assert line.count("](#") == len((GAINED, *SECTIONS))


def test_a_broken_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "memory.json"
    for text, got in (("{", "no JSON"), ("[]", "list")):
        path.write_text(text, encoding="utf-8")
        with pytest.raises(SettingsError, match=rf"memory\.json: got {got}"):
            read_results(tmp_path)
