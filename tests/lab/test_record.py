"""Recordings: a failure stays alone, and the page of figures is fresh and hides nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.record import RECORDINGS, RESULTS, Recording, record_all, with_machine
from benchmarks.sections import SECTIONS
from benchmarks.tables import benchmarks_page, read_results


def _writes(text: str, status: int = 0) -> tuple[str, ...]:
    code = f"import sys; open(sys.argv[2], 'w').write({text!r}); sys.exit({status})"
    return ("python", "-c", code)


def _read(folder: Path, name: str) -> Any:
    return json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))


def test_a_failure_stops_nothing_and_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "status.json").write_text('"as it was"', encoding="utf-8")
    recordings = [
        Recording("status", _writes('{"a": 1}', 3)),
        Recording("list", _writes("[1]")),
        Recording("missed", _writes('{"a": 0.3333333333}', 1), may_miss=True),
        Recording("good", _writes("[1.5]"), with_machine),
    ]
    assert record_all(recordings, tmp_path) == ["status", "list", "missed"]
    assert _read(tmp_path, "status") == "as it was"
    missed, good = _read(tmp_path, "missed"), _read(tmp_path, "good")
    assert (missed["a"], missed["recorded"]["exit_status"]) == (0.333333, 1)
    assert (good["results"], good["recorded"]["exit_status"]) == ([1.5], 0)
    assert good["recorded"]["command"].startswith("python -c ")
    assert sorted(path.stem for path in tmp_path.iterdir()) == ["good", "missed", "status"]
    assert "got exit status 3, expected 0 and a result" in capsys.readouterr().err


PAGE = Path(__file__).parents[2] / "docs" / "benchmarks.md"


def test_the_page_is_fresh() -> None:
    page = benchmarks_page(read_results(RESULTS))
    assert PAGE.read_text(encoding="utf-8") == page, "stale: make docs"


def test_every_recording_is_shown_somewhere() -> None:
    shown = {name for section in SECTIONS for name in section.sources}
    assert shown == {recording.name for recording in RECORDINGS}
