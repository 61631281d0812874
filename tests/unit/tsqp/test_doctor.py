"""`tsqp doctor MODEL`: each thing that a run lacks is named, with the command that makes it."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from tests.kit.service import Service, running_service
from tsqp.cli.main import command
from tsqp.cli.program import model_directory
from tsqp.cli.tee_runner import command as tee_runner

Found = dict[str, dict[str, str]]
pytestmark = pytest.mark.usefixtures("patient_streams")


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    folder = tmp_path_factory.mktemp("service")
    options = ("--arithmetic", "int8", "--threads", "1")
    with running_service(model_directory("demo"), f"unix://{folder}/s", *options) as running:
        yield running


def examined(model: Path | str, *arguments: str) -> tuple[int, Found]:
    result = CliRunner().invoke(command, ["doctor", str(model), *arguments, "--json"])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    findings = json.loads(result.stdout)["findings"]
    return result.exit_code, {one["name"]: one for one in findings if one["topic"] == "run"}


def test_a_run_that_would_start_lacks_nothing(service: Service, tmp_path: Path) -> None:
    bank = ["--bank", str(tmp_path / "bank"), "--bank-key-beside-bank"]
    status, found = examined("demo", "--gpu", service.endpoint, *bank)
    assert (status, found["bank"]["state"]) == (1, "missing")
    assert "tee-runner pads make" in found["bank"]["remedy"]
    made = CliRunner().invoke(tee_runner, ["pads", "make", "demo", "--tokens", "2", *bank])
    assert made.exit_code == 0, made.output
    status, found = examined("demo", "--gpu", service.endpoint, *bank)
    assert status == 0, found
    states = {name: one["state"] for name, one in found.items() if name != "clock"}
    expected = {"model", "policy", "linear weights", "tokenizer", "calibration", "bank", "entropy"}
    assert states == dict.fromkeys([*expected, f"service {service.endpoint}"], "ok")
    assert found["bank"]["detail"] == "2 of 2 pads left"
    copy = tmp_path / "copy"
    shutil.copytree(model_directory("demo"), copy)
    (copy / "calibration.safetensors").unlink()
    status, found = examined(copy, "--gpu", service.endpoint)
    assert (status, found["calibration"]["remedy"]) == (1, f"tsqp calibrate {copy}")
    status, found = examined("demo", "--policy", "tee-only")  # nothing leaves
    assert status == 0
    assert not {"calibration", "bank", "keys"} & found.keys()


def test_a_generator_without_a_seed_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    def unseeded(_size: int, _flags: int) -> bytes:
        raise BlockingIOError

    monkeypatch.setattr(os, "getrandom", unseeded)
    status, found = examined("demo", "--policy", "tee-only")
    assert (status, found["entropy"]["state"]) == (1, "missing")
    status, found = examined("demo", "--policy", "none-of-ours")
    assert (status, found["policy"]["remedy"]) == (1, "tsqp policies")
