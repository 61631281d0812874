"""Claims, evidence, statements and receipts as bytes: one encoding, every byte of it checked."""

import hashlib
import re
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from typing import Any

import msgpack
import pytest
from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, generate_private_key
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding

from protocol.encoding import pack, unpack
from protocol.errors import EvidenceError
from tee_side.attest import guests
from tee_side.attest.guests import simulate, verify_simulated
from tee_side.attest.statement import (
    EXTENSION,
    SIGNATURE_BYTES,
    Claims,
    Evidence,
    Receipt,
    Statement,
    key_digest,
    read_certificate,
    report_data,
    verify_receipt,
)
from tee_side.serve.identity import ReceiptChain, certify
from tests.kit import evidence as identities
from tests.kit.rows import each_row

_DIGEST = bytes(range(32))
GOOD: dict[str, Any] = {
    "purpose": "serve",
    "nonce": b"n" * 32,
    "time": 1_780_000_000,
    "tls_key": _DIGEST,
    "hpke_suite": "mlkem768-x25519",
    "hpke_key": b"h" * 1216,
    "receipt_key": _DIGEST,
    "model": _DIGEST,
    "policy": _DIGEST,
    "settings": _DIGEST,
    "curve_keys": {"service 0": _DIGEST, "runner": _DIGEST},
    "plugins": {},
    "gpus": {},
    "attested_services": "none",
    "version": "0.1.0",
}
_SECRET = "written-by-the-peer"


def _in_order(fields: dict[str, Any]) -> dict[str, Any]:
    return {
        name: _in_order(value) if isinstance(value, dict) else value
        for name, value in sorted(fields.items())
    }


def _of(good: dict[str, Any], changed: dict[str, Any]) -> bytes:
    """Pack fields in order; those that are `...` are left out."""
    fields = {name: value for name, value in {**good, **changed}.items() if value is not ...}
    packed: bytes = msgpack.packb(_in_order(fields))
    return packed


def _packed(**changed: Any) -> bytes:
    return _of(GOOD, changed)


def test_what_is_written_is_read() -> None:
    claims = Claims(**GOOD)
    assert claims.encode() == _packed()
    assert Claims.decode(_packed()) == claims
    # The digest is of the bytes behind the domain.
    expected = hashlib.sha512(b"TSQP attestation claims 1\0" + _packed()).digest()
    assert report_data(_packed()) == expected
    for changed in (
        {"purpose": "key", "nonce": b"", "receipt_key": None, "time": 2**53 - 1},
        {"curve_keys": {f"service {n}": _DIGEST for n in range(255)}, "version": "v" * 256},
    ):
        assert Claims.decode(_packed(**changed)) == Claims(**{**GOOD, **changed})


_NO_KEY = "got a value of type bytes, expected a public key of Ed25519, and no point of small"
_LONG = "claims: got undecodable msgpack"
_OTHER = "claims: got another encoding, expected names in order"


@each_row(
    ("data", "text"),
    [
        (bytes(Claims.max_bytes + 1), "claims: got 16385 bytes, expected at most 16384"),
        *((_packed(**{name: True}), f"claims.{name}: got ") for name in GOOD),
        *((_packed(version=text), "claims.version: got a string of") for text in ("\x1b[2J", "ü")),
        *(
            (_packed(**{name: ...}), f"claims.{name}: got nothing, expected a value")
            for name in GOOD
            if name != "gpus"
        ),
        (_packed(gpus=...), _OTHER),
        (_packed(**{_SECRET: 1}), "claims: got an unknown field, expected only those of the"),
        (_packed(purpose="any"), "claims.purpose: got a string of 3 characters, expected"),
        (_packed(receipt_key=bytes(32)), f"claims.receipt_key: {_NO_KEY}"),
        (_packed(nonce=b"n" * 33), "claims.nonce: got a value of type bytes, expected"),
        (_packed(time=2**53), "claims.time: got a large integer, expected"),
        *(
            (_packed(**{name: bytes(size)}), f"claims.{name}: got a value of type bytes, expected")
            for name in ("tls_key", "receipt_key", "model", "policy", "settings")
            for size in (31, 33)
        ),
        (_packed(hpke_suite="none"), "claims.hpke_suite: got a string of 4 characters, expected"),
        (_packed(hpke_key=bytes(2049)), "claims.hpke_key: got a value of type bytes, expected"),
        (_packed(version="v" * 257), _LONG),
        (_packed(curve_keys={f"{_SECRET}.x": None}), "claims.curve_keys: got None, expected"),
        (_packed(curve_keys={f"{n}": _DIGEST for n in range(257)}), _LONG),
        # The same in another order, and with a longer form of a length or number.
        (msgpack.packb(dict(reversed(_in_order(GOOD).items()))), _OTHER),
        (msgpack.packb(_in_order(GOOD) | {"curve_keys": GOOD["curve_keys"]}), _OTHER),
        (_packed().replace(b"\xc4\x20" + b"n" * 32, b"\xc5\x00\x20" + b"n" * 32), _OTHER),
        (_packed(time=5).replace(b"\xa4time\x05", b"\xa4time\xcc\x05"), _OTHER),
    ],
)
def test_refused(data: bytes, text: str) -> None:
    with pytest.raises(EvidenceError, match=f"^{re.escape(text)}") as caught:
        Claims.decode(data)
    assert _SECRET not in str(caught.value)


