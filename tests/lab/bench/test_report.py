"""The figures of one real report are in the terminal, and on a page that needs nothing else."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner

from benchmarks.record import RECORDINGS, RESULTS, Recording, record_all, with_machine
from benchmarks.sections import SECTIONS
from benchmarks.tables import benchmarks_page, read_results
from tests.kit.report import recorded_report
from tests.kit.rows import each_row
from tsqp.cli.main import command
from tsqp.lab.bench.html import render_html
from tsqp.lab.bench.model import Span, Timeline
from tsqp.lab.bench.summary import by_operator, case_stages, sustained_ms
from tsqp.lab.bench.table import render
from tsqp.lab.bench.trace import perfetto
from tsqp.lab.bench.units import figures
from tsqp.processes import ProcessError


def test_figures_are_in_the_terminal_and_on_the_page() -> None:
    # The recorded timelines are left out of the file.
    span = Span(lane=0, operator="o_proj", layer=3, stage="tee", start_us=0, duration_us=10)
    spans = (span, span.model_copy(update={"lane": 1, "stage": "mask", "start_us": 12}))
    timelines = (Timeline(phase="decode", tokens=9, batch=1, spans=spans),)
    report = recorded_report()
    runs = [one.model_copy(update={"timelines": timelines}) for one in report.policies[:2]]
    drawn = report.model_copy(update={"policies": tuple(runs)})
    text, page = render(drawn, width=200, details=True), render_html(drawn)
    for run in drawn.policies:
        for case in run.cases:
            assert figures(case.step_ms.median) in text, (run.policy, case.tokens)
            parts = sum(total.stages.total_us for total in by_operator(case))
            assert parts == pytest.approx(case_stages(case).total_us)
            pads = run.pads is not None and case.phase in run.pads.phases
            assert (sustained_ms(run, case) > case.step_ms.median) == pads
        for shown in (text, page):
            assert run.policy in shown
    assert page.count("<img") >= 4
    outside = re.sub(r"base64,[A-Za-z0-9+/=]+", "", page)
    assert not re.search(r"://|@import|url\(|<script|<link|<iframe", outside)
    events = perfetto(drawn)["traceEvents"]
    assert sum(event["ph"] == "X" for event in events) == len(spans) * len(drawn.policies)


@each_row(
    ("arguments", "message"),
    [
        (["--trace", ""], "Invalid value for '--trace': got an empty name, expected a file"),
        (["--prefill", "0"], "whole numbers above 0"),
        (["--context", "1,,a"], "whole numbers above 0"),
        (["--decode-steps", "0"], "--decode-steps"),
        (["--transport", "vsock"], "--transport"),
    ],
)
def test_bad_values_are_refused(arguments: list[str], message: str) -> None:
    result = CliRunner().invoke(command, ["bench", "demo", *arguments])
    assert result.exit_code == 2
    assert message in result.output


@pytest.mark.parametrize("measured", [False, True])
def test_a_run_that_fails_writes_what_it_measured_and_nothing_over_a_file_otherwise(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, measured: bool
) -> None:
    error, report = ProcessError("w", got="a", expected="b"), recorded_report()

    def fails() -> None:
        raise error

    made: Any = SimpleNamespace(run=fails, measured=measured, report=lambda: report)
    monkeypatch.setattr("tsqp.lab.bench.run.Bench", lambda _settings, _say: made)
    path = tmp_path / "out.json"
    path.write_text("an old one", encoding="utf-8")
    result = CliRunner().invoke(command, ["bench", "demo", "--json", str(path)])
    assert result.exception is error
    assert (path.read_text(encoding="utf-8") == "an old one") != measured


def _writes(text: str, status: int = 0) -> tuple[str, ...]:
    code = f"import sys; open(sys.argv[2], 'w').write({text!r}); sys.exit({status})"
    return ("python", "-c", code)


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
    left = {path.stem: json.loads(path.read_text()) for path in tmp_path.iterdir()}
    assert (left.keys(), left["status"]) == ({"good", "missed", "status"}, "as it was")
    missed, good = left["missed"], left["good"]
    assert (missed["a"], missed["recorded"]["exit_status"]) == (0.333333, 1)
    assert (good["results"], good["recorded"]["exit_status"]) == ([1.5], 0)
    assert good["recorded"]["command"].startswith("python -c ")
    assert "got exit status 3, expected 0 and a result" in capsys.readouterr().err


def test_the_page_is_fresh_and_shows_every_recording() -> None:
    page = Path(__file__).parents[3] / "docs" / "benchmarks.md"
    assert page.read_text() == benchmarks_page(read_results(RESULTS)), "stale: make docs"
    shown = {name for section in SECTIONS for name in section.sources}
    assert shown == {recording.name for recording in RECORDINGS}
