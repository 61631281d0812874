"""Receipts are signed and chained: a change of any byte, and one that is missing, is noticed."""

from __future__ import annotations

import hashlib
from contextlib import suppress
from typing import Any

import pytest
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import (
    Ed25519PrivateKey,
    Ed25519PublicKey,
)

from protocol.codec import pack, unpack
from protocol.errors import EvidenceError
from tee_side.attest.claims import Claims
from tee_side.attest.receipts import SIGNATURE_BYTES, Receipt, verify
from tee_side.serve.receipt_chain import ReceiptChain
from tests.kit.rows import each_row
from tests.unit.tee_side.attest.test_claims import GOOD

KEY = Ed25519PrivateKey.from_private_bytes(bytes(range(32)))
PUBLIC = KEY.public_key().public_bytes_raw()
DOMAIN = b"TSQP receipt 1\0"
DIGESTS = {
    name: hashlib.sha256(name.encode()).digest()
    for name in ("previous", "model", "policy", "request", "response")
}
FIELDS: dict[str, Any] = {
    **DIGESTS,
    "sequence": 7,
    "time": 1_764_000_000,
    "sampling": {"temperature": 0.5, "top_k": 40, "n": 2},
    "seed": 11,
    "prompt_tokens": 12,
    "completion_tokens": 24,
}
ANSWER: dict[str, Any] = {
    "request": DIGESTS["request"],
    "response": DIGESTS["response"],
    "sampling": {},
    "seed": None,
    "prompt_tokens": 3,
    "completion_tokens": 0,
}


def receipt(**changes: Any) -> Receipt:
    return Receipt.model_validate(FIELDS | changes)


def signed_map(fields: dict[str, Any], tag: bytes = DOMAIN) -> bytes:
    ordered = {
        name: dict(sorted(value.items())) if isinstance(value, dict) else value
        for name, value in sorted(fields.items())
    }
    return signed_bytes(pack(ordered), tag)


def signed_bytes(packed: bytes, tag: bytes = DOMAIN) -> bytes:
    return packed + KEY.sign(tag + packed)


def sign(said: Receipt) -> bytes:
    return signed_bytes(said.encode())


def test_a_receipt_is_a_map_and_a_signature_of_its_own_kind() -> None:
    for seed in (0, 2**63 - 1, None):
        assert verify(sign(receipt(seed=seed)), PUBLIC) == receipt(seed=seed)
    signed = sign(receipt())
    packed, signature = signed[:-SIGNATURE_BYTES], signed[-SIGNATURE_BYTES:]
    assert unpack(packed, where="", max_bytes=2**20, max_containers=64) == FIELDS
    KEY.public_key().verify(signature, DOMAIN + packed)
    for tag in (b"", b"TSQP attestation claims 1\0"):
        with pytest.raises(EvidenceError, match="another signature"):
            verify(signed_map(FIELDS, tag), PUBLIC)


def test_no_bit_of_a_receipt_can_be_changed() -> None:
    signed = sign(receipt())
    for at in range(len(signed)):
        for bit in (1, 0x80):
            changed = bytearray(signed)
            changed[at] ^= bit
            with pytest.raises(EvidenceError, match="another signature"):
                verify(bytes(changed), PUBLIC)
    with pytest.raises(EvidenceError, match="another signature"):
        verify(signed, PUBLIC[::-1])
    for other in (b"", signed[:-1], signed[1:], signed + b"\0", signed[:64], signed[-64:]):
        with pytest.raises(EvidenceError, match="another signature"):
            verify(other, PUBLIC)


# The y of all points of order 8 and less on edwards25519, as no encoder writes them too. Under such
# a key, for which there is no secret, some receipts pass: h A is the neutral point for some h.
P = 2**255 - 19
ORDER_8 = 0x05FC536D880238B13933C6D305ACDFD5F098EFF289F4C345B027B2C28F95E826
SMALL = [0, 1, ORDER_8, P - ORDER_8, P - 1, P, P + 1]


@each_row("y", SMALL, ids=hex)
def test_a_point_of_small_order_is_no_key(y: int) -> None:
    for sign_bit in (0, 1 << 255):
        key = (y + sign_bit).to_bytes(32, "little")
        with pytest.raises(EvidenceError, match=r"^receipt key: got .*no point of small order$"):
            verify(sign(receipt()), key)
        with pytest.raises(ValueError, match=r"receipt_key\n.*no point of small order"):
            Claims(**GOOD | {"receipt_key": key})
    for key in (PUBLIC[:-1], b""):
        with pytest.raises(EvidenceError, match=r"^receipt key: got .*no point of small order$"):
            verify(sign(receipt()), key)


def test_a_receipt_that_was_made_without_a_secret_is_refused() -> None:
    """Under 32 zeros, of order 4, the neutral point and 0 sign one message in four."""
    signature = bytes([1]) + bytes(63)
    for sequence in range(64):
        forged = receipt(sequence=sequence).encode()
        with suppress(InvalidSignature):
            Ed25519PublicKey.from_public_bytes(bytes(32)).verify(signature, DOMAIN + forged)
            break
    else:
        pytest.fail("no message has that signature")
    with pytest.raises(EvidenceError, match=r"^receipt key: got .*no point of small order$"):
        verify(forged + signature, bytes(32))


@each_row(
    ("change", "where"),
    [
        ({"sequence": -1}, "receipt.sequence"),
        ({"previous": bytes(31)}, "receipt.previous"),
        ({"request": "0" * 32}, "receipt.request"),
        ({"sampling": {"top_k": "secret"}}, "receipt.sampling"),
        ({"time": 2**37}, "receipt.time"),
        ({"seed": 1.5}, "receipt.seed"),
        ({"secret": 1}, "receipt"),
        ({"previous": bytes(Receipt.max_bytes)}, "receipt"),
    ],
)
def test_what_is_signed_and_no_receipt_is_refused_and_not_repeated(
    change: dict[str, Any], where: str
) -> None:
    with pytest.raises(EvidenceError) as refused:
        verify(signed_map(FIELDS | change), PUBLIC)
    assert refused.value.where == where
    assert "secret" not in str(refused.value)


def test_a_server_signs_one_after_another() -> None:
    chain = ReceiptChain(KEY, DIGESTS["model"], DIGESTS["policy"], lambda: 1_764_000_000.9)
    signed = [chain.sign(**ANSWER) for _ in range(4)]
    found = [verify(one, PUBLIC) for one in signed]
    assert [one.sequence for one in found] == [0, 1, 2, 3]
    before = [bytes(32), *(hashlib.sha256(one).digest() for one in signed)]
    assert [one.previous for one in found] == before[:-1]
    assert {one.time for one in found} == {1_764_000_000}
    assert {(one.model, one.policy) for one in found} == {(DIGESTS["model"], DIGESTS["policy"])}
    assert {one.prompt_tokens for one in found} == {3}
