"""A run is checked before anything is made, and what it measured is reported whatever ends it."""

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner
from rich.console import Console

from benchmarks.page import benchmarks_page, read_results
from benchmarks.record import RECORDINGS, RESULTS, ResultFile, record_all, with_machine
from protocol.errors import TsqpError
from tee_side.policy.placement import load_policy
from tests.kit.model import Models
from tests.kit.report import recorded_report, some_case
from tests.kit.rows import each_row
from tsqp.cli.main import command
from tsqp.lab.bench import prepare
from tsqp.lab.bench.job import BenchSettings, Plan
from tsqp.lab.bench.plots import perfetto_json
from tsqp.lab.bench.results import Finished, Span, Timeline
from tsqp.lab.bench.run import Bench
from tsqp.lab.bench.shown import render_html, show
from tsqp.lab.bench.summary import by_operator, case_stages, sustained_ms
from tsqp.lab.report import figures
from tsqp.processes import ProcessError

PLAN = Plan(prefill=(4,), decode=((5, 1),), generation=None, repeats=1, decode_steps=3)


def settings(model: Path | None, *policies: str, **changes: Any) -> BenchSettings:
    chosen = tuple((name, load_policy(name)) for name in policies or ("attention-in-tee",))
    return replace(BenchSettings("c", chosen, model=model, baselines=False, plan=PLAN), **changes)


@pytest.mark.parametrize(
    ("policies", "changes", "message"),
    [
        ([], {"device": "model:nothing"}, "accelerator profile: got 'nothing'"),
        (["dealt"], {"endpoints": ("tcp://h:1",)}, "dealt: got tcp://h:1, expected 2"),
        (
            ["dealt"],
            {"endpoints": ("tcp://h:1", "tcp://i:1"), "dealer_in_the_clear": True},
            "--gpu: got tcp://h:1 without keys",
        ),
        (
            ["dealt"],
            {"endpoints": ("unix:///a", "unix:///b")},
            "on one machine, --dealer-in-the-clear allows that",
        ),
        (["cloak"], {}, "policy cloak: got no --key"),
        (["cloak"], {"model": None, "shape": "llama-3.2-1b"}, "policy cloak: got --shape"),
        ([], {"shape": "llama-3.2-1b"}, "MODEL and --shape: got both"),
        ([], {"model": None, "shape": "llama-9"}, "--shape: got 'llama-9'"),
        ([], {"plan": PLAN.model_copy(update={"prefill": (256,)})}, "--prefill: got 256 tokens"),
    ],
)
def test_what_cannot_work_is_refused(
    saved_model: Models, policies: list[str], changes: dict[str, Any], message: str
) -> None:
    model = saved_model().directory
    with pytest.raises(TsqpError) as refused:
        Bench(replace(settings(model, *policies), **changes), print)
    assert message in str(refused.value)


