"""`tsqp bench` on the command line: what is refused at once, and what is written at the end."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner, Result

from tests.kit.report import recorded_report
from tests.kit.rows import each_row
from tsqp.cli.main import command
from tsqp.processes import ProcessError


def bench(*arguments: str) -> Result:
    return CliRunner().invoke(command, ["bench", "demo", *arguments])


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
    result = bench(*arguments)
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
    result = bench("--json", str(path))
    assert result.exception is error
    assert (path.read_text(encoding="utf-8") == "an old one") != measured
