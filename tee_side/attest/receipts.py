"""Receipts: what a server signs of each of its answers, in a chain.

A receipt travels as a map of msgpack, and behind it 64 bytes: the Ed25519 signature of a domain tag
and that map, by the key of claim `receipt_key`. Each has the SHA-256 of the one before it, its
signature included, so that one that is left out, put in or moved shows.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from typing import Annotated, TypeAlias

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from pydantic import BaseModel, ConfigDict, Field

from protocol.codec import pack
from protocol.errors import EvidenceError
from tee_side.attest.claims import Digest, Name
from tee_side.attest.evidence import read_map

# In base64, 4 KiB; with the greatest numbers, a receipt has less than 900 bytes.
MAX_RECEIPT_BYTES = 3 * 1024
SIGNATURE_BYTES = 64
# What the first receipt of a key has in place of the one before it.
NO_RECEIPT = bytes(32)

_DOMAIN = b"TSQP receipt 1\0"

Count: TypeAlias = Annotated[int, Field(strict=True, ge=0, lt=2**63)]
Number: TypeAlias = Annotated[int, Field(strict=True)] | Annotated[float, Field(strict=True)]


class Receipt(BaseModel):
    """What was asked and answered; digests are SHA-256.

    `sequence`: how many receipts the key signed before; `previous`: digest of the last of them.
    `time`: seconds since 1970, by the server's clock. `model`, `policy`: as in its claims.
    `request`, `response`: of the bodies, the response's up to the receipt. `sampling`: parameters
    by name, as they were used; `seed`: of the first sample, None where none was asked for. Tokens
    are counted as the answer tells them.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    sequence: Count
    previous: Digest
    time: Annotated[int, Field(strict=True, ge=0, lt=2**37)]
    model: Digest
    policy: Digest
    request: Digest
    response: Digest
    sampling: dict[Name, Number]
    seed: Count | None
    prompt_tokens: Count
    completion_tokens: Count


def sign(key: Ed25519PrivateKey, receipt: Receipt) -> bytes:
    """Return a receipt with its signature behind it."""
    packed = pack(receipt.model_dump())
    return packed + key.sign(_DOMAIN + packed)


def verify(signed: bytes, public_key: bytes) -> Receipt:
    """Return the receipt that `sign` wrote with the key of these 32 bytes. Raises EvidenceError."""
    packed, signature = signed[:-SIGNATURE_BYTES], signed[-SIGNATURE_BYTES:]
    try:
        Ed25519PublicKey.from_public_bytes(public_key).verify(signature, _DOMAIN + packed)
    except (InvalidSignature, ValueError):
        expected = "one of the key that was given"
        raise EvidenceError("receipt", got="another signature", expected=expected) from None
    return read_map(Receipt, packed, "receipt", MAX_RECEIPT_BYTES)


class ReceiptChain:
    """Signs the receipts of one server, of one thread. `clock`: seconds since 1970."""

    def __init__(
        self,
        key: Ed25519PrivateKey,
        model: bytes,
        policy: bytes,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._key, self._model, self._policy, self._clock = key, model, policy, clock
        self._sequence, self._previous = 0, NO_RECEIPT

    def sign(self, **said: object) -> bytes:
        """Return the next receipt, signed. `said`: the fields that this chain does not know."""
        known = {"sequence": self._sequence, "previous": self._previous, "time": int(self._clock())}
        known |= {"model": self._model, "policy": self._policy}
        signed = sign(self._key, Receipt.model_validate(known | said))
        self._sequence, self._previous = self._sequence + 1, hashlib.sha256(signed).digest()
        return signed
