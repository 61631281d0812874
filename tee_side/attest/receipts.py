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


def verify(signed: bytes, public_key: bytes) -> Receipt:
    """Return the receipt that the key of these 32 bytes signed. Raises EvidenceError."""
    packed, signature = signed[:-SIGNATURE_BYTES], signed[-SIGNATURE_BYTES:]
    try:
        Ed25519PublicKey.from_public_bytes(public_key).verify(signature, DOMAIN + packed)
    except (InvalidSignature, ValueError):
        expected = "one of the key that was given"
        raise EvidenceError("receipt", got="another signature", expected=expected) from None
    return Receipt.decode(packed)
