"""The page of figures: it is fresh, and it hides nothing that is missing or missed."""

from __future__ import annotations

from pathlib import Path

from benchmarks.record import RECORDINGS, RESULTS
from benchmarks.sections import SECTIONS
from benchmarks.tables import benchmarks_page, read_results

PAGE = Path(__file__).parents[2] / "docs" / "benchmarks.md"


def test_the_page_is_fresh() -> None:
    page = benchmarks_page(read_results(RESULTS))
    assert PAGE.read_text(encoding="utf-8") == page, "stale: make docs"


def test_every_recording_is_shown_somewhere() -> None:
    shown = {name for section in SECTIONS for name in section.sources}
    assert shown == {recording.name for recording in RECORDINGS}