def test_an_interrupted_run_says_what_is_missing(
    saved_model: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    error = ProcessError("w", got="a", expected="b")

    def broken(_where: str, _measure: Any, *given: Any) -> Iterator[Any]:
        yield some_case(given[2])
        if given[2] == "published":
            raise error
        yield Finished(tee_peak_bytes=7, kv_bytes=8, vocabulary_bytes=9)

    # Workers that answer so, and services that are none.
    monkeypatch.setattr("tsqp.lab.bench.run.run_job", broken)
    monkeypatch.setattr(prepare, "start_service", lambda *_, **__: (2**30, "tcp://h:1"))
    names = ("attention-in-tee", "published", "row-mix")
    made = Bench(settings(saved_model().directory, *names, baselines=True), print)
    with pytest.raises(ProcessError):
        made.run()
    report = made.report()
    assert [one.policy for one in report.policies] == ["attention-in-tee", "published"]
    assert report.incomplete == (
        "w: got a, expected b; in part measured: published; not measured: row-mix, tee-only,"
        " tee-only-int8; not all baselines measured"
    )


def test_figures_are_in_the_terminal_and_on_the_page() -> None:
    # The recorded timelines are left out of the file.
    span = Span(lane=0, operator="o_proj", layer=3, stage="tee", start_us=0, duration_us=10)
    other = span.model_copy(update={"lane": 1, "stage": "mask", "start_us": 12})
    timelines = (Timeline(phase="decode", tokens=9, batch=1, spans=(span, other)),)
    runs = [one.model_copy(update={"timelines": timelines}) for one in recorded_report().policies]
    drawn = recorded_report().model_copy(update={"policies": tuple(runs[:2])})
    shown = StringIO()
    show(drawn, Console(file=shown, width=90), details=True)
    text, page = shown.getvalue(), render_html(drawn)
    for run in drawn.policies:
        for case in run.cases:
            assert figures(case.step_ms.median) in text, (run.policy, case.tokens)
            parts = sum(total.stages.total_us for total in by_operator(case))
            assert parts == pytest.approx(case_stages(case).total_us)
            pads = run.pads is not None and case.phase in run.pads.phases
            assert (sustained_ms(run, case) > case.step_ms.median) == pads
        assert run.policy in text
        assert run.policy in page
    assert page.count("<img") >= 4
    outside = re.sub(r"base64,[A-Za-z0-9+/=]+", "", page)
    assert not re.search(r"://|@import|url\(|<script|<link|<iframe", outside)
    marks = [event["ph"] for event in json.loads(perfetto_json(drawn))["traceEvents"]]
    assert marks.count("X") == 2 * len(drawn.policies)


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
        ResultFile("status", _writes('{"a": 1}', 3)),
        ResultFile("list", _writes("[1]")),
        ResultFile("missed", _writes('{"a": 0.3333333333}', 1)),
        ResultFile("good", _writes("[1.5]"), with_machine),
    ]
    assert record_all(recordings, tmp_path) == ["status", "list", "missed"]
    left = {path.stem: json.loads(path.read_text()) for path in tmp_path.iterdir()}
    assert (left.keys(), left["status"]) == ({"good", "missed", "status"}, "as it was")
    missed, good = left["missed"], left["good"]
    assert (missed["a"], missed["recorded"]["exit_status"]) == (0.333333, 1)
    assert (good["results"], good["recorded"]["exit_status"]) == ([1.5], 0)
    assert good["recorded"]["command"].startswith("python -c ")
    assert (
        "got exit status 3, expected 0, or 1 for a missed target, and a result"
        in capsys.readouterr().err
    )


def test_the_page_is_fresh_and_shows_every_recording() -> None:
    # Stale: make docs.
    assert (RESULTS.parents[1] / "docs/benchmarks.md").read_text() == benchmarks_page(
        read_results(RESULTS)
    )
    missing = re.findall(r"ONLY=([a-z_]+)`", benchmarks_page({}))
    assert set(missing) == {recording.name for recording in RECORDINGS}


def test_the_page_says_what_an_accelerator_gave_and_what_it_did_not_get_to() -> None:
    report = recorded_report().model_dump(mode="json") | {"incomplete": "interrupted"}
    alone = [{"tokens": 128, "step_ms": {"median": 1.0}}]
    found: dict[str, Any] = {
        "machine": {},
        "device": "X100",
        "cuda": "13",
        "kernels": "amx",
        "layers": 0,
        "tokens": {"shielded": "same", "dealt": "others"},
        "tests": {},
        "reports": {"1b token": report},
        "unmasked": {"1b": alone},
    }
    page = benchmarks_page({"accelerator": found})
    assert "X100" in page
    assert "`shielded` same, `dealt` others. Tests of the kernels: not run." in page
    assert "| 1b token (ended early) | shielded | decode at 128 | " in page
    assert "**Not reached:** tokens under dealt, as on the CPU: others; 1b token, shielded" in page
    assert "nothing was measured since" not in page
