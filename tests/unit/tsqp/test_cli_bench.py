"""`tsqp bench` on the command line: what is refused at once, and what is written at the end."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from protocol.errors import SettingsError
from tests.unit.tsqp.bench.sample_report import partial_reports, sample_report
from tsqp.cli.main import command
from tsqp.lab.bench.model import Report
from tsqp.lab.bench.settings import BenchSettings
from tsqp.processes import ProcessError

REPORT = sample_report(layers=2)


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
        (["--json", ""], "Invalid value for '--json': got an empty name"),
        (["--html", ""], "Invalid value for '--html': got an empty name"),
        (["--prefill", "0"], "whole numbers above 0"),
        (["--prefill", "1,,2"], "whole numbers above 0"),
        (["--context", "a"], "whole numbers above 0"),
        (["--decode-steps", "0"], "--decode-steps"),
        (["--transport", "vsock"], "--transport"),
    ],
)
def test_bad_values_are_refused(fake: type[_Bench], arguments: list[str], message: str) -> None:
    result = bench("demo", *arguments)
    assert result.exit_code == 2
    assert message in result.output
    assert fake.given == []


@pytest.mark.parametrize(
    "option", [("--device", "null"), ("--transport", "tcp"), ("--gpu-threads", "1")]
)
def test_what_starts_a_service_is_refused_with_given_ones(
    fake: type[_Bench], option: tuple[str, str]
) -> None:
    result = bench("demo", "--gpu", "tcp://h:1", *option)
    assert isinstance(result.exception, SettingsError)
    assert str(result.exception).startswith(f"{option[0]}: got it together with --gpu")
    assert bench("demo", "--gpu", "tcp://h:1").exit_code == 0
    assert bench("demo", *option).exit_code == 0


def test_options_reach_the_settings(fake: type[_Bench], tmp_path: Path) -> None:
    assert bench("demo").exit_code == 0
    usual = fake.given[-1]
    assert [name for name, _ in usual.policies] == ["attention-in-tee", "shielded"]
    assert (usual.plan.prefill, usual.plan.decode) == ((1, 128, 512), ((128, 1), (128, 8)))
    assert usual.plan.generation == (128, 32)
    assert (usual.default_prefill, usual.default_context) == (True, True)
    arguments = ("--prefill", "9,3,9", "--context", "4,2", "--batch", "2", "--decode-steps", "5")
    assert bench("demo", *arguments, "--policy", "tsqp", "--policy", "tsqp").exit_code == 0
    asked = fake.given[-1]
    assert [name for name, _ in asked.policies] == ["tsqp"]
    assert (asked.plan.prefill, asked.plan.decode) == ((3, 9), ((2, 2), (4, 2)))
    assert asked.plan.generation == (9, 32)
    assert asked.plan.decode_steps == 5
    assert (asked.default_prefill, asked.default_context) == (False, False)
    # A file of settings is somebody's choice as well.
    (tmp_path / "c.toml").write_text('prefill = "7"\n', encoding="utf-8")
    assert bench("demo", "--config", str(tmp_path / "c.toml")).exit_code == 0
    assert (fake.given[-1].plan.prefill, fake.given[-1].default_prefill) == ((7,), False)


def test_the_demo_model_runs_with_the_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tsqp.lab.bench.run.Bench.run", lambda _self: None)
    result = bench("demo")
    assert result.exit_code == 0, result.output
    # 512 tokens are all that it can have, and one follows a prompt.
    assert "prefill 1, 128; context 128" in result.stderr


def test_help_names_shapes_and_profiles() -> None:
    text = " ".join(bench("--help").output.split())
    for name in ("llama-3.2-1b", "mistral-7b", "h100", "rtx-4090"):
        assert name in text
    assert "Timed for each context and batch" in text
    assert "longer prompts are prefilled in chunks" in text


# ----------------------------------------------------------------------------------- the files


def outputs(folder: Path) -> tuple[list[str], dict[str, Path]]:
    paths = {name: folder / f"out.{name}" for name in ("json", "html", "trace")}
    return [word for name, path in paths.items() for word in (f"--{name}", str(path))], paths


def test_every_file_is_written(fake: type[_Bench], tmp_path: Path) -> None:
    arguments, paths = outputs(tmp_path)
    result = bench("demo", *arguments)
    assert result.exit_code == 0, result.output
    assert Report.model_validate_json(paths["json"].read_text(encoding="utf-8")) == REPORT
    assert paths["html"].read_text(encoding="utf-8").lower().startswith("<!doctype html")
    assert "traceEvents" in paths["trace"].read_text(encoding="utf-8")
    assert "attention-in-tee" in result.stdout


def test_an_interrupted_run_writes_what_it_has(fake: type[_Bench], tmp_path: Path) -> None:
    fake.error = KeyboardInterrupt()
    fake.result = partial_reports()["interrupted"]
    arguments, paths = outputs(tmp_path)
    assert bench("demo", *arguments).exit_code == 1
    found = Report.model_validate_json(paths["json"].read_text(encoding="utf-8"))
    assert found.incomplete == "interrupted by SIGINT"
    assert paths["html"].stat().st_size > 0


def test_where_nothing_was_measured_files_stay_as_they_were(
    fake: type[_Bench], tmp_path: Path
) -> None:
    fake.error = ProcessError("w", got="a", expected="b")
    fake.result = partial_reports()["nothing"]
    arguments, paths = outputs(tmp_path)
    paths["json"].write_text("an old one", encoding="utf-8")
    result = bench("demo", *arguments)
    assert result.exception is fake.error
    assert [path.name for path in tmp_path.iterdir()] == ["out.json"]
    assert paths["json"].read_text(encoding="utf-8") == "an old one"


def test_a_file_that_fails_takes_no_other_with_it(
    fake: type[_Bench], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments, paths = outputs(tmp_path)
    write = Path.write_text

    def full(self: Path, text: str, **settings: Any) -> int:
        if self == paths["json"]:
            raise OSError(28, "No space left on device")
        return write(self, text, **settings)

    monkeypatch.setattr(Path, "write_text", full)
    result = bench("demo", *arguments)
    assert result.exit_code == 1
    assert f"{paths['json']}: got No space left on device" in result.stderr
    assert "attention-in-tee" in result.stdout
    assert paths["html"].stat().st_size > 0
    assert paths["trace"].stat().st_size > 0


def test_a_file_that_cannot_be_written_is_refused_before(
    fake: type[_Bench], tmp_path: Path
) -> None:
    arguments, paths = outputs(tmp_path)
    result = bench("demo", *arguments[:2], "--html", str(tmp_path / "no" / "x"))
    assert isinstance(result.exception, SettingsError)
    assert fake.given == []
    assert not paths["json"].exists()


def test_a_refused_run_leaves_no_file(tmp_path: Path) -> None:
    arguments, _ = outputs(tmp_path)
    result = bench("demo", "--prefill", "512", *arguments)
    assert isinstance(result.exception, SettingsError)
    assert result.exception.where == "--prefill"
    assert list(tmp_path.iterdir()) == []


def test_one_file_for_two_outputs_is_refused(
    fake: type[_Bench], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = bench("demo", "--json", "x", "--trace", str(tmp_path / "x"))
    assert isinstance(result.exception, SettingsError)
    assert "x twice" in str(result.exception)
    assert list(tmp_path.iterdir()) == []
    assert bench("demo", "--json", "/dev/null", "--trace", "/dev/null").exit_code == 0
