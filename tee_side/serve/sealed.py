"""The sealed form of requests and answers, for clients behind a proxy that ends TLS.

    request     HPKE of 32 random bytes (the secret), to the key of claim `hpke_key` | chunk ...
    response    32 random bytes | chunk ...
    chunk       1 byte: 1 in the last one, 0 before | length of the rest, 4 bytes, big-endian
                | AES-256-GCM of 64 KiB at most, its tag at the end

- The first chunk of each is a head, so that a proxy does not read it: a map of msgpack. A request's
  has every header, an API key among them; a response's has the status. The other chunks are the
  body.
- HPKE is RFC 9180's in base mode, with HKDF-SHA256 and AES-256-GCM. What is sealed to the attested
  key of an enclave opens in that enclave alone. HPKE's `info` is a domain tag of the caller's and
  more: what was sealed for one purpose opens for no other. Here it holds the request's target, so
  that a request opens at no other path.
- The key of a direction comes from the secret by HKDF-SHA256. The salt is what stands before the
  chunks: a request that is answered twice has two keys for its answers. A chunk's nonce is its
  index, and the 5 bytes in front of it are its associated data: a body that was cut, added to or
  put in another order does not open.
- A proxy sees targets, lengths and times. The HPKE key lasts as long as the program: a
  party that gets it can open what it recorded before.

The server (`tee_side.serve.identity`) and the client (`tsqp.client.transports`) share this module.
"""

import secrets
import struct
from collections.abc import Iterable
from contextlib import suppress
from typing import Annotated, Literal, Self, TypeAlias

from cryptography.exceptions import InvalidTag, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, hpke
from cryptography.hazmat.primitives.asymmetric import mlkem, x25519
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from pydantic import Field

from protocol.encoding import pack, unpack
from protocol.errors import ProtocolError
from protocol.validation import Strict, validate

SuiteName: TypeAlias = Literal["mlkem768-x25519", "x25519"]

KEY_BYTES = 32  # of X25519, and of what is sealed: keys of AES-256

_KEMS = {"mlkem768-x25519": hpke.KEM.MLKEM768_X25519, "x25519": hpke.KEM.X25519}

_TAG_BYTES = 16


class HpkeKey:
    """A private key, in memory alone. `public`: its public key, of `suite`.

    `hybrid`: with ML-KEM-768 where the library has it, whose public key stands before X25519's.
    `sealed_bytes`: of a key that is sealed to it.
    """

    def __init__(self, *, hybrid: bool = True) -> None:
        key = x25519.X25519PrivateKey.generate()
        self._private: x25519.X25519PrivateKey | hpke.MLKEM768X25519PrivateKey = key
        self.suite: SuiteName = "x25519"
        self.public = key.public_key().public_bytes_raw()
        with suppress(UnsupportedAlgorithm):
            if hybrid:
                other = mlkem.MLKEM768PrivateKey.generate()
                self._private = hpke.MLKEM768X25519PrivateKey(other, key)
                self.suite = "mlkem768-x25519"
                self.public = other.public_key().public_bytes_raw() + self.public
        self.sealed_bytes = _KEMS[self.suite].enc_length() + KEY_BYTES + _TAG_BYTES

    def open(self, sealed: bytes, info: bytes) -> bytes:
        """Return what was sealed to this key. Raises ProtocolError."""
        with ProtocolError.instead_of(
            InvalidTag,
            "HPKE",
            "another key, purpose or content",
            "bytes that were sealed to this key, for this purpose",
        ):
            return _hpke(self.suite).decrypt(sealed, self._private, info)