EVIDENCE: dict[str, Any] = {
    "kind": "snp",
    "report": b"r" * 1184,
    "certificates": (b"leaf", b"intermediate", b"root"),
    "collateral": b"",
    "gpus": {},
}
_GPU = {"certificates": [b"leaf"], "report": b"report"}
_UNDECODABLE = "evidence: got undecodable msgpack"


def _evidence(**changed: Any) -> bytes:
    return _of(EVIDENCE, changed)


_TWICE = bytes([_evidence()[0] + 1]) + _evidence()[1:] + msgpack.packb("kind") + msgpack.packb("x")


@each_row(
    ("data", "text"),
    [
        (bytes(Evidence.max_bytes + 1), "evidence: got 131073 bytes, expected at most 131072"),
        (_evidence() + b"\0", _UNDECODABLE),
        (b"\xc0", "evidence: got NoneType, expected a map within limits"),
        # Of a key twice, two readers could take different ones.
        (_TWICE, f"{_UNDECODABLE} (ValueError: a duplicate key)"),
        (_evidence(report=...), "evidence.report: got nothing, expected a value"),
        (_evidence(gpus=...), "evidence: got another encoding, expected names in order"),
        (_evidence(gpus={"0": {**_GPU, _SECRET: 1}}), "evidence.gpus: got an unknown field"),
        (_evidence(gpus={_SECRET: {**_GPU, "report": ""}}), "evidence.gpus: got a string of 0"),
        (_evidence(gpus={f"{n}": _GPU for n in range(9)}), "evidence.gpus: got a _Map of 9 items"),
        (_evidence(**{_SECRET: 1}), "evidence: got an unknown field, expected only those"),
        (_evidence(kind=_SECRET), "evidence.kind: got a string of 19 characters, expected 'snp'"),
        (_evidence(certificates=[b"", _SECRET]), "evidence.certificates: got a string of 19"),
    ],
)
def test_evidence_of_another_form_is_refused(data: bytes, text: str) -> None:
    good = _evidence(gpus={"0": _GPU, "1": _GPU})
    assert Evidence.decode(good).encode() == good
    with pytest.raises(EvidenceError, match=f"^{re.escape(text)}") as caught:
        Evidence.decode(data)
    assert _SECRET not in str(caught.value)


MEASUREMENT, DATA = b"m" * 48, b"d" * 64
REPORT = simulate(DATA, MEASUREMENT).report
_SIGNED = len(REPORT) - 64
_OTHER_KIND = b"\0" + REPORT[1:_SIGNED]
_STRANGER = Ed25519PrivateKey.from_private_bytes(bytes(32))


def test_all_else_is_refused_as_a_simulated_report() -> None:
    assert verify_simulated(simulate(DATA, MEASUREMENT).report) == (MEASUREMENT, DATA)
    places = range(0, len(REPORT), 5)
    others = [
        *(b"", REPORT[:-1], REPORT + b"\0", REPORT[:_SIGNED] + _STRANGER.sign(REPORT[:_SIGNED])),
        *(data + guests._ROOT.sign(data) for data in (REPORT[:_SIGNED] + b"\0", _OTHER_KIND)),
        *(REPORT[:at] + bytes([REPORT[at] ^ 1]) + REPORT[at + 1 :] for at in places),
    ]
    for other in others:
        with pytest.raises(EvidenceError, match="simulated report: got other bytes"):
            verify_simulated(other)


NOW = datetime(2026, 11, 26, tzinfo=UTC)
STATED = Statement(claims=b"claims", evidence=b"evidence")


def test_a_certificate_has_a_statement_and_its_own_key() -> None:
    key = generate_private_key(SECP256R1())
    made = certify(key, STATED, NOW, timedelta(days=2))
    assert read_certificate(made) == (STATED, key_digest(key.public_key()))
    certificate = x509.load_der_x509_certificate(made)
    certificate.verify_directly_issued_by(certificate)
    extension = certificate.extensions.get_extension_for_oid(EXTENSION)
    # Others may pass over it; and the key can issue nothing.
    assert not extension.critical
    basic = certificate.extensions.get_extension_for_class(x509.BasicConstraints)
    assert not basic.value.ca
    assert certificate.not_valid_before_utc < NOW
    assert certificate.not_valid_after_utc == NOW + timedelta(days=2)


def _with(content: bytes | None) -> bytes:
    key = generate_private_key(SECP256R1())
    name = x509.Name([])
    builder = x509.CertificateBuilder(name, name, key.public_key(), 1, NOW, NOW)
    if content is not None:
        builder = builder.add_extension(x509.UnrecognizedExtension(EXTENSION, content), False)
    return builder.sign(key, SHA256()).public_bytes(Encoding.DER)


