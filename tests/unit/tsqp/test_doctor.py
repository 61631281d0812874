"""`tsqp doctor MODEL`: each thing that a run lacks is named, with the command that makes it."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from importlib import resources
from pathlib import Path

import pytest
from click.testing import CliRunner

from protocol import native
from protocol.errors import SettingsError
from tests.kit.fake_tsm import FakeKernel
from tests.kit.model import make_model
from tests.kit.service import Service, running_service
from tsqp import doctor, preflight
from tsqp.cli.main import command
from tsqp.cli.program import model_directory
from tsqp.cli.tee_runner import command as tee_runner
from tsqp.key_files import new_key_pair

Found = dict[str, dict[str, str]]
pytestmark = pytest.mark.usefixtures("patient_streams")


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    folder = tmp_path_factory.mktemp("service")
    options = ("--arithmetic", "int8", "--threads", "1")
    with running_service(model_directory("demo"), f"unix://{folder}/s", *options) as running:
        yield running


@pytest.fixture
def model(tmp_path: Path) -> Path:
    copy = tmp_path / "model"
    shutil.copytree(model_directory("demo"), copy)
    return copy


def _doctor(model: Path | str, *arguments: str) -> tuple[int, Found]:
    """Return the exit status, and what was found of the run, by name."""
    result = CliRunner().invoke(command, ["doctor", str(model), *arguments, "--json"])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    findings = json.loads(result.stdout)["findings"]
    return result.exit_code, {one["name"]: one for one in findings if one["topic"] == "run"}


def _states(found: Found) -> dict[str, str]:
    return {name: one["state"] for name, one in found.items()}


def test_a_run_that_would_start_lacks_nothing(service: Service, tmp_path: Path) -> None:
    bank = ["--bank", str(tmp_path / "bank"), "--bank-key-beside-bank"]
    made = CliRunner().invoke(tee_runner, ["pads", "make", "demo", "--tokens", "2", *bank])
    assert made.exit_code == 0, made.output
    status, found = _doctor("demo", "--gpu", service.endpoint, *bank)
    assert status == 0, found
    expected = {"model", "policy", "linear weights", "tokenizer", "calibration", "bank", "entropy"}
    states = _states(found)
    states.pop("clock")
    assert states == dict.fromkeys([*expected, f"service {service.endpoint}"], "ok")
    assert found["bank"]["detail"] == "2 of 2 pads left"
    # The same mask and model, with one operator less under pads.
    shielded = resources.files("tee_side.policy.builtin") / "shielded.toml"
    under_pad = 'place = "gpu", mask = "pad", verify = "freivalds"'
    fewer = shielded.read_text().replace(under_pad, 'place = "tee"', 1)
    (tmp_path / "fewer.toml").write_text(fewer)
    policy = ("--policy", str(tmp_path / "fewer.toml"))
    status, found = _doctor("demo", "--gpu", service.endpoint, *bank, *policy)
    assert (status, found["bank"]["state"]) == (1, "missing")
    assert "layout" in found["bank"]["detail"]


def test_a_policy_of_which_nothing_leaves_needs_no_service() -> None:
    status, found = _doctor("demo", "--policy", "tee-only")
    assert status == 0
    assert not {"calibration", "bank", "keys"} & found.keys()
    assert not any(name.startswith("service") for name in found)


@pytest.mark.parametrize(
    ("removed", "name", "remedy"),
    [
        ("calibration.safetensors", "calibration", "tsqp calibrate {model}"),
        ("config.json", "model", "Hugging Face directory"),
        ("model.safetensors", "model", "Hugging Face directory"),
    ],
)
def test_a_file_that_is_missing_is_named_with_what_makes_it(
    service: Service, model: Path, removed: str, name: str, remedy: str
) -> None:
    (model / removed).unlink()
    status, found = _doctor(model, "--gpu", service.endpoint)
    assert status == 1
    assert found[name]["state"] == "missing"
    assert remedy.format(model=model) in found[name]["remedy"]


def test_a_model_without_a_tokenizer_takes_token_ids(service: Service, model: Path) -> None:
    (model / "tokenizer.json").unlink()
    status, found = _doctor(model, "--gpu", service.endpoint)
    assert (status, found["tokenizer"]["state"]) == (0, "note")
    (model / "tokenizer.json").write_text("{")
    status, found = _doctor(model, "--gpu", service.endpoint)
    assert (status, found["tokenizer"]["state"]) == (1, "missing")


def test_a_bank_that_is_missing_or_empty_is_named(service: Service, tmp_path: Path) -> None:
    bank = str(tmp_path / "bank")
    given = ("--gpu", service.endpoint, "--bank", bank, "--bank-key-beside-bank")
    for _ in range(2):
        status, found = _doctor("demo", *given)
        assert (status, found["bank"]["state"]) == (1, "missing")
        assert "tee-runner pads make" in found["bank"]["remedy"]
        Path(bank).write_bytes(b"no bank")
    status, found = _doctor("demo", *given, "--policy", "tee-only")
    assert (status, found["bank"]["remedy"]) == (1, "leave out --bank")


def test_a_service_that_is_not_there_or_holds_another_model_is_named(
    service: Service, tmp_path: Path
) -> None:
    nowhere = f"unix://{tmp_path}/none"
    status, found = _doctor("demo", "--gpu", nowhere, "--timeout-s", "0.2")
    assert status == 1
    demo = model_directory("demo")
    assert found[f"service {nowhere}"]["remedy"] == f"gpu-service {demo} --bind {nowhere}"
    make_model(tmp_path / "other")
    for policy, said in (
        ("shielded", "holds another model"),
        ("attention-in-tee", "has no float weights (gpu-service --arithmetic)"),
    ):
        other = ("--gpu", service.endpoint, "--policy", policy)
        status, found = _doctor(tmp_path / "other", *other)
        assert (status, found[f"service {service.endpoint}"]["detail"]) == (1, said)


def test_links_that_give_shares_away_are_named(service: Service, tmp_path: Path) -> None:
    # A folder that is a file: what is not there might come.
    (tmp_path / "file").touch()
    nowhere = f"unix://{tmp_path}/file/none"
    given = ("--policy", "two-server", "--gpu", service.endpoint, "--gpu", nowhere)
    status, found = _doctor("demo", *given)
    assert status == 1
    assert "without keys" in found["services"]["detail"]
    status, found = _doctor("demo", *given, "--shares-in-the-clear")
    assert found[f"service {service.endpoint}"]["state"] == "ok"
    assert (status, found[f"service {nowhere}"]["state"]) == (1, "missing")


def test_keys_are_read_and_missing_ones_are_said(tmp_path: Path) -> None:
    given = ("--gpu", "tcp://192.0.2.1:1", "--timeout-s", "0.05")
    _, found = _doctor("demo", *given)
    assert found["keys"]["state"] == "note"
    assert "not encrypted" in found["keys"]["detail"]
    status, found = _doctor("demo", *given, "--identity", str(tmp_path / "none.key"))
    assert (status, found["keys"]["state"]) == (1, "missing")
    assert found["keys"]["remedy"] == "tsqp keys new NAME"
    secret, public, _ = new_key_pair(tmp_path / "k")
    keys = ("--identity", str(secret), "--service-key", str(public))
    _, found = _doctor("demo", *given, *keys)
    assert found["keys"]["state"] == "ok"


def test_a_generator_that_is_not_seeded_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    def unseeded(_size: int, _flags: int) -> bytes:
        raise BlockingIOError

    monkeypatch.setattr(os, "getrandom", unseeded)
    status, found = _doctor("demo", "--policy", "tee-only")
    assert (status, found["entropy"]["state"]) == (1, "missing")


@pytest.mark.parametrize(
    ("device", "log", "state", "said"),
    [
        (False, False, "note", "is not noticed: no vmgenid device"),
        (True, False, "note", "is not noticed: no kernel log"),
        (True, True, "ok", "ends the run"),
    ],
)
def test_it_says_whether_a_resumed_snapshot_is_noticed(
    device: bool, log: bool, state: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "has_generation_id", lambda: device)
    monkeypatch.setattr(doctor, "watch", lambda: object() if log else None)
    (found,) = (one for one in doctor.examine() if one.name == "generation id")
    assert (found.topic, found.state) == ("tee", state)
    assert found.detail.endswith(said)
    assert bool(found.remedy) == (device and not log)


@pytest.mark.parametrize(("source", "state"), [("tsc", "ok"), ("hpet", "note"), (None, "note")])
def test_a_slow_clock_is_noted(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, source: str | None, state: str
) -> None:
    path = tmp_path / "source"
    if source is not None:
        path.write_text(f"{source}\n")
    monkeypatch.setattr(preflight, "_CLOCK_SOURCE", path)
    _, found = _doctor("demo", "--policy", "tee-only")
    assert found["clock"]["state"] == state


def test_an_unknown_policy_is_missing_and_not_an_error() -> None:
    status, found = _doctor("demo", "--policy", "none-of-ours")
    assert (status, found["policy"]["remedy"]) == (1, "tsqp policies")


def test_kernels_that_are_not_used_are_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    def found(choice: native.Choice) -> dict[str, tuple[str, str]]:
        monkeypatch.setattr(native, "choice", lambda: choice)
        return {one.name: (one.state, one.detail) for one in doctor.examine()}

    assert found(native.Choice("avx2", (), True))["kernels"] == ("ok", "compiled, avx2")
    assert found(native.Choice("torch", (), False))["kernels"][0] == "note"
    refused = found(native.Choice("portable", ("avx2",), True))
    assert refused["kernels"] == ("ok", "compiled, portable")
    assert "wrong results" in refused["kernels avx2"][1]


@pytest.mark.parametrize(
    ("kernel", "states"),
    [
        (FakeKernel(configfs=False), ("note", "note", "ok")),
        (FakeKernel(), ("ok", "note", "ok")),
        (FakeKernel(configfs=False, sev_guest=True), ("ok", "note", "ok")),
        (FakeKernel(provider="tdx_guest"), ("note", "ok", "ok")),
    ],
    ids=["none", "snp", "snp by ioctl", "tdx"],
)
def test_what_gives_evidence_is_listed(
    monkeypatch: pytest.MonkeyPatch, kernel: FakeKernel, states: tuple[str, ...]
) -> None:
    kernel.install(monkeypatch)
    found = {one.name: one for one in doctor.examine() if one.topic == "tee"}
    names = ("attester snp", "attester tdx", "attester simulated")
    assert tuple(found[name].state for name in names) == states
    for name in names:
        assert found[name].detail.startswith("evidence " if found[name].state == "ok" else "not ")
    assert "proves nothing" in found["attester simulated"].detail
    assert kernel.entries == {}


def test_a_table_says_what_to_do() -> None:
    result = CliRunner().invoke(command, ["doctor", "demo", "--policy", "none-of-ours"])
    assert result.exit_code == 1
    assert result.stdout.startswith("run:\n")
    assert "-> tsqp policies\n" in result.stdout


def test_options_of_a_run_need_a_model() -> None:
    result = CliRunner().invoke(command, ["doctor", "--bank", "x"])
    assert isinstance(result.exception, SettingsError)
    assert (result.exception.where, result.exception.got) == ("--bank", "no MODEL")


def test_instructions_of_the_processor_are_listed() -> None:
    result = CliRunner().invoke(command, ["doctor", "--json"])
    assert result.exit_code == 0
    names = {found["name"] for found in json.loads(result.stdout)["findings"]}
    assert {"avx2", "avx512f", "avx_vnni", "avx512_vnni", "amx_int8", "amx_bf16"} <= names
