"""Which clients may use a service: its keys, and the lists of clients that SIGHUP reads again.

Keys of ZeroMQ's CURVE and their allow-list are files that `protocol.curve` describes. HTTP has
bearer tokens instead. The file of tokens holds digests alone, so that a copy of it lets no client
in:

    <SHA-256 of a token, 64 hexadecimal digits>    # the runner in the VM

A plain hash is enough: `tsqp api-key NAME --digest` makes tokens of 32 random bytes.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import signal
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from gpu_side.event_log import log
from protocol.curve import (
    SECRET_HEADER,
    checked_key,
    read_text,
    require_only_we_read,
    require_only_we_write,
)
from protocol.errors import KeyFileError, SettingsError

_MAX_FILE_BYTES = 2**20


@dataclass(frozen=True)
class ServiceKeys:
    """A service's own secret key, and the public keys of the clients that it lets in (Z85)."""

    secret: bytes = field(repr=False)
    allowed: frozenset[bytes]


def read_allow_list(path: Path) -> frozenset[bytes]:
    """Read an allow-list. Raises KeyFileError that names the line.

    Refused: a file that others than us and root may write; a line that is no key; a secret key file
    in it; an empty list, which is a slip: a service without clients can be stopped.
    """
    return _read_list(path, _key_in, "key", "a client's public key a line")


def _key_in(line: str, where: str) -> bytes | None:
    KeyFileError.unless(
        line.strip() != SECRET_HEADER, where, "a secret key", "public keys (NAME.pub)"
    )
    words = line.split(maxsplit=1)
    if not words or words[0].startswith("#"):
        return None
    KeyFileError.unless(
        len(words) <= 1 or words[1].startswith("#"),
        where,
        "more after the key",
        "nothing, or # a comment",
    )
    return checked_key(words[0], where)


def _read_list(
    path: Path, entry_in: Callable[[str, str], bytes | None], entry: str, expected: str
) -> frozenset[bytes]:
    """Read a file of one entry a line (`entry_in` a line, with where it stands), and no fewer."""
    text, status = read_text(path, _MAX_FILE_BYTES)
    require_only_we_write(path, status)
    lines = enumerate(text.splitlines(), 1)
    entries = {entry_in(line, f"{path}: line {number}") for number, line in lines}
    found = frozenset(one for one in entries if one is not None)
    KeyFileError.unless(found, str(path), f"no {entry}", expected)
    return found


# How long the end waits for a list that is just being read, perhaps over a network that hangs.
_ENDING_S = 1.0


@contextmanager
def rereads_list(
    allow: Callable[[frozenset[bytes]], None],
    path: Path | None,
    read: Callable[[Path], frozenset[bytes]],
) -> Iterator[None]:
    """Give `allow` the list at `path` anew whenever SIGHUP comes; None: there is none.

    `allow`: called on a thread, as is `read`, which reads the list.

    To be entered from the main thread. While the block runs, signals are written to a socket of
    this module's (`signal.set_wakeup_fd`), and handlers of others must do without: the listeners
    that have a list look up a few times a second. A list that is empty or cannot be read
    changes nothing, and the log says so. Without a list the signal is ignored.
    """
    with ExitStack() as stack:
        # By default the signal ends the process, and what waits is lost. With a list the handler
        # has nothing to do: the number of the signal has been written to the socket by then.
        handler = _log_ignored if path is None else lambda *_: None
        stack.callback(signal.signal, signal.SIGHUP, signal.signal(signal.SIGHUP, handler))
        if path is not None:
            reader, writer = socket.socketpair()
            writer.setblocking(False)

            def reread() -> None:
                with reader:
                    while numbers := reader.recv(64):
                        if signal.SIGHUP not in numbers:
                            continue
                        try:
                            allowed = read(path)
                            allow(allowed)
                        except KeyFileError as error:
                            log.error("allow_list_unchanged", detail=str(error))
                        except Exception:
                            # Exhausted memory, or a mistake of ours: the next SIGHUP finds this
                            # thread as it was.
                            log.exception("allow_list_unchanged", detail="a failure of ours")
                        else:
                            log.info("allow_list", keys=len(allowed))

            # On a thread: a signal must not interrupt the loop that answers requests.
            thread = threading.Thread(target=reread, name="allow-list", daemon=True)
            thread.start()
            stack.callback(thread.join, _ENDING_S)
            stack.callback(writer.close)
            # The socket is full only when the thread has enough to read.
            previous = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
            stack.callback(signal.set_wakeup_fd, previous)
        yield


def _log_ignored(_number: int, _frame: FrameType | None) -> None:
    log.info("sighup_ignored", detail="there is no list to read again")


@dataclass(frozen=True)
class HttpKeys:
    """`tokens`: digests of those that are let in, None: of all. `certificate`, `key`: PEM files."""

    tokens: frozenset[bytes] | None = None
    certificate: Path | None = None
    key: Path | None = None

    @classmethod
    def read(cls, tokens: Path | None, certificate: Path | None, key: Path | None) -> HttpKeys:
        """Read and check what the files hold. Raises KeyFileError, SettingsError."""
        SettingsError.unless(
            (certificate is None) == (key is None),
            "TLS",
            "--http-key alone" if certificate is None else "--http-cert alone",
            "--http-cert and --http-key, or neither",
        )
        if certificate is not None and key is not None:
            require_only_we_read(key, read_text(key, _MAX_FILE_BYTES)[1])
            with SettingsError.for_os(
                "--http-cert and --http-key",
                "a certificate and its key, as PEM, without a passphrase",
                ValueError,
                ValueError.__name__,
            ):
                # With a passphrase, so that none is asked for.
                ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key, "")
        return cls(None if tokens is None else read_tokens(tokens), certificate, key)


def read_tokens(path: Path) -> frozenset[bytes]:
    """Read digests of tokens. Raises KeyFileError that names the line, and quotes nothing.

    Refused: a file that others than us and root may write; a line that is no digest; an empty list,
    which is a slip.
    """
    return _read_list(path, _digest_in, "digest", "one of a client's token a line")


def _digest_in(line: str, where: str) -> bytes | None:
    digest = line.partition("#")[0].strip()
    KeyFileError.unless(
        not digest or re.fullmatch("[0-9a-f]{64}", digest),
        where,
        f"{len(digest)} characters that are no digest",
        "SHA-256 of a token, as 64 lower-case hexadecimal digits",
    )
    return digest.encode() or None


def digest_of(authorization: bytes, allowed: frozenset[bytes]) -> bytes | None:
    """Return which of the digests a header `Authorization: Bearer TOKEN` has; None for none.

    The time depends on the number of digests, not on which one it is.
    """
    scheme, _, token = authorization.partition(b" ")
    if scheme.lower() != b"bearer":
        return None
    digest = hashlib.sha256(token.strip()).hexdigest().encode()
    matches = [hmac.compare_digest(digest, one) for one in allowed]
    return digest if any(matches) else None
