"""Evidence as bytes, that of the simulated TEE, and statements in certificates."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from typing import Any

import msgpack
import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, generate_private_key
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding
from pydantic import ValidationError

from protocol.errors import EvidenceError
from tee_side.attest import simulated
from tee_side.attest.claims import Claims, report_data
from tee_side.attest.evidence import Evidence
from tee_side.attest.receipts import verify
from tee_side.attest.simulated import simulate, verify_simulated
from tee_side.attest.statement import EXTENSION, Statement, key_digest, read_certificate
from tee_side.serve.identity import certify
from tests.kit import evidence as identities
from tests.kit.rows import each_row
from tests.kit.snp_chain import make_report

GOOD: dict[str, Any] = {
    "kind": "snp",
    "report": b"r" * 1184,
    "certificates": (b"leaf", b"intermediate", b"root"),
    "collateral": b"",
    "gpus": {},
}
_GPU = {"certificates": [b"leaf"], "report": b"report"}
_SECRET = "written-by-the-peer"
_UNDECODABLE = "evidence: got undecodable msgpack"


def _packed(**changed: Any) -> bytes:
    fields = {name: value for name, value in {**GOOD, **changed}.items() if value is not ...}
    packed: bytes = msgpack.packb(dict(sorted(fields.items())))
    return packed


def test_what_is_written_is_read_and_does_not_change() -> None:
    for kind in ("snp", "tdx", "simulated"):
        evidence = Evidence(**{**GOOD, "kind": kind})
        assert Evidence.decode(evidence.encode()) == Evidence.decode(_packed(kind=kind)) == evidence
        with pytest.raises(ValidationError):
            evidence.kind = "snp"  # type: ignore[misc]
    found = Evidence.decode(_packed(gpus={"0": _GPU, "1": _GPU}))
    assert found.gpus["1"].certificates == (b"leaf",)
    assert found.encode() == _packed(gpus={"0": _GPU, "1": _GPU})
    room = Evidence.max_bytes - len(_packed(report=bytes(70_000))) + 70_000
    longest = _packed(report=bytes(room))
    assert len(longest) == Evidence.max_bytes
    assert len(Evidence.decode(longest).report) == room


def _twice() -> bytes:
    """Return a map with a key twice: two readers could take different ones."""
    packed = _packed()
    return bytes([packed[0] + 1]) + packed[1:] + msgpack.packb("kind") + msgpack.packb("tdx")


@each_row(
    ("data", "text"),
    [
        (bytes(Evidence.max_bytes + 1), "evidence: got 131073 bytes, expected at most 131072"),
        (b"", _UNDECODABLE),
        (_packed()[:-1], _UNDECODABLE),
        (_packed() + b"\0", _UNDECODABLE),
        (b"\xc0", "evidence: got NoneType, expected a map within limits"),
        (msgpack.packb({b"kind": "snp"}), _UNDECODABLE),
        (b"\xdc\xff\xff" * 21845, _UNDECODABLE),
        (b"\x91" * 60_000, _UNDECODABLE),
        (_twice(), f"{_UNDECODABLE} (ValueError: a duplicate key)"),
        (_packed(report=msgpack.ExtType(1, b"x")), _UNDECODABLE),
        *(
            (_packed(**{name: ...}), f"evidence.{name}: got nothing, expected a value")
            for name in ("kind", "report", "certificates", "collateral")
        ),
        (_packed(gpus=...), "evidence: got another encoding, expected names in order"),
        (_packed(gpus={"0": b""}), "evidence.gpus: got a value of type bytes, expected"),
        (_packed(gpus={"0": {**_GPU, _SECRET: 1}}), "evidence.gpus: got an unknown field"),
        (_packed(gpus={_SECRET: {**_GPU, "report": ""}}), "evidence.gpus: got a string of 0"),
        (_packed(gpus={f"{n}": _GPU for n in range(9)}), "evidence.gpus: got a _Map of 9 items"),
        (_packed(**{_SECRET: 1}), "evidence: got an unknown field, expected only those of the sch"),
        (_packed(kind=_SECRET), "evidence.kind: got a string of 19 characters, expected 'snp', 't"),
        (_packed(kind=None), "evidence.kind: got None"),
        (_packed(report=_SECRET), "evidence.report: got a string of 19 characters, expected a val"),
        (_packed(collateral=None), "evidence.collateral: got None, expected a valid bytes"),
        (_packed(certificates=b"x"), "evidence.certificates: got a value of type bytes, expected"),
        (_packed(certificates=[b"", _SECRET]), "evidence.certificates: got a string of 19 charact"),
        (_packed(certificates=[b""] * 65), _UNDECODABLE),
    ],
)
def test_refused(data: bytes, text: str) -> None:
    with pytest.raises(EvidenceError, match=f"^{re.escape(text)}") as caught:
        Evidence.decode(data)
    assert _SECRET not in str(caught.value)


MEASUREMENT, DATA = b"m" * 48, b"d" * 64
REPORT = simulate(DATA, MEASUREMENT).report
_SIGNED = len(REPORT) - 64
_STRANGER = Ed25519PrivateKey.from_private_bytes(bytes(32))


def test_what_the_simulated_tee_writes_is_read_everywhere() -> None:
    evidence = simulate(DATA, MEASUREMENT)
    assert (evidence.kind, evidence.certificates, evidence.collateral) == ("simulated", (), b"")
    assert verify_simulated(evidence.report) == (MEASUREMENT, DATA, "simulated")
    # Its key is the same everywhere, and so it proves nothing.
    assert evidence.report == REPORT


def _signed(data: bytes) -> bytes:
    return data + simulated._ROOT.sign(data)


def _flipped(at: int) -> bytes:
    return REPORT[:at] + bytes([REPORT[at] ^ 1]) + REPORT[at + 1 :]


def test_all_else_is_refused_as_a_simulated_report() -> None:
    others = [
        *(b"", b"x", REPORT[:-1], REPORT + b"\0", REPORT[1:], bytes(len(REPORT))),
        *(make_report(), REPORT[:_SIGNED], REPORT[:_SIGNED] + _STRANGER.sign(REPORT[:_SIGNED])),
        *(_signed(b""), _signed(REPORT[: _SIGNED - 1]), _signed(REPORT[:_SIGNED] + b"\0")),
        *(_signed(bytes(_SIGNED)), _signed(b"\0" + REPORT[1:_SIGNED])),
        *map(_flipped, range(len(REPORT))),
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
    assert certificate.not_valid_before_utc < NOW < certificate.not_valid_after_utc
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
        (b"", "certificate of the server"),
        (b"nothing", "certificate of the server"),
        (_with(None), "certificate of the server"),
        (_with(b"nothing"), "statement"),
        (_with(STATED.encode() + b"\0"), "statement"),
        (_with(STATED.encode()[:-1]), "statement"),
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
    signed = made.receipts().sign(
        request=bytes(32),
        response=bytes(32),
        sampling={},
        seed=None,
        prompt_tokens=1,
        completion_tokens=2,
    )
    receipt = verify(signed, claims.receipt_key or b"")
    assert (receipt.model, receipt.policy) == (
        identities.DIGESTS["model"],
        identities.DIGESTS["policy"],
    )
    for digest in identities.DIGESTS.values():
        assert digest.hex() in made.said


def test_its_certificate_has_the_same_claims_and_another_identity_no_key_of_them() -> None:
    made = identities.identity()
    stated, tls_key = read_certificate(made.certificate)
    certified, fresh, other = (
        Claims.decode(one).model_dump(exclude={"time"})
        for one in (
            stated.claims,
            made.state(bytes(32)).claims,
            identities.identity().state(b"").claims,
        )
    )
    assert certified["tls_key"] == tls_key
    assert certified == fresh | {"nonce": b""}
    for name in ("tls_key", "hpke_key", "receipt_key"):
        assert other.pop(name) != certified.pop(name)
    assert other == certified
