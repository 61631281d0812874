"""Key files as people handle them: pairs of CURVE, and the secret keys of seals and audit logs.

A secret key is one line of text, whichever way it comes: a word that says its kind, and 64
hexadecimal digits.
"""

import os
import re
import secrets
import shlex
import subprocess
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import zmq

from protocol.curve import (
    KEY_TEXT,
    MAX_KEY_FILE_BYTES,
    PUBLIC_HEADER,
    SECRET_HEADER,
    SECRET_MODE,
    FileCheck,
    checked_key,
    read_key,
    read_text,
    require_curve,
    require_only_we_read,
)
from protocol.errors import KeyFileError, SettingsError

# Of RFC 6750; too many to be guessed.
_TOKEN = re.compile(r"[A-Za-z0-9._~+/-]{32,512}=*")


def new_key_pair(name: Path) -> tuple[Path, Path, str]:
    """Make a key pair: write `name`.key and `name`.pub, and return both paths and the public key.

    Nothing is overwritten, and nothing is left after a failure. Raises KeyFileError.
    """
    require_curve()
    public, secret = (key.decode() for key in zmq.curve_keypair())
    secret_path = name.with_name(f"{name.name}.key")
    public_path = name.with_name(f"{name.name}.pub")
    write_new(secret_path, f"{SECRET_HEADER}\n{secret}\n", SECRET_MODE)
    try:
        write_new(public_path, f"{PUBLIC_HEADER}\n{public}\n", 0o644)
    except BaseException:
        secret_path.unlink()
        raise
    return secret_path, public_path, public


def replace_public_key(path: Path, public: bytes) -> None:
    """Write a public key in the place of another, if there is one. Raises KeyFileError."""
    new = path.with_name(f"{path.name}.new")
    with KeyFileError.for_os(str(path), "a file to write"):
        new.unlink(missing_ok=True)
        write_new(new, f"{PUBLIC_HEADER}\n{public.decode()}\n", 0o644)
        new.replace(path)


def public_key(value_or_path: str, check: FileCheck | None = None) -> bytes:
    """Return a public key (Z85) that is given by value, or by the path of its file.

    A text of 40 Z85 characters is a value unless it ends in `.pub`. Raises as
    `protocol.curve.read_key`.
    """
    if KEY_TEXT.fullmatch(value_or_path) and not value_or_path.endswith(".pub"):
        return checked_key(value_or_path, "public key")
    return read_key(Path(value_or_path), secret=False, check=check)


def public_key_of(path: Path) -> bytes:
    """Return the public key of either kind of file. Raises KeyFileError."""
    text, _ = read_text(path, MAX_KEY_FILE_BYTES)
    if text.startswith(SECRET_HEADER):
        return bytes(zmq.curve_public(read_key(path, secret=True)))
    return read_key(path, secret=False)


def write_new(path: Path, text: str, mode: int) -> None:
    """Write a new file, or leave nothing after a failure. Raises KeyFileError."""
    with KeyFileError.for_os(str(path), "a new file"):
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    try:
        with os.fdopen(descriptor, "w", encoding="ascii") as file:
            os.fchmod(file.fileno(), mode)
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
    except BaseException:
        path.unlink()
        raise


_KEY_BYTES = 32
# A tool that asks a key service far away takes seconds.
_COMMAND_TIMEOUT_S = 60.0


class SecretKey(NamedTuple):
    """A kind of secret key. `word`: begins its line; `maker`: the command that makes one."""

    word: str
    maker: str

    def encode(self, key: bytes) -> str:
        """Return the content of a key file."""
        return f"{self.word} 1 {key.hex()}\n"

    def new(self, path: Path) -> bytes:
        """Make a key, and write it to a new file. Raises KeyFileError."""
        key = secrets.token_bytes(_KEY_BYTES)
        write_new(path, self.encode(key), SECRET_MODE)
        return key

    def read(self, path: Path) -> bytes:
        """Read a key file, which is for its owner alone. Raises KeyFileError."""
        text, status = read_text(path, MAX_KEY_FILE_BYTES)
        require_only_we_read(path, status)
        return self.parse(text, str(path))

    def read_from(self, descriptor: int) -> bytes:
        """Read a key from an open descriptor, such as a pipe, to its end, and close it.

        Raises KeyFileError.
        """
        where = f"descriptor {descriptor}"
        with (
            KeyFileError.for_os(where, "an open one with a key"),
            os.fdopen(descriptor, "rb") as file,
        ):
            text = file.read(MAX_KEY_FILE_BYTES).decode("ascii", "replace")
        return self.parse(text, where)

    def parse(self, text: str, where: str) -> bytes:
        """Return the key of a line, which is never quoted. Raises KeyFileError."""
        found = re.fullmatch(f"{self.word} 1 ([0-9a-f]{{{2 * _KEY_BYTES}}})\n?", text)
        if found is None:
            raise KeyFileError(where, got="another content", expected=f"a key of {self.maker}")
        return bytes.fromhex(found[1])


SEAL_KEY = SecretKey("tsqp-seal-key", "tsqp seal new-key")
AUDIT_KEY = SecretKey("tsqp-audit-key", "tsqp audit new-key")


def key_of_command(command: str) -> bytes:
    """Run a command, without a shell, and take the key from its stdout. Raises KeyFileError.

    Of the command itself nothing is quoted but its exit status: a token may stand in it.
    """
    where = "--seal-key-command"
    expected = "a command that writes a key to its stdout"
    with (
        # A ValueError is of a quote that does not end, an IndexError of no word.
        KeyFileError.for_os(where, expected, (ValueError, IndexError), "no command"),
        KeyFileError.instead_of(
            subprocess.TimeoutExpired, where, f"nothing within {_COMMAND_TIMEOUT_S:g} s", expected
        ),
    ):
        ended = subprocess.run(
            shlex.split(command),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            timeout=_COMMAND_TIMEOUT_S,
            check=False,
        )
    KeyFileError.unless(not ended.returncode, where, f"exit status {ended.returncode}", expected)
    return SEAL_KEY.parse(ended.stdout[:MAX_KEY_FILE_BYTES].decode("ascii", "replace"), where)


def provided_key(
    file: Path | None,
    descriptor: int | None,
    command: str | None,
    release: Callable[[], bytes] | None = None,
) -> bytes:
    """Take the key from the one provider that is named. Raises as it, SettingsError.

    `release`: of `--seal-key-server`, for a program that can prove what it runs.
    """
    providers: dict[str, Callable[[], bytes] | None] = {
        "--seal-key": None if file is None else partial(SEAL_KEY.read, file),
        "--seal-key-fd": None if descriptor is None else partial(SEAL_KEY.read_from, descriptor),
        "--seal-key-command": None if command is None else partial(key_of_command, command),
    }
    providers |= {} if release is None else {"--seal-key-server": release}
    given = [take for take in providers.values() if take is not None]
    SettingsError.unless(
        len(given) == 1,
        "key of the seal",
        f"{len(given)} options",
        f"one of {', '.join(providers)}",
    )
    return given[0]()


def read_token(path: Path) -> str:
    """Read a token's file. Raises KeyFileError, which quotes nothing, as a secret key's."""
    text, status = read_text(path, MAX_KEY_FILE_BYTES)
    require_only_we_read(path, status)
    token = text.removesuffix("\n")
    KeyFileError.unless(
        _TOKEN.fullmatch(token),
        str(path),
        f"{len(token)} characters that are no token",
        "one line of 32 or more of A-Z a-z 0-9 ._~+/-",
    )
    return token
