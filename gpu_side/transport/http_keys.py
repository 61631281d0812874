"""What a service has for HTTP: which bearer tokens it lets in, and its certificate.

The file of tokens holds digests alone, so that a copy of it lets no client in:

    <SHA-256 of a token, 64 hexadecimal digits>    # the runner in the VM

A plain hash is enough: `tsqp api-key NAME --digest` makes tokens of 32 random bytes.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import ssl
from dataclasses import dataclass
from pathlib import Path

from protocol.curve import read_text, require_only_we_read, require_only_we_write
from protocol.errors import KeyFileError, SettingsError

_MAX_LIST_BYTES = 2**20
_MAX_PEM_BYTES = 2**20
_DIGEST = re.compile("[0-9a-f]{64}")
_PEM = "a certificate and its key, as PEM, without a passphrase"


@dataclass(frozen=True)
class HttpKeys:
    """`tokens`: digests of those that are let in, None: everybody is. `certificate`, `key`: PEM."""

    tokens: frozenset[bytes] | None = None
    certificate: Path | None = None
    key: Path | None = None

    @classmethod
    def read(cls, tokens: Path | None, certificate: Path | None, key: Path | None) -> HttpKeys:
        """Read and check what the files hold. Raises KeyFileError, SettingsError."""
        if (certificate is None) != (key is None):
            given = "--http-key alone" if certificate is None else "--http-cert alone"
            raise SettingsError("TLS", got=given, expected="--http-cert and --http-key, or neither")
        if certificate is not None and key is not None:
            require_only_we_read(key, read_text(key, _MAX_PEM_BYTES)[1])
            try:
                # With a passphrase, so that none is asked for.
                ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key, "")
            except (OSError, ValueError) as error:  # an ssl.SSLError is an OSError
                got = getattr(error, "reason", None) or getattr(error, "strerror", None)
                raise SettingsError(
                    "--http-cert and --http-key", got=got or type(error).__name__, expected=_PEM
                ) from None
        return cls(None if tokens is None else read_tokens(tokens), certificate, key)


def read_tokens(path: Path) -> frozenset[bytes]:
    """Read digests of tokens. Raises KeyFileError that names the line, and quotes nothing.

    Refused: a file that others than us and root may write; a line that is no digest; an empty list,
    which is a slip.
    """
    allowed = set()
    text, status = read_text(path, _MAX_LIST_BYTES)
    require_only_we_write(path, status)
    for number, line in enumerate(text.splitlines(), 1):
        digest = line.partition("#")[0].strip()
        if not digest:
            continue
        if not _DIGEST.fullmatch(digest):
            got = f"{len(digest)} characters that are no digest"
            expected = "SHA-256 of a token, as 64 lower-case hexadecimal digits"
            raise KeyFileError(f"{path}: line {number}", got=got, expected=expected)
        allowed.add(digest.encode())
    if not allowed:
        raise KeyFileError(str(path), got="no digest", expected="one of a client's token a line")
    return frozenset(allowed)


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
