"""Receipts are signed and chained: a change of any byte, and one that is missing, is noticed."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any, TypeAlias

import pytest
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

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
    """Sign other fields than a server would."""
    ordered = {
        name: dict(sorted(value.items())) if isinstance(value, dict) else value
        for name, value in sorted(fields.items())
    }
    return signed_bytes(pack(ordered), tag)


def signed_bytes(packed: bytes, tag: bytes = DOMAIN) -> bytes:
    return packed + KEY.sign(tag + packed)


def sign(said: Receipt) -> bytes:
    return signed_bytes(said.encode())


def missing_in(chain: Sequence[bytes]) -> list[int]:
    """Return the places of receipts that do not follow the one before them."""
    found, before = [], bytes(32)
    for at, signed in enumerate(chain):
        if verify(signed, PUBLIC).previous != before:
            found.append(at)
        before = hashlib.sha256(signed).digest()
    return found


def chain_of(count: int) -> list[bytes]:
    chain = ReceiptChain(KEY, DIGESTS["model"], DIGESTS["policy"], lambda: 1_764_000_000.9)
    return [chain.sign(**ANSWER) for _ in range(count)]


@each_row("seed", [0, 11, 2**63 - 1, None])
def test_what_was_signed_is_read(seed: int | None) -> None:
    said = receipt(seed=seed)
    assert verify(sign(said), PUBLIC) == said


def test_a_receipt_is_a_map_and_a_signature_of_its_own_kind() -> None:
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
    for other in (b"", signed[:-1], signed[1:], signed + b"\0", signed[:64], signed[-64:]):
        with pytest.raises(EvidenceError, match="another signature"):
            verify(other, PUBLIC)


@each_row("field", [*FIELDS])
def test_no_field_can_be_another(field: str) -> None:
    value = FIELDS[field]
    other: Any = value + 1 if isinstance(value, int) else bytes(32)
    other = {"temperature": 0.6} if isinstance(value, dict) else other
    signed, changed = sign(receipt()), receipt(**{field: other})
    with pytest.raises(EvidenceError, match="another signature"):
        verify(pack(changed.model_dump()) + signed[-SIGNATURE_BYTES:], PUBLIC)


@each_row(
    ("key", "said"),
    [
        (PUBLIC[::-1], "receipt: got another signature, expected the key's"),
        (PUBLIC[:-1], "receipt key: got another, expected a public key of Ed25519, and no point"),
        (
            PUBLIC + b"\0",
            "receipt key: got another, expected a public key of Ed25519, and no point",
        ),
        (b"", "receipt key: got none, expected a public key of Ed25519, and no point of small"),
    ],
)
def test_another_key_is_none(key: bytes, said: str) -> None:
    with pytest.raises(EvidenceError, match=f"^{said}"):
        verify(sign(receipt()), key)


# edwards25519, of RFC 8032, 5.1: -x^2 + y^2 = 1 + d x^2 y^2 modulo P; L is the order of its base.
P, L = 2**255 - 19, 2**252 + 27742317777372353535851937790883648493
D = -121665 * pow(121666, -1, P)
Point: TypeAlias = tuple[int, int]
NEUTRAL = (0, 1)


def added(one: Point, other: Point) -> Point:
    (x, y), (u, v) = one, other
    both = D * x * y * u * v
    return (x * v + y * u) * pow(1 + both, -1, P) % P, (y * v + x * u) * pow(1 - both, -1, P) % P


def times(count: int, point: Point) -> Point:
    found = NEUTRAL
    for bit in f"{count:b}":
        found = added(found, found)
        found = added(found, point) if bit == "1" else found
    return found


def of_small_order() -> list[bytes]:
    """Return all encodings of the points of order 8 and less, those that no encoder writes too."""
    multiple, y = NEUTRAL, 1
    while times(4, multiple) == NEUTRAL:
        y += 1
        square = (y * y - 1) * pow(D * y * y + 1, -1, P) % P
        root = pow(square, (P + 3) // 8, P)
        for x in (root, root * pow(2, (P - 1) // 4, P) % P):
            if x * x % P == square:
                multiple = times(L, (x, y))
    found = set[bytes]()
    for x, y in (times(count, multiple) for count in range(8)):
        for same in (y, y + P):
            for sign in (x % 2, 1 if x == 0 else x % 2):
                if same < 2**255:
                    found.add((same + (sign << 255)).to_bytes(32, "little"))
    return sorted(found)


def forged(key: bytes, **fields: Any) -> bytes:
    """Make a receipt that passes under a key of small order, for which there is no secret.

    The equation is S B = R + h A. With S = 0 and the neutral point as R, it holds for each hash h
    that the order of A divides: some receipts, or times of one, are tried.
    """
    signature = (1).to_bytes(32, "little") + bytes(32)
    for time in range(1_764_000_000, 1_764_000_200):
        packed = receipt(time=time, **fields).encode()
        try:
            Ed25519PublicKey.from_public_bytes(key).verify(signature, DOMAIN + packed)
        except InvalidSignature:
            continue
        return packed + signature
    raise AssertionError("the library refuses this key")


def test_there_are_fourteen_encodings_of_small_order() -> None:
    assert len(of_small_order()) == 14
    assert bytes(32) in of_small_order()


@each_row("key", [*of_small_order()], ids=bytes.hex)
def test_a_point_of_small_order_is_no_key_though_receipts_pass_under_it(key: bytes) -> None:
    with pytest.raises(EvidenceError, match=r"^receipt key: got .*no point of small order$"):
        verify(forged(key), key)
    with pytest.raises(ValueError, match=r"receipt_key\n.*no point of small order"):
        Claims(**GOOD | {"receipt_key": key})


@each_row(
    ("change", "where"),
    [
        ({"sequence": -1}, "receipt.sequence"),
        ({"sequence": True}, "receipt.sequence"),
        ({"previous": bytes(31)}, "receipt.previous"),
        ({"request": "0" * 32}, "receipt.request"),
        ({"sampling": {"top_k": "secret"}}, "receipt.sampling"),
        ({"sampling": {"top_k": True}}, "receipt.sampling"),
        ({"time": 2**37}, "receipt.time"),
        ({"seed": 1.5}, "receipt.seed"),
        ({"prompt_tokens": None}, "receipt.prompt_tokens"),
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
    chain = chain_of(4)
    found = [verify(signed, PUBLIC) for signed in chain]
    assert [one.sequence for one in found] == [0, 1, 2, 3]
    assert found[0].previous == bytes(32)
    assert missing_in(chain) == []
    assert {one.time for one in found} == {1_764_000_000}
    assert {(one.model, one.policy) for one in found} == {(DIGESTS["model"], DIGESTS["policy"])}
    assert {one.prompt_tokens for one in found} == {3}


@each_row("at", range(4))
def test_a_receipt_that_is_missing_twice_there_or_moved_is_noticed(at: int) -> None:
    chain = chain_of(5)
    assert missing_in(chain[:at] + chain[at + 1 :]) == [at]
    assert missing_in([*chain[: at + 1], *chain[at:]]) == [at + 1]
    moved = [*chain[:at], chain[at + 1], chain[at], *chain[at + 2 :]]
    assert missing_in(moved)[0] == at
