"""`tsqp bench` on the command line: what is refused at once, and what is written at the end."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from tests.kit.report import recorded_report
from tsqp.cli.main import command
from tsqp.lab.bench.model import Report
from tsqp.lab.bench.settings import BenchSettings
from tsqp.processes import ProcessError

REPORT = recorded_report()


class _Bench:
    """A `Bench` that measures nothing, and says what a test wants."""

    given: list[BenchSettings]
    result: Report
    error: BaseException | None

    def __init__(self, settings: BenchSettings, say: Callable[[str], None]) -> None:
        self.given.append(settings)

    def run(self) -> None:
        if self.error is not None:
            raise self.error

    @property
    def measured(self) -> bool:
        return bool(self.result.policies)

    def report(self) -> Report:
        return self.result


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> type[_Bench]:
    kind = type("Fake", (_Bench,), {"given": [], "result": REPORT, "error": None})
    monkeypatch.setattr("tsqp.lab.bench.run.Bench", kind)
    return kind


def bench(*arguments: str, **environment: str) -> Result:
    return CliRunner().invoke(command, ["bench", *arguments], env=environment)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--trace", ""], "Invalid value for '--trace': got an empty name, expected a file"),
        (["--prefill", "0"], "whole numbers above 0"),
        (["--context", "1,,a"], "whole numbers above 0"),
        (["--decode-steps", "0"], "--decode-steps"),
        (["--transport", "vsock"], "--transport"),
    ],
)
def test_bad_values_are_refused(fake: type[_Bench], arguments: list[str], message: str) -> None:
    result = bench("demo", *arguments)
    assert result.exit_code == 2
    assert message in result.output
    assert fake.given == []


def outputs(folder: Path) -> tuple[list[str], dict[str, Path]]:
    paths = {name: folder / f"out.{name}" for name in ("json", "html", "trace")}
    return [word for name, path in paths.items() for word in (f"--{name}", str(path))], paths


def test_where_nothing_was_measured_files_stay_as_they_were(
    fake: type[_Bench], tmp_path: Path
) -> None:
    fake.error = ProcessError("w", got="a", expected="b")
    fake.result = REPORT.model_copy(update={"policies": ()})
    arguments, paths = outputs(tmp_path)
    paths["json"].write_text("an old one", encoding="utf-8")
    result = bench("demo", *arguments)
    assert result.exception is fake.error
    assert [path.name for path in tmp_path.iterdir()] == ["out.json"]
    assert paths["json"].read_text(encoding="utf-8") == "an old one"