@each_row(
    ("encoded", "where"),
    [
        (b"nothing", "certificate of the server"),
        (_with(None), "certificate of the server"),
        (_with(STATED.encode() + b"\0"), "statement"),
    ],
)
def test_another_certificate_is_refused(encoded: bytes, where: str) -> None:
    with pytest.raises(EvidenceError) as refused:
        read_certificate(encoded)
    assert refused.value.where.startswith(where)


def test_an_identity_says_what_it_runs_and_which_keys_it_has() -> None:
    made = identities.identity()
    nonce = bytes(range(32))
    stated = made.state(nonce)
    claims = Claims.decode(stated.claims)
    assert claims.nonce == nonce
    assert {name: getattr(claims, name) for name in identities.DIGESTS} == identities.DIGESTS
    assert claims.curve_keys["service 1"] == identities.SERVICE
    assert claims.tls_key == key_digest(made.tls_key.public_key())
    assert (claims.hpke_suite, claims.hpke_key) == (made.hpke_key.suite, made.hpke_key.public)
    found = verify_simulated(Evidence.decode(stated.evidence).report)
    assert (found.measurement, found.report_data) == (
        identities.MEASUREMENT,
        report_data(stated.claims),
    )
    answer: dict[str, Any] = {"request": bytes(32), "response": bytes(32), "sampling": {}}
    signed = made.receipts.sign(**answer, seed=None, prompt_tokens=1, completion_tokens=2)
    receipt = verify_receipt(signed, claims.receipt_key or b"")
    digests = identities.DIGESTS
    assert (receipt.model, receipt.policy) == (digests["model"], digests["policy"])
    # Its certificate has the same claims, and another identity no key of them.
    stated, tls_key = read_certificate(made.certificate)
    certified, other = Claims.decode(stated.claims), identities.identity().state(b"")
    assert certified.tls_key == tls_key
    assert certified == claims.model_copy(update={"nonce": b"", "time": certified.time})
    for name in ("tls_key", "hpke_key", "receipt_key"):
        assert getattr(Claims.decode(other.claims), name) != getattr(certified, name)


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
        assert verify_receipt(sign(receipt(seed=seed)), PUBLIC) == receipt(seed=seed)
    signed = sign(receipt())
    packed, signature = signed[:-SIGNATURE_BYTES], signed[-SIGNATURE_BYTES:]
    assert unpack(packed, where="", max_bytes=2**20, max_containers=64) == FIELDS
    KEY.public_key().verify(signature, DOMAIN + packed)
    for tag in (b"", b"TSQP attestation claims 1\0"):
        with pytest.raises(EvidenceError, match="another signature"):
            verify_receipt(signed_map(FIELDS, tag), PUBLIC)


def test_no_bit_of_a_receipt_can_be_changed() -> None:
    signed = sign(receipt())
    for at in range(len(signed)):
        for bit in (1, 0x80):
            changed = bytearray(signed)
            changed[at] ^= bit
            with pytest.raises(EvidenceError, match="another signature"):
                verify_receipt(bytes(changed), PUBLIC)
    with pytest.raises(EvidenceError, match="another signature"):
        verify_receipt(signed, PUBLIC[::-1])
    for other in (b"", signed[:-1], signed[1:], signed + b"\0", signed[:64], signed[-64:]):
        with pytest.raises(EvidenceError, match="another signature"):
            verify_receipt(other, PUBLIC)


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
            verify_receipt(sign(receipt()), key)
        with pytest.raises(ValueError, match=r"receipt_key\n.*no point of small order"):
            Claims(**GOOD | {"receipt_key": key})
    for key in (PUBLIC[:-1], b""):
        with pytest.raises(EvidenceError, match=r"^receipt key: got .*no point of small order$"):
            verify_receipt(sign(receipt()), key)


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
        verify_receipt(forged + signature, bytes(32))


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
        verify_receipt(signed_map(FIELDS | change), PUBLIC)
    assert refused.value.where == where
    assert "secret" not in str(refused.value)


def test_a_server_signs_one_after_another() -> None:
    chain = ReceiptChain(KEY, DIGESTS["model"], DIGESTS["policy"], lambda: 1_764_000_000.9)
    signed = [chain.sign(**ANSWER) for _ in range(4)]
    found = [verify_receipt(one, PUBLIC) for one in signed]
    assert [one.sequence for one in found] == [0, 1, 2, 3]
    before = [bytes(32), *(hashlib.sha256(one).digest() for one in signed)]
    assert [one.previous for one in found] == before[:-1]
    assert {one.time for one in found} == {1_764_000_000}
    assert {(one.model, one.policy) for one in found} == {(DIGESTS["model"], DIGESTS["policy"])}
    assert {one.prompt_tokens for one in found} == {3}
