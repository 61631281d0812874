"""Bodies sealed to the attested HPKE key, for clients behind a proxy that ends TLS.

    request     HPKE of 32 random bytes (the secret), to the key of claim `hpke_key` | chunk ...
    response    32 random bytes | chunk ...
    chunk       1 byte: 1 in the last one, 0 before | length of the rest, 4 bytes, big-endian
                | AES-256-GCM of 64 KiB at most, its tag at the end

- The first chunk of each is a head (`tee_side.serve.sealed_heads`). The others are the body.
- HPKE is `tee_side.serve.hpke_key`'s. Its `info` is a domain tag and the request's target, so that
  a request opens at no other path.
- The key of a direction comes from the secret by HKDF-SHA256. The salt is what stands before the
  chunks: a request that is answered twice has two keys for its answers. A chunk's nonce is its
  index, and the 5 bytes in front of it are its associated data: a body that was cut, added to or
  put in another order does not open.
- A proxy sees targets, lengths and times. The HPKE key lasts as long as the program: whoever gets
  it can open what was recorded before.
"""

from __future__ import annotations

import secrets
import struct
from functools import partial
from typing import Literal

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from protocol.errors import ErrorCode, ProtocolError
from tee_side.serve.hpke_key import KEY_BYTES, HpkeKey, SuiteName, seal

CONTENT_TYPE = "message/tsqp-sealed"
CHUNK_BYTES = 64 * 1024
SALT_BYTES = 32  # of a response

_TAG_BYTES = 16
_FRONT = struct.Struct("!BI")
_DOMAIN = b"TSQP sealed body 1\0"

_refused = partial(ProtocolError, "sealed body", code=ErrorCode.MALFORMED_MESSAGE)


def seal_secret(suite: SuiteName, public: bytes, target: bytes) -> tuple[bytes, bytes]:
    """Return a new secret and how it is sealed, for a request to a target: its path and query.

    Raises ProtocolError where `public` is no key of `suite`.
    """
    secret = secrets.token_bytes(KEY_BYTES)
    return secret, seal(suite, public, _DOMAIN + target, secret)


def open_secret(key: HpkeKey, sealed: bytes, target: bytes) -> bytes:
    """Return the secret of a request to a target. Raises ProtocolError."""
    return key.open(sealed, _DOMAIN + target)


class Direction:
    """Seals one direction, a request or a response, or opens it. `salt`: what stands before it."""

    def __init__(self, name: Literal[b"request", b"response"], salt: bytes, secret: bytes) -> None:
        key = HKDF(SHA256(), KEY_BYTES, salt, _DOMAIN + name).derive(secret)
        self._cipher, self._count, self._data, self._ended = AESGCM(key), 0, bytearray(), False

    def seal(self, piece: bytes, *, final: bool = False) -> bytes:
        """Return the chunks of a piece of any size. `final`: none follows."""
        sealed = []
        for at in range(0, len(piece) or 1, CHUNK_BYTES):
            part, last = piece[at : at + CHUNK_BYTES], at + CHUNK_BYTES >= len(piece)
            front = _FRONT.pack(final and last, len(part) + _TAG_BYTES)
            sealed += [front, self._cipher.encrypt(self._count.to_bytes(12), part, front)]
            self._count += 1
        return b"".join(sealed)

    def open(self, data: bytes) -> list[bytes]:
        """Take the next bytes; return the chunks that they complete. Raises ProtocolError."""
        self._data += data
        chunks = []
        while not self._ended and len(self._data) >= _FRONT.size:
            final, length = _FRONT.unpack_from(self._data)
            if length > CHUNK_BYTES + _TAG_BYTES:
                raise _refused(got="a longer chunk", expected=f"{CHUNK_BYTES} bytes at most")
            end = _FRONT.size + length
            if len(self._data) < end:
                break
            front, sealed = bytes(self._data[: _FRONT.size]), bytes(self._data[_FRONT.size : end])
            try:
                chunks.append(self._cipher.decrypt(self._count.to_bytes(12), sealed, front))
            except InvalidTag:
                raise _refused(got="other bytes", expected="the next chunk") from None
            del self._data[:end]
            self._count, self._ended = self._count + 1, bool(final)
        if self._ended and self._data:
            raise _refused(got="more bytes", expected="none behind the last chunk")
        return chunks

    def close(self) -> None:
        """Take note that no more bytes come. Raises ProtocolError: the last chunk is missing."""
        if not self._ended:
            raise _refused(got="an early end", expected="the last chunk")
