"""The key of sealed models: its file, and the providers from which a program takes it.

The text is one line, whichever way it comes: `tsqp-seal-key 1 ` and 64 hexadecimal digits.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import threading
import time
from collections.abc import Callable
from contextlib import closing
from functools import partial
from http.client import HTTPConnection, HTTPException, IncompleteRead
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from protocol.curve import read_text, require_only_we_read
from protocol.errors import EndpointError, KeyFileError, ProtocolError, SettingsError
from protocol.model.sealed import KEY_BYTES

if TYPE_CHECKING:
    from tee_side.attest.statement import Statement
    from tee_side.serve.sealed import HpkeKey

# Makes a statement of a key server's nonce and of the key that it is to seal its answer to.
State: TypeAlias = "Callable[[bytes, HpkeKey], Statement]"

NONCE_PATH, KEY_PATH = "/v1/nonce", "/v1/key"

_LINE = "tsqp-seal-key 1 "
_KEY = re.compile(f"{_LINE}([0-9a-f]{{{2 * KEY_BYTES}}})\n?")
_MAX_BYTES = 1024
# A tool that asks a key service far away takes seconds.
_COMMAND_TIMEOUT_S = 60.0
# Of each of the two requests to a key server.
_SERVER_TIMEOUT_S = 30.0
_MAX_ANSWER_BYTES = 4096
_URL = re.compile(r"http://(?:\[([0-9A-Fa-f:.]+)\]|([A-Za-z0-9._-]+))(?::([0-9]{1,5}))?/?")
_NONCE = re.compile(rb"[0-9a-f]{64}")
_STEP = re.compile(rb"[A-Za-z][A-Za-z0-9 '_.:-]{0,99}")
_DOMAIN = b"TSQP release of a model's key 1\0"


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
        raise KeyFileError(
            where, got=error.strerror or type(error).__name__, expected="an open one with a key"
        ) from None


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
        raise KeyFileError(
            where, got=getattr(error, "strerror", None) or "no command", expected=expected
        ) from None
    except subprocess.TimeoutExpired:
        raise KeyFileError(
            where, got=f"nothing within {_COMMAND_TIMEOUT_S:g} s", expected=expected
        ) from None
    KeyFileError.unless(not ended.returncode, where, f"exit status {ended.returncode}", expected)
    return _parsed(ended.stdout[:_MAX_BYTES].decode("ascii", "replace"), where)


def key_of_server(url: str, state: State) -> bytes:
    """Have a `tsqp keyserver` give the key to what runs here. Takes 60 s at most, and `state`'s.

    What it says is not quoted, but for the name of the step that this program failed. Raises
    SettingsError, EndpointError, KeyFileError, EvidenceError.
    """
    from tee_side.serve.sealed import HpkeKey

    host, port = _host_and_port(url)
    where = f"--seal-key-server http://{f'[{host}]' if ':' in host else host}:{port}"
    found = _ask(where, (host, port), "GET", NONCE_PATH)
    KeyFileError.unless(
        _NONCE.fullmatch(found), where, "another answer", "a nonce, as tsqp keyserver gives"
    )
    nonce, key = bytes.fromhex(found.decode()), HpkeKey()
    sealed = _ask(where, (host, port), "POST", KEY_PATH, state(nonce, key).encode())
    try:
        opened = key.open(sealed, release_info(nonce))
    except ProtocolError:
        opened = b""
    KeyFileError.unless(
        len(opened) == KEY_BYTES,
        where,
        "another answer",
        "a key that is sealed to this program, for this nonce",
    )
    return opened


def release_info(nonce: bytes) -> bytes:
    """Return what a released key is bound to by HPKE: a purpose, and the nonce of a statement."""
    return _DOMAIN + nonce


def _host_and_port(url: str) -> tuple[str, int]:
    found = _URL.fullmatch(url)
    if found is None or (port := int(found[3] or 80)) > 65535:
        # Not quoted: a password may stand in it.
        raise SettingsError(
            "--seal-key-server",
            got="another form",
            expected="http://HOST[:PORT], without TLS: the key comes sealed to this program",
        )
    return found[1] or found[2], port


def _ask(
    where: str, address: tuple[str, int], method: str, path: str, body: bytes | None = None
) -> bytes:
    from tsqp.client.attested_tls import cut

    began_s, late = time.monotonic(), threading.Event()

    try:
        with closing(HTTPConnection(*address, timeout=_SERVER_TIMEOUT_S)) as connection:
            connection.connect()
            # The library lets go of it where a reply is the last one.
            connected = connection.sock

            def end() -> None:
                late.set()
                cut(connected)

            # Of all together: a server could send a byte now and then.
            left_s = began_s + _SERVER_TIMEOUT_S - time.monotonic()
            ending = threading.Timer(left_s, end)
            ending.daemon = True
            ending.start()
            try:
                connection.request(method, path, body)
                reply = connection.getresponse()
                answer = reply.read(_MAX_ANSWER_BYTES)
            finally:
                ending.cancel()
        if late.is_set() or reply.length:
            raise IncompleteRead(b"")
    except (OSError, HTTPException, UnicodeError) as error:
        got = getattr(error, "strerror", None) or type(error).__name__
        # Of a connection that is not made, or of one read that the library ended first.
        if late.is_set() or isinstance(error, TimeoutError):
            got = f"no whole answer within {_SERVER_TIMEOUT_S:g} s"
        raise EndpointError(where, got=got, expected="an answer of tsqp keyserver") from None
    if reply.status == 403 and _STEP.fullmatch(answer):
        raise KeyFileError(
            where,
            got=f"a refusal: the step {answer.decode()!r} failed",
            expected="a key (its own output says what differs)",
        )
    KeyFileError.unless(reply.status == 200, where, f"status {reply.status}", "200")
    return answer


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
        "--seal-key": None if file is None else partial(read_key, file),
        "--seal-key-fd": None if descriptor is None else partial(read_key_from, descriptor),
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


def _parsed(text: str, where: str) -> bytes:
    if (found := _KEY.fullmatch(text)) is None:
        # Never quoted: it may be the key.
        raise KeyFileError(where, got="another content", expected="a key of tsqp seal new-key")
    return bytes.fromhex(found[1])
