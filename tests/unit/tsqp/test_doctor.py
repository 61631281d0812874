"""`tsqp doctor MODEL`: each thing that a run lacks is named, with the command that makes it."""

import json
import os
from pathlib import Path

import pytest
from click.testing import CliRunner

from tests.kit.service import running_service
from tsqp.cli.main import command
from tsqp.cli.tee_runner import command as tee_runner
from tsqp.run.settings import model_directory

Found = dict[str, dict[str, str]]
pytestmark = pytest.mark.usefixtures("patient_streams")


def examined(model: Path | str, *arguments: str) -> tuple[int, Found]:
    result = CliRunner().invoke(command, ["doctor", str(model), *arguments, "--json"])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    findings = json.loads(result.stdout)["findings"]
    return result.exit_code, {one["name"]: one for one in findings if one["topic"] == "run"}


def test_a_run_that_would_start_lacks_nothing(tmp_path: Path) -> None:
    bank = ["--bank", str(tmp_path / "bank"), "--bank-key-beside-bank"]
    demo = model_directory("demo")
    made = CliRunner().invoke(tee_runner, ["pads", "make", str(demo), "--tokens", "2", *bank])
    assert made.exit_code == 0, made.output
    options = ("--arithmetic", "int8", "--threads", "1")
    with running_service(demo, f"unix://{tmp_path}/s", *options) as service:
        status, found = examined(demo, "--gpu", service.endpoint, *bank)
        assert status == 0, found
        states = {name: one["state"] for name, one in found.items() if name != "clock"}
        files = ("model", "policy", "linear weights", "tokenizer", "bank")
        assert states == dict.fromkeys([*files, "entropy", f"service {service.endpoint}"], "ok")
        assert found["bank"]["detail"] == "2 of 2 pads left"
        (tmp_path / "bank").unlink()
        status, found = examined(demo, "--gpu", service.endpoint, *bank)
    assert (status, found["bank"]["state"]) == (1, "missing")
    assert "tee-runner pads make" in found["bank"]["remedy"]
    status, found = examined("demo", "--policy", "tee-only")  # nothing leaves
    assert status == 0
    assert not {"bank", "keys"} & found.keys()


def test_a_bank_of_the_runs_own_dealers_is_found_and_one_of_others_is_not(tmp_path: Path) -> None:
    bank = ["--bank", str(tmp_path / "bank"), "--bank-key-beside-bank"]
    demo, options = model_directory("demo"), ("--arithmetic", "int8", "--threads", "1")
    with running_service(demo, f"unix://{tmp_path}/s", *options) as service:
        dealer = ["--policy", "dealt", "--dealer", service.endpoint, "--dealer-in-the-clear"]
        made = CliRunner().invoke(
            tee_runner, ["pads", "make", str(demo), "--tokens", "2", *bank, *dealer]
        )
        assert made.exit_code == 0, made.output
        _, found = examined(demo, "--gpu", f"unix://{tmp_path}/gpu", *bank, *dealer)
        assert found["bank"]["state"] == "ok", found["bank"]
        dealer[3] = f"unix://{tmp_path}/other"
        _, found = examined(demo, "--gpu", f"unix://{tmp_path}/gpu", *bank, *dealer)
    assert (found["bank"]["state"], "dealers: got" in found["bank"]["detail"]) == ("missing", True)


def test_a_generator_without_a_seed_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    def unseeded(_size: int, _flags: int) -> bytes:
        raise BlockingIOError

    monkeypatch.setattr(os, "getrandom", unseeded)
    status, found = examined("demo", "--policy", "tee-only")
    assert (status, found["entropy"]["state"]) == (1, "missing")
    status, found = examined("demo", "--policy", "none-of-ours")
    assert (status, found["policy"]["remedy"]) == (1, "tsqp policies")
