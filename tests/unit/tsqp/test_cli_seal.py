"""`tsqp seal`: a key is made, a model is sealed for it, and given to another key."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from protocol.errors import KeyFileError, ModelError, SealError
from protocol.model.sealed import SEAL_FILE, SealedModel
from tsqp.cli.main import command
from tsqp.cli.program import model_directory
from tsqp.seal_keys import read_key

DEMO = model_directory("demo")


def run(*arguments: str, **environment: str) -> Result:
    return CliRunner().invoke(command, ["seal", *arguments], env=environment)


@pytest.fixture
def key(tmp_path: Path) -> Path:
    path = tmp_path / "model.key"
    made = run("new-key", str(path))
    assert made.exit_code == 0
    assert read_key(path).hex() not in made.output
    return path


@pytest.fixture
def model(tmp_path: Path) -> Path:
    directory = tmp_path / "model"
    (directory / "original").mkdir(parents=True)
    for name in ("config.json", "tokenizer.json"):
        shutil.copy(DEMO / name, directory)
    return directory


def test_a_key_is_private_new_and_not_overwritten(tmp_path: Path, key: Path) -> None:
    assert key.stat().st_mode & 0o777 == 0o600
    other = tmp_path / "other.key"
    run("new-key", str(other))
    assert read_key(other) != read_key(key)
    before = key.read_bytes()
    assert isinstance(run("new-key", str(key)).exception, KeyFileError)
    assert key.read_bytes() == before


def test_a_model_is_sealed_and_its_digest_said(tmp_path: Path, key: Path, model: Path) -> None:
    output = tmp_path / "sealed"
    done = run(str(model), "--to", str(key), "-o", str(output))
    assert done.exit_code == 0, done.output
    assert "left out, as they are no files: original" in done.stderr
    sealed, digest = done.stdout.splitlines()
    assert sealed.startswith(f"{output}: 2 files, ")
    assert digest == f"SHA-256 of the seal: {SealedModel(output, read_key(key)).digest}"
    assert sorted(p.name for p in output.iterdir()) == ["config.json", SEAL_FILE, "tokenizer.json"]
    assert read_key(key).hex() not in done.output


@pytest.mark.parametrize("first", [("model",), ()])
def test_the_word_model_may_be_left_out(
    tmp_path: Path, key: Path, model: Path, first: tuple[str, ...]
) -> None:
    config = tmp_path / "settings.toml"
    config.write_text("threads = 1\n")
    options = ("--to", str(key), "-o")
    for number, arguments in enumerate(
        (
            (*first, *options, "OUT", str(model)),
            (*first, str(model), *options, "OUT", "--config", str(config)),
            ("--config", str(config), *first, str(model), *options, "OUT"),
            (f"--config={config}", *first, str(model), *options, "OUT"),
        )
    ):
        output = str(tmp_path / str(number))
        done = run(*(output if word == "OUT" else word for word in arguments))
        assert done.exit_code == 0, done.output
    done = run(*first, *options, str(tmp_path / "from"), TSQP_MODEL=str(model))
    assert done.exit_code == 0, done.output
    assert "rewrap" in run("--help").output
    assert "--output" in run("model", "--help").output


def test_another_key(tmp_path: Path, key: Path, model: Path) -> None:
    output, other = tmp_path / "sealed", tmp_path / "other.key"
    sealed = run(str(model), "--to", str(key), "-o", str(output))
    run("new-key", str(other))
    again = run("rewrap", str(output), "--seal-key", str(key), "--to", str(other))
    assert again.exit_code == 0, again.output
    assert again.stdout.splitlines()[-1].split()[-1] == sealed.stdout.split()[-1]
    assert SealedModel(output, read_key(other), again.stdout.split()[-1])
    refused = run("rewrap", str(output), "--seal-key", str(key), "--to", str(other))
    assert isinstance(refused.exception, SealError)
    piped = ("--seal-key-command", f"cat {other}")
    assert run("rewrap", str(output), *piped, "--to", str(key)).exit_code == 0
    assert SealedModel(output, read_key(key))


def test_what_cannot_be_sealed_is_refused(tmp_path: Path, key: Path, model: Path) -> None:
    output = str(tmp_path / "sealed")
    for arguments, error in (
        ((str(model), "--to", str(tmp_path / "none"), "-o", output), KeyFileError),
        ((str(tmp_path / "none"), "--to", str(key), "-o", output), ModelError),
        ((str(model), "--to", str(key), "-o", str(model)), ModelError),
        ((str(model), "--to", str(key), "-o", output), type(None)),
        ((output, "--to", str(key), "-o", str(tmp_path / "twice")), SealError),
    ):
        found = run(*arguments)
        assert isinstance(found.exception, error), found.output
    assert run(str(model)).exit_code == 2
    assert run().exit_code == 2
