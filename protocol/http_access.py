"""By what a client is known to services over HTTP, and how it knows them.

A bearer token is a secret of one line, in a file of its own (mode 0600); the service has its
SHA-256 alone. `tsqp api-key NAME --digest --to FILE` makes one.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

from protocol.curve import MAX_KEY_FILE_BYTES, read_text, require_only_we_read
from protocol.errors import KeyFileError

# What stands beside requests and replies: the client's channel, drawn anew for each, and the
# service's process.
RPC_PATH = "/v1/rpc"
CHANNEL_HEADER = "tsqp-channel"
INSTANCE_HEADER = "tsqp-instance"
CONTENT_TYPE = "application/octet-stream"
# Of RFC 6750; too many to be guessed.
_TOKEN = re.compile(r"[A-Za-z0-9._~+/-]{32,512}=*")


@dataclass(frozen=True)
class HttpAccess:
    """What a client has for HTTP: a token, if any, and CAs (PEM), None for the system's."""

    token: str | None = field(default=None, repr=False)
    ca: str | None = None


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
