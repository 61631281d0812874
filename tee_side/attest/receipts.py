"""Receipts: what a server signs of each of its answers, in a chain.

A receipt travels as a map of msgpack, and behind it 64 bytes: the Ed25519 signature of a domain tag
and that map, by the key of claim `receipt_key`. Each has the SHA-256 of the one before it, its
signature included, so that one that is left out, put in or moved shows.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, TypeAlias

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from pydantic import Field

from protocol.errors import EvidenceError
from tee_side.attest.record import Digest, Name, Record

SIGNATURE_BYTES = 64
DOMAIN = b"TSQP receipt 1\0"
_P = 2**255 - 19  # Curve25519 is over the integers modulo this

Count: TypeAlias = Annotated[int, Field(ge=0, lt=2**63)]


class Receipt(Record):
    """What was asked and answered; digests are SHA-256.

    `sequence`: how many receipts the key signed before; `previous`: digest of the last of them.
    `time`: seconds since 1970, by the server's clock. `model`, `policy`: as in its claims.
    `request`, `response`: of the bodies, the response's up to the receipt. `sampling`: parameters
    by name, as they were used; `seed`: of the first sample, None where none was asked for. Tokens
    are counted as the answer tells them.
    """

    what: ClassVar[str] = "receipt"
    # In base64, 4 KiB; with the greatest numbers, a receipt has less than 900 bytes.
    max_bytes: ClassVar[int] = 3 * 1024

    sequence: Count
    previous: Digest
    time: Annotated[int, Field(ge=0, lt=2**37)]
    model: Digest
    policy: Digest
    request: Digest
    response: Digest
    sampling: dict[Name, int | float]
    seed: Count | None
    prompt_tokens: Count
    completion_tokens: Count


def require_key(encoded: bytes) -> bytes:
    """Return these 32 bytes, the public key that receipts are signed by. Raises ValueError.

    A point of small order is no key, and 32 zeros are one: under it, signatures of one message in
    eight or more need no secret. Such points have 14 encodings, and OpenSSL reads each of them.
    """
    y = int.from_bytes(encoded, "little") % 2**255  # without the sign of x
    # Of the orders 1, 2 and 4, y is 1, -1 and 0. Twice a point of order 8 is one of order 4:
    # x^2 = -y^2, in the curve's equation -x^2 + y^2 = 1 - 121665/121666 x^2 y^2 (RFC 8032, 5.1).
    if len(encoded) != 32 or not y * (y**2 - 1) * (121665 * y**4 - 243332 * y**2 + 121666) % _P:
        raise ValueError("a public key of Ed25519, and no point of small order")
    return encoded


def verify(signed: bytes, key: bytes) -> Receipt:
    """Return the receipt that a public key signed: see `require_key`. Raises EvidenceError."""
    packed, signature = signed[:-SIGNATURE_BYTES], signed[-SIGNATURE_BYTES:]
    try:
        Ed25519PublicKey.from_public_bytes(require_key(key)).verify(signature, DOMAIN + packed)
    except ValueError as error:
        got = "another" if any(key) else "none"
        raise EvidenceError("receipt key", got=got, expected=str(error)) from None
    except InvalidSignature:
        raise EvidenceError("receipt", got="another signature", expected="the key's") from None
    return Receipt.decode(packed)
