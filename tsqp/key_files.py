"""Key files as people handle them: makes a pair, and shows the public key of a file."""

from __future__ import annotations

import os
from pathlib import Path

import zmq

from protocol.curve import (
    MAX_KEY_FILE_BYTES,
    PUBLIC_HEADER,
    SECRET_HEADER,
    SECRET_MODE,
    read_public_key,
    read_secret_key,
    read_text,
    require_curve,
)
from protocol.errors import KeyFileError


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
    try:
        new.unlink(missing_ok=True)
        write_new(new, f"{PUBLIC_HEADER}\n{public.decode()}\n", 0o644)
        new.replace(path)
    except OSError as error:
        raise KeyFileError(
            str(path), got=error.strerror or type(error).__name__, expected="a file to write"
        ) from None


def public_key_of(path: Path) -> bytes:
    """Return the public key of either kind of file. Raises KeyFileError."""
    text, _ = read_text(path, MAX_KEY_FILE_BYTES)
    if text.startswith(SECRET_HEADER):
        return bytes(zmq.curve_public(read_secret_key(path)))
    return read_public_key(path)


def write_new(path: Path, text: str, mode: int) -> None:
    """Write a new file, or leave nothing after a failure. Raises KeyFileError."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise KeyFileError(str(path), got=reason, expected="a new file") from None
    try:
        with os.fdopen(descriptor, "w", encoding="ascii") as file:
            os.fchmod(file.fileno(), mode)
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
    except BaseException:
        path.unlink()
        raise
