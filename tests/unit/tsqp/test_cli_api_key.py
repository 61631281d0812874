"""`tsqp api-key`: the key goes to the client, its entry into the key file, and they fit."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from protocol.errors import KeyFileError
from tee_side.serve.keys import ApiKeys
from tsqp.cli.main import command


def run(*arguments: str) -> Result:
    return CliRunner().invoke(command, ["api-key", *arguments])


def keys(path: Path, *entries: str) -> ApiKeys:
    path.write_text("".join(entries))
    path.chmod(0o600)
    return ApiKeys(path)


def test_an_entry_admits_the_key_that_was_made_with_it(tmp_path: Path) -> None:
    limits = ("--requests-per-minute", "60", "--tokens-per-minute", "5000", "--concurrent", "4")
    alice, bob = run("alice", *limits, "--max-tokens", "256"), run("bob")
    assert (alice.exit_code, bob.exit_code) == (0, 0)
    secret = alice.stderr.strip()
    assert secret.startswith("tsqp-")
    assert len(secret) == 48
    assert secret not in alice.stdout
    found = keys(tmp_path / "keys.toml", alice.stdout, bob.stdout)
    entry = found.find(f"Bearer {secret}")
    assert entry is not None
    assert entry.model_dump(exclude={"sha256"}) == {
        "requests_per_minute": 60,
        "tokens_per_minute": 5000,
        "concurrent": 4,
        "max_tokens": 256,
    }
    assert entry.name == "alice"
    other = found.find(f"Bearer {bob.stderr.strip()}")
    assert other is not None
    assert (other.name, other.max_tokens) == ("bob", None)


def test_a_key_may_go_into_a_private_new_file(tmp_path: Path) -> None:
    to = tmp_path / "alice.key"
    made = run("alice", "--to", str(to))
    assert made.stderr == ""
    assert to.stat().st_mode & 0o777 == 0o600
    found = keys(tmp_path / "keys.toml", made.stdout)
    assert found.find(f"Bearer {to.read_text().strip()}") is not None
    again = run("alice", "--to", str(to))
    assert isinstance(again.exception, KeyFileError)
    assert again.stdout == ""


@pytest.mark.parametrize("name", ["", "a b", "a.b", "tsqp-x", "x" * 33, "\u00e9"])
def test_a_name_that_the_file_refuses_is_refused(name: str) -> None:
    made = run(name)
    assert isinstance(made.exception, KeyFileError)
    assert made.output == ""


@pytest.mark.parametrize("value", ["0", "-1", "many"])
def test_a_limit_is_a_positive_number(value: str) -> None:
    assert run("alice", "--concurrent", value).exit_code == 2