def seal(suite: SuiteName, public: bytes, info: bytes, plain: bytes) -> bytes:
    """Return bytes sealed to a public key. Raises ProtocolError where it is no key of `suite`."""
    first = public[:-KEY_BYTES]
    with ProtocolError.instead_of(
        (TypeError, ValueError), "HPKE", "another public key", f"one of {suite}"
    ):
        key: x25519.X25519PublicKey | hpke.MLKEM768X25519PublicKey
        key = last = x25519.X25519PublicKey.from_public_bytes(public[-KEY_BYTES:])
        if first:
            key = hpke.MLKEM768X25519PublicKey(
                mlkem.MLKEM768PublicKey.from_public_bytes(first), last
            )
        return _hpke(suite).encrypt(plain, key, info)


def _hpke(suite: SuiteName) -> hpke.Suite:
    return hpke.Suite(_KEMS[suite], hpke.KDF.HKDF_SHA256, hpke.AEAD.AES_256_GCM)


CONTENT_TYPE = "message/tsqp-sealed"

CHUNK_BYTES = 64 * 1024

SALT_BYTES = 32  # of a response

_FRONT = struct.Struct("!BI")

_DOMAIN = b"TSQP sealed body 1\0"

_BODY = "sealed body"


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
        key = HKDF(hashes.SHA256(), KEY_BYTES, salt, _DOMAIN + name).derive(secret)
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
            ProtocolError.unless(
                length <= CHUNK_BYTES + _TAG_BYTES,
                _BODY,
                "a longer chunk",
                f"{CHUNK_BYTES} bytes at most",
            )
            end = _FRONT.size + length
            if len(self._data) < end:
                break
            front, sealed = bytes(self._data[: _FRONT.size]), bytes(self._data[_FRONT.size : end])
            try:
                chunks.append(self._cipher.decrypt(self._count.to_bytes(12), sealed, front))
            except InvalidTag:
                raise ProtocolError(_BODY, "other bytes", "the next chunk") from None
            del self._data[:end]
            self._count, self._ended = self._count + 1, bool(final)
        ProtocolError.unless(
            not self._ended or not self._data, _BODY, "more bytes", "none behind the last chunk"
        )
        return chunks

    def close(self) -> None:
        """Take note that no more bytes come. Raises ProtocolError: the last chunk is missing."""
        ProtocolError.unless(self._ended, _BODY, "an early end", "the last chunk")


_MAX_HEADERS = 128

Name: TypeAlias = Annotated[str, Field(pattern=r"\A[!-9;-~]{1,64}\z")]


class Head(Strict):
    """What both have: headers, by names in small letters."""

    headers: dict[Name, bytes]

    def raw(self) -> list[tuple[bytes, bytes]]:
        """Return the headers as pairs."""
        return [(name.encode(), value) for name, value in self.headers.items()]

    def encode(self) -> bytes:
        """Return it as bytes; what is more than a chunk can have is refused where it is opened."""
        return pack(self.model_dump())

    @classmethod
    def decode(cls, chunk: bytes) -> Self:
        """Read what the other side sent. Raises ProtocolError."""
        where = "sealed head"
        most = {"max_bytes": CHUNK_BYTES, "max_containers": _MAX_HEADERS}
        return validate(cls, unpack(chunk, where=where, **most), where)


class RequestHead(Head):
    """The head of a request. `time`: seconds since 1970, by the client's clock."""

    time: Annotated[int, Field(ge=0, lt=2**53)]
    method: Annotated[str, Field(pattern=r"\A[A-Z]{1,16}\z")]


class ResponseHead(Head):
    """The head of a response."""

    status: Annotated[int, Field(ge=200, le=599)]


def joined(headers: Iterable[tuple[bytes, bytes]]) -> dict[str, bytes]:
    """Return pairs as a head has them; those of one name are one, with commas (RFC 9110, 5.3)."""
    found: dict[str, bytes] = {}
    for raw, value in headers:
        name = raw.decode("latin-1").lower()
        found[name] = found[name] + b", " + value if name in found else value
    return found


def target_of(path: bytes, query: bytes) -> bytes:
    """Return the target that a request is sealed to: path and query as they are sent."""
    return path + b"?" + query if query else path
