"""Which clients may use a service: its own key, and its allow-list.

The files are described in `protocol.curve`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import zmq

from protocol.curve import (
    SECRET_HEADER,
    checked_key,
    read_secret_key,
    read_text,
    require_only_we_write,
)
from protocol.errors import KeyFileError

_MAX_LIST_BYTES = 2**20


@dataclass(frozen=True)
class ServiceKeys:
    """A service's own secret key, and the public keys of the clients that it lets in (Z85)."""

    secret: bytes = field(repr=False)
    allowed: frozenset[bytes]

    @property
    def public(self) -> bytes:
        """The service's own public key, which clients must know."""
        return bytes(zmq.curve_public(self.secret))

    @classmethod
    def read(cls, identity: Path, allow: Path) -> ServiceKeys:
        """Read both files. Raises KeyFileError."""
        return cls(read_secret_key(identity), read_allow_list(allow))


def read_allow_list(path: Path) -> frozenset[bytes]:
    """Read an allow-list. Raises KeyFileError that names the line.

    Refused: a file that others than us and root may write; a line that is no key; a secret key file
    in it; an empty list, which is a slip: a service without clients can be stopped.
    """
    allowed = set()
    text, status = read_text(path, _MAX_LIST_BYTES)
    require_only_we_write(path, status)
    for number, line in enumerate(text.splitlines(), 1):
        where = f"{path}: line {number}"
        if line.strip() == SECRET_HEADER:
            raise KeyFileError(where, got="a secret key", expected="public keys (NAME.pub)")
        words = line.split(maxsplit=1)
        if not words or words[0].startswith("#"):
            continue
        if len(words) > 1 and not words[1].startswith("#"):
            raise KeyFileError(where, got="more after the key", expected="nothing, or # a comment")
        allowed.add(checked_key(words[0], where))
    if not allowed:
        raise KeyFileError(str(path), got="no key", expected="a client's public key a line")
    return frozenset(allowed)
