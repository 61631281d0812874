"""The key of sealed models: its file, and the providers from which a program takes it.

The text is one line, whichever way it comes: `tsqp-seal-key 1 ` and 64 hexadecimal digits.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from protocol.curve import read_text, require_only_we_read
from protocol.errors import KeyFileError, SettingsError
from protocol.model.sealed import KEY_BYTES

_LINE = "tsqp-seal-key 1 "
_KEY = re.compile(f"{_LINE}([0-9a-f]{{{2 * KEY_BYTES}}})\n?")
_MAX_BYTES = 1024
# A tool that asks a key service far away takes seconds.
_COMMAND_TIMEOUT_S = 60.0


def encode_key(key: bytes) -> str:
    """Return the content of a key file."""
    return f"{_LINE}{key.hex()}\n"


def read_key(path: Path) -> bytes:
    """Read a key file, which is for its owner alone. Raises KeyFileError."""
    text, status = read_text(path, _MAX_BYTES)
    require_only_we_read(path, status)
    return _parsed(text, str(path))


def read_key_from(descriptor: int) -> bytes:
    """Read a key from an open descriptor, such as a pipe, to its end, and close it.

    Raises KeyFileError.
    """
    where = f"descriptor {descriptor}"
    try:
        with os.fdopen(descriptor, "rb") as file:
            return _parsed(file.read(_MAX_BYTES).decode("ascii", "replace"), where)
    except OSError as error:
        got = error.strerror or type(error).__name__
        raise KeyFileError(where, got=got, expected="an open one with a key") from None


def key_of_command(command: str) -> bytes:
    """Run a command, without a shell, and take the key from its stdout. Raises KeyFileError.

    Of the command itself nothing is quoted but its exit status: a token may stand in it.
    """
    where, expected = "--seal-key-command", "a command that writes a key to its stdout"
    try:
        ended = subprocess.run(
            shlex.split(command),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            timeout=_COMMAND_TIMEOUT_S,
            check=False,
        )
    except (OSError, ValueError, IndexError) as error:
        # A ValueError is of a quote that does not end, an IndexError of no word.
        got = getattr(error, "strerror", None) or "no command"
        raise KeyFileError(where, got=got, expected=expected) from None
    except subprocess.TimeoutExpired:
        got = f"nothing within {_COMMAND_TIMEOUT_S:g} s"
        raise KeyFileError(where, got=got, expected=expected) from None
    if ended.returncode:
        raise KeyFileError(where, got=f"exit status {ended.returncode}", expected=expected)
    return _parsed(ended.stdout[:_MAX_BYTES].decode("ascii", "replace"), where)


# By the setting that names it.
PROVIDERS: Mapping[str, Callable[[Any], bytes]] = {
    "seal_key": read_key,
    "seal_key_fd": read_key_from,
    "seal_key_command": key_of_command,
}


def provided_key(settings: Mapping[str, Any]) -> bytes:
    """Take the key from the one provider that the settings name. Raises as it, SettingsError."""
    given = [name for name in PROVIDERS if settings[name] is not None]
    if len(given) != 1:
        options = [f"--{name.replace('_', '-')}" for name in PROVIDERS]
        expected = f"one of {', '.join(options)}"
        raise SettingsError("key of the seal", got=f"{len(given)} options", expected=expected)
    return PROVIDERS[given[0]](settings[given[0]])


def _parsed(text: str, where: str) -> bytes:
    if (found := _KEY.fullmatch(text)) is None:
        # Never quoted: it may be the key.
        raise KeyFileError(where, got="another content", expected="a key of tsqp seal new-key")
    return bytes.fromhex(found[1])
