"""The page of figures: it is fresh, and it hides nothing that is missing or missed."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.record import RECORDINGS, RESULTS
from benchmarks.sections import SECTIONS
from benchmarks.tables import benchmarks_page, read_results
from protocol.errors import SettingsError

PAGE = Path(__file__).parents[2] / "docs" / "benchmarks.md"


def test_the_page_is_fresh() -> None:
    page = benchmarks_page(read_results(RESULTS))
    assert PAGE.read_text(encoding="utf-8") == page, "stale: make docs"


def test_every_recording_is_shown_somewhere() -> None:
    shown = {name for section in SECTIONS for name in section.sources}
    assert shown == {recording.name for recording in RECORDINGS}


def test_a_broken_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "memory.json"
    for text, got in (("{", "no JSON"), ("[]", "list")):
        path.write_text(text, encoding="utf-8")
        with pytest.raises(SettingsError, match=rf"memory\.json: got {got}"):
            read_results(tmp_path)
