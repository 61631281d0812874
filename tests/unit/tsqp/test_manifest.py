"""`tsqp manifest`, and what `tee-runner` takes of it."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from protocol.errors import LimitError, ManifestError, ModelError, SettingsError, TsqpError
from protocol.model.checkpoint import SINGLE_FILE
from protocol.model.manifest import Manifest
from tsqp.cli.main import command as tsqp
from tsqp.cli.manifest import load_manifest
from tsqp.cli.program import model_directory
from tsqp.cli.tee_runner import command as tee_runner

GENERATE = ("--policy", "tee-only", "--prompt", "Once", "--max-new-tokens", "2", "--json")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """The demo model in a directory of its own."""
    copy = tmp_path / "model"
    shutil.copytree(model_directory("demo"), copy)
    return copy


def _make(model: Path, *arguments: str) -> Result:
    return CliRunner().invoke(tsqp, ["manifest", str(model), *arguments])


def _made(model: Path, *arguments: str) -> str:
    """Make a manifest, inside the model without other arguments, and return its digest."""
    result = _make(model, *arguments)
    assert result.exit_code == 0, result.output
    return result.stdout.split()[-1]


def _generate(model: Path, *arguments: str) -> Result:
    return CliRunner().invoke(tee_runner, ["generate", str(model), *GENERATE, *arguments])


def _refusal(error: type[TsqpError], model: Path, *arguments: str) -> TsqpError:
    result = _generate(model, *arguments)
    assert isinstance(result.exception, error), result.output
    assert result.stdout == ""
    return result.exception


def test_it_is_written_inside_the_model_and_its_digest_is_printed(model: Path) -> None:
    result = _make(model)
    path = model / "manifest.json"
    first, second = result.stdout.splitlines()
    assert first == f"{path}: 6 files, 47 tensors"
    assert second == f"SHA-256 of it: {hashlib.sha256(path.read_bytes()).hexdigest()}"
    assert len(Manifest.load(path, second.split()[-1]).tensors) == 47


def test_a_file_is_overwritten_only_by_force(model: Path, tmp_path: Path) -> None:
    path = tmp_path / "m"
    path.write_bytes(b"precious")
    result = _make(model, "-o", str(path))
    assert isinstance(result.exception, SettingsError)
    assert path.read_bytes() == b"precious"
    _made(model, "-o", str(path), "--force")
    assert Manifest.load(path).version == 1


def test_none_is_written_into_the_installed_program(tmp_path: Path) -> None:
    result = _make(Path("demo"))
    assert isinstance(result.exception, SettingsError)
    assert result.exception.where == "--output"
    assert not (model_directory("demo") / "manifest.json").exists()
    path = tmp_path / "m"
    _made(Path("demo"), "-o", str(path))
    assert len(Manifest.load(path).tensors) == 47


def test_a_folder_that_is_not_there_is_refused_before_the_work(model: Path) -> None:
    result = _make(model, "-o", str(model / "none" / "m"))
    assert isinstance(result.exception, SettingsError)
    assert "reading" not in result.stderr


def test_none_is_made_of_a_damaged_model(model: Path) -> None:
    (model / SINGLE_FILE).write_bytes(b"")
    result = _make(model)
    assert isinstance(result.exception, ModelError)
    assert not (model / "manifest.json").exists()


def test_a_run_with_the_right_manifest_is_the_same_run(model: Path) -> None:
    digest = _made(model)
    without = _generate(model)
    given = ("--manifest", str(model / "manifest.json"), "--manifest-digest", digest)
    result = _generate(model, *given)
    assert (result.exit_code, result.stderr) == (0, "")
    found, expected = (json.loads(r.stdout)["token_ids"] for r in (result, without))
    assert found == expected


def test_a_run_says_what_a_manifest_inside_the_model_is_worth(model: Path, tmp_path: Path) -> None:
    _made(model)
    beside, elsewhere = model / "manifest.json", tmp_path / "m"
    result = _generate(model, "--manifest", str(beside))
    assert result.exit_code == 0
    said = f"{beside} lies in the model's directory, and is taken without --manifest-digest"
    assert said in result.stderr
    shutil.copy(beside, elsewhere)
    assert _generate(model, "--manifest", str(elsewhere)).stderr == ""


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", SINGLE_FILE])
def test_a_directory_that_differs_is_refused_by_file(model: Path, name: str) -> None:
    digest = _made(model)
    path = model / name
    content = bytearray(path.read_bytes())
    content[-3] ^= 1 if name == SINGLE_FILE else 0
    path.write_bytes(bytes(content) + (b"" if name == SINGLE_FILE else b" "))
    assert _generate(model).exit_code == 0, "otherwise a good model"
    given = ("--manifest", str(model / "manifest.json"), "--manifest-digest", digest)
    assert str(path) in _refusal(ManifestError, model, *given).where


def test_a_manifest_that_is_not_the_one_that_was_asked_for_is_refused(model: Path) -> None:
    _made(model)
    path = model / "manifest.json"
    error = _refusal(ManifestError, model, "--manifest", str(path), "--manifest-digest", "ab" * 32)
    assert error.where == f"{path}: SHA-256"


def test_pinned_scales_are_the_ones_that_are_used(model: Path) -> None:
    """An int8 policy reads them; one made by somebody else could let sums wrap."""
    _made(model)
    given = ("--manifest", str(model / "manifest.json"))
    scales = model / "calibration.safetensors"
    content = bytearray(scales.read_bytes())
    content[-1] ^= 1
    scales.write_bytes(content)
    error = _refusal(ManifestError, model, *given, "--policy", "quantized-clear")
    assert error.where == str(scales)


@pytest.mark.parametrize(
    ("settings", "where"),
    [
        ({"manifest_digest": "ab" * 32}, "--manifest-digest"),
        ({"manifest": Path("m"), "manifest_digest": "xyz"}, "--manifest-digest"),
        ({"manifest": Path("m"), "manifest_digest": ""}, "--manifest-digest"),
    ],
)
def test_settings_that_mean_nothing_are_refused(settings: dict[str, Any], where: str) -> None:
    with pytest.raises(SettingsError) as caught:
        load_manifest(Path(), {"manifest": None, "manifest_digest": None} | settings)
    assert caught.value.where == where


def test_without_either_there_is_none() -> None:
    assert load_manifest(Path(), {"manifest": None, "manifest_digest": None}) is None


def test_memory_for_keys_and_values_is_limited_by_an_option(model: Path) -> None:
    """The demo model has 2 x 5 layers x 2 heads x 32 x 4 bytes a token."""
    assert _generate(model, "--max-kv-mib", "1").exit_code == 0
    error = _refusal(LimitError, model, "--max-kv-mib", "1", "--max-new-tokens", "1000")
    assert "of which 1.0 MiB may be used (--max-kv-mib)" in error.where
    assert " tokens" in error.got
    assert error.expected == "at most 1.0 MiB, which is what is left"


def test_pads_are_made_from_pinned_weights_only(model: Path, tmp_path: Path) -> None:
    digest = _made(model)
    given = ("--manifest", str(model / "manifest.json"), "--manifest-digest", digest)
    make = ["pads", "make", str(model), "--tokens", "1", *given, "--bank"]
    result = CliRunner().invoke(tee_runner, [*make, str(tmp_path / "good")])
    assert result.exit_code == 0, result.output
    content = bytearray((model / SINGLE_FILE).read_bytes())
    content[-3] ^= 1
    (model / SINGLE_FILE).write_bytes(content)
    result = CliRunner().invoke(tee_runner, [*make, str(tmp_path / "bad")])
    assert isinstance(result.exception, ManifestError), result.output
