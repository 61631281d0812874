"""tee-runner reads a sealed model: the same tokens, nothing plain on a disk, and typed refusals."""

import json
import os
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import Sealed
from tests.e2e.test_bad_input import refused
from tests.kit.service import call

PROMPT = ("--policy", "tee-only", "--prompt", "Once upon a time", "--max-new-tokens", "8", "--json")


def generated(*arguments: str, **environment: str) -> list[int]:
    result = call("tee-runner", "generate", *arguments, *PROMPT, **environment)
    assert result.returncode == 0, result.stderr
    ids: list[int] = json.loads(result.stdout)["token_ids"]
    return ids


_written: list[str] | None = None


def _note(event: str, arguments: tuple[Any, ...]) -> None:
    """Note each file that is opened to be written."""
    if _written is not None and event == "open" and arguments[2] is not None:
        path, _, flags = arguments
        if flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            _written.append(os.fspath(path) if isinstance(path, os.PathLike) else str(path))


@contextmanager
def noted() -> Iterator[list[str]]:
    global _written  # noqa: PLW0603 - a hook stays for the life of the process
    sys.addaudithook(_note)
    _written = found = []
    try:
        yield found
    finally:
        _written = None


def test_the_same_tokens_and_no_file_is_written(
    sealed: Sealed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = generated("demo")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    before = {path: path.stat().st_mtime_ns for path in sealed.directory.rglob("*")}
    opened = ("--seal-key", str(sealed.key), "--seal-digest", sealed.digest)
    with noted() as written:
        assert generated(str(sealed.directory), *opened) == tokens
    assert not [path for path in written if _is_file(path)]
    assert list(tmp_path.rglob("*")) == []
    assert before == {path: path.stat().st_mtime_ns for path in sealed.directory.rglob("*")}
    with noted() as written:
        (tmp_path / "x").write_text("x")
    assert set(written) == {str(tmp_path / "x")}  # the hook sees files that are written


def _is_file(path: str) -> bool:
    return not os.path.exists(path) or stat.S_ISREG(os.stat(path).st_mode)


def test_what_is_refused(sealed: Sealed, tmp_path: Path) -> None:
    directory, key = str(sealed.directory), ("--seal-key", str(sealed.key))
    config = tmp_path / "settings.toml"
    config.write_text(f'seal-key = "{sealed.key}"\n')
    for arguments, said in (
        ((directory,), "config.json: got a sealed file, expected a plain one, or its key"),
        (("demo", *key), "sealed.tsqp: got no such file, expected"),
        ((directory, *key, "--seal-digest", "0" * 64), f"of the seal: got {sealed.digest}, expec"),
        ((directory, *key, "--seal-digest", "12"), "--seal-digest: got '12', expected 64 hex"),
        ((directory, "--seal-digest", sealed.digest), "key of the seal: got 0 options, expected"),
        ((directory, *key, "--seal-key-fd", "9"), "key of the seal: got 2 options"),
        ((directory, "--config", str(config)), "--seal-key: got a value in a settings file"),
    ):
        refused(call("tee-runner", "generate", *arguments, *PROMPT), said)
    # Programs that take no key say what they met.
    for arguments in (
        ("tsqp", "doctor", directory),
        ("tsqp", "manifest", directory),
        ("gpu-service", directory, "--bind", f"unix://{tmp_path}/gpu"),
    ):
        result = call(*arguments)
        assert result.returncode != 0
        assert "got a sealed file" in result.stdout + result.stderr
