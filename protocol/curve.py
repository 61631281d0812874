"""Keys and tokens of a channel: which clients a service admits, to which service a client talks.

CurveZMQ (ZeroMQ's CURVE mechanism, on tcp:// and ipc://) encrypts and authenticates a connection
with one long-term key pair on each side. A client knows its service's public key; a service has a
list of the clients' public keys that it lets in. On disk each is a small text file:

    # tsqp secret key           mode 0600; `NAME.key` of `tsqp keys new NAME`
    <40 characters, Z85>

    # tsqp public key           `NAME.pub`
    <40 characters, Z85>

    # an allow-list: a public key a line, comments after #
    <40 characters, Z85>    # the runner in the VM

No key begins with # (it would be more than 32 bits hold), and so a public key file can be appended
to an allow-list as it is.

Over HTTP a client shows a bearer token: a secret of one line, in a file of its own (mode 0600). The
service has its SHA-256 alone. `tsqp api-key NAME --digest --to FILE` makes one.
"""

import os
import re
import stat
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import zmq
from zmq.utils import z85

from protocol.endpoint import parse_endpoint
from protocol.errors import KeyFileError, SettingsError

SECRET_HEADER = "# tsqp secret key"  # noqa: S105 - the first line of a file, not a secret
PUBLIC_HEADER = "# tsqp public key"
SECRET_MODE = 0o600
MAX_KEY_FILE_BYTES = 1024
KEY_TEXT = re.compile(r"[0-9a-zA-Z.\-:+=^!/*?&<>()\[\]{}@%$#]{40}")
_A_KEY = "a key of 40 Z85 characters"

FileCheck = Callable[[Path, bytes], None]


@dataclass(frozen=True)
class ClientKeys:
    """A client's own key pair and the public key of the service that it expects (Z85)."""

    secret: bytes = field(repr=False)
    service: bytes

    @property
    def public(self) -> bytes:
        """The client's own public key, which the service must have on its allow-list."""
        return bytes(zmq.curve_public(self.secret))


def require_curve() -> None:
    """Raise SettingsError where this ZeroMQ was built without CURVE."""
    SettingsError.unless(
        zmq.has("curve"), "keys", f"libzmq {zmq.zmq_version()} without CURVE", "one built with it"
    )


def require_zmq_keys(endpoint: str) -> None:
    """Raise SettingsError for an endpoint that cannot have keys, and where CURVE is missing."""
    parsed = parse_endpoint(endpoint, for_bind=True)
    stream = "a plain stream, which has neither encryption nor keys"
    http = "a URL, which has tokens and certificates instead (--http-token)"
    got = stream if parsed.is_stream else http
    SettingsError.unless(
        parsed.is_zmq, f"keys for {endpoint}", got, "tcp://HOST:PORT or ipc://PATH"
    )
    require_curve()


def read_key(path: Path, *, secret: bool, check: FileCheck | None = None) -> bytes:
    """Read a file with a secret key, or with a public one. Raises KeyFileError, and as `check`.

    Refused: a secret key that group or others may use at all, or that belongs to another user (but
    root); a public key that others than us and root may write; and one in the other's place.
    `check` is called with the path and the bytes that were read.
    """
    text, status = read_text(path, MAX_KEY_FILE_BYTES, check)
    wanted, other = (SECRET_HEADER, PUBLIC_HEADER) if secret else (PUBLIC_HEADER, SECRET_HEADER)
    wants = f"a {'secret' if secret else 'public'} key (NAME.{'key' if secret else 'pub'})"
    where = str(path)
    lines = text.split("\n")
    # Before its mode: a public key in the place of a secret one is world-readable, rightly.
    KeyFileError.unless(
        lines[0] != other, where, f"a {'public' if secret else 'secret'} key", wants
    )
    (require_only_we_read if secret else require_only_we_write)(path, status)
    got = "another first line"
    expected = f"{wants}, {wanted!r} in its first line"
    KeyFileError.unless(lines[0] == wanted, where, got if text else "an empty file", expected)
    one = len(lines) > 1 and not any(lines[2:])
    KeyFileError.unless(one, where, f"{len(lines) - 1} lines after the first", f"one: {_A_KEY}")
    return checked_key(lines[1], f"{path}: line 2")


def require_only_we_read(path: Path, status: os.stat_result) -> None:
    """Refuse a secret that group or others may use at all. Raises as `require_only_we_write`."""
    KeyFileError.unless(
        not status.st_mode & (stat.S_IRWXG | stat.S_IRWXO),
        str(path),
        f"mode {stat.S_IMODE(status.st_mode):04o}",
        f"{SECRET_MODE:04o}: for its owner alone (chmod 600)",
    )
    require_only_we_write(path, status)


def require_only_we_write(path: Path, status: os.stat_result) -> None:
    """Refuse what others could have changed: the writer of a list decides which clients get in.

    `status`: of the file as it was read. Raises KeyFileError.
    """
    mode = stat.S_IMODE(status.st_mode)
    expected = "a file that only its owner can change"
    kept = not mode & (stat.S_IWGRP | stat.S_IWOTH)
    KeyFileError.unless(kept, str(path), f"mode {mode:04o}", f"{expected} (chmod go-w)")
    KeyFileError.unless(
        status.st_uid in (0, os.geteuid()),  # root can change every file
        str(path),
        f"a file of user {status.st_uid}",
        f"one of root or of user {os.geteuid()}, who reads it",
    )


def checked_key(text: str, where: str) -> bytes:
    """Return a key as Z85 bytes. What is wrong with it is not quoted: it may be a secret.

    Raises KeyFileError, whose beginning is `where`.
    """
    got = f"{len(text)} characters" if len(text) != 40 else "a character that Z85 has not"
    KeyFileError.unless(KEY_TEXT.fullmatch(text), where, got, _A_KEY)
    key = text.encode("ascii")
    # Five characters can say more than four bytes hold.
    with KeyFileError.instead_of(struct.error, where, "five characters beyond 32 bits", _A_KEY):
        z85.decode(key)
    return key


def read_text(path: Path, limit: int, check: FileCheck | None = None) -> tuple[str, os.stat_result]:
    """Read a small text file, and whose it is. Raises KeyFileError, and what `check` raises."""
    where = str(path)
    with KeyFileError.for_os(where, "a file of keys"):
        # Not to wait for the writer of a named pipe.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(descriptor, "rb") as file:
            status = os.fstat(file.fileno())
            plain = stat.S_ISREG(status.st_mode)
            KeyFileError.unless(plain, where, "no regular file", "a file of keys")
            content = file.read(limit + 1)
    KeyFileError.unless(
        len(content) <= limit, where, "a larger file", f"at most {limit} bytes of keys"
    )
    if check is not None:
        check(path, content)
    with KeyFileError.instead_of(
        UnicodeDecodeError, where, "bytes that are no text", "keys as text"
    ):
        return content.decode("utf-8").replace("\r\n", "\n"), status


# What stands beside requests and replies: the client's channel, drawn anew for each, and the
# service's process.
RPC_PATH = "/v1/rpc"
CHANNEL_HEADER = "tsqp-channel"
INSTANCE_HEADER = "tsqp-instance"
CONTENT_TYPE = "application/octet-stream"


@dataclass(frozen=True)
class HttpAccess:
    """What a client has for HTTP: a token, if any, and CAs (PEM), None for the system's."""

    token: str | None = field(default=None, repr=False)
    ca: str | None = None
