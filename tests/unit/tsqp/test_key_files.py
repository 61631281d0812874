"""Secret keys of models and audit logs: files, descriptors, a command; never in a message."""

import os
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest

from protocol.errors import KeyFileError, SettingsError
from tests.kit.rows import each_row
from tsqp import key_files
from tsqp.key_files import AUDIT_KEY, SEAL_KEY, key_of_command, provided_key

KEY = bytes(range(32))
TEXT = SEAL_KEY.encode(KEY)
NOTHING: dict[str, Any] = dict.fromkeys(("file", "descriptor", "command"))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "model.key"
    path.write_text(TEXT)
    path.chmod(0o600)
    return path


def pipe(content: str) -> int:
    reading, writing = os.pipe()
    os.write(writing, content.encode())
    os.close(writing)
    return reading


def python(code: str) -> str:
    return shlex.join((sys.executable, "-c", code))


def test_one_provider_gives_the_key(file: Path) -> None:
    assert AUDIT_KEY.read_from(pipe(AUDIT_KEY.encode(KEY))) == KEY
    descriptor = pipe(TEXT.rstrip("\n"))  # a tool may leave out the newline
    assert SEAL_KEY.read_from(descriptor) == KEY
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)
    for given in ({"file": file}, {"descriptor": pipe(TEXT)}, {"command": f"cat {file}"}):
        assert provided_key(**NOTHING | given) == KEY
    for given, count in (({}, 0), ({"file": file, "command": "cat"}, 2)):
        with pytest.raises(SettingsError, match=f"got {count} options, expected one of --seal-k"):
            provided_key(**NOTHING | given)
    # A key server is asked by programs alone that can prove what they run.
    assert provided_key(**NOTHING, release=lambda: b"by the server") == b"by the server"
    for release, count in ((None, 0), (lambda: KEY, 2)):
        with pytest.raises(SettingsError, match=f"got {count} options") as refused:
            provided_key(**NOTHING | ({"file": file} if release else {}), release=release)
        assert ("--seal-key-server" in str(refused.value)) == (release is not None)


@each_row(
    ("command", "got"),
    [
        ("false", "exit status 1"),
        ("/nowhere/kms-tool --token secret", "No such file or directory"),
        ("cat 'secret", "no command"),
        (f"echo {TEXT.strip()}; echo secret", "another content"),  # no shell runs it
        (python("print('secret' * 1000)"), "another content"),
    ],
)
def test_a_command_that_gives_no_key_is_refused_and_not_quoted(command: str, got: str) -> None:
    with pytest.raises(KeyFileError, match=f"^--seal-key-command: got {got}") as refused:
        key_of_command(command)
    assert "secret" not in str(refused.value)
    assert KEY.hex() not in str(refused.value)


def test_a_command_has_no_stdin_and_does_not_wait_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, other = os.dup(0), pipe("what the program is told")
    os.dup2(other, 0)
    try:
        echo = python(f"import sys; print(sys.stdin.read() + {TEXT!r}, end='')")
        assert key_of_command(echo) == KEY
    finally:
        os.dup2(ours, 0)
        os.close(ours)
        os.close(other)
    monkeypatch.setattr(key_files, "_COMMAND_TIMEOUT_S", 0.01)
    with pytest.raises(KeyFileError, match=r"got nothing within 0\.01 s"):
        key_of_command("sleep 60")


@each_row(
    "text",
    [
        *("", "x", TEXT * 2, TEXT[:-2], TEXT.upper(), " " + TEXT, TEXT + "\n", "\xff" * 80),
        TEXT.replace("seal", "audit"),
        "x" * 10_000,
    ],
    ids=lambda text: repr(text[:20]),
)
def test_another_content_is_refused_and_not_quoted(file: Path, text: str) -> None:
    file.write_text(text, encoding="latin-1")
    for read in (lambda: SEAL_KEY.read(file), lambda: SEAL_KEY.read_from(pipe(text))):
        with pytest.raises(KeyFileError) as refused:
            read()
        assert KEY.hex() not in str(refused.value).lower()


def test_a_key_file_is_for_its_owner_alone(file: Path) -> None:
    for mode in (0o640, 0o604, 0o620):
        file.chmod(mode)
        with pytest.raises(KeyFileError, match=f"got mode {mode:04o}"):
            SEAL_KEY.read(file)
    with pytest.raises(KeyFileError, match="descriptor 999: got Bad file descriptor"):
        SEAL_KEY.read_from(999)
