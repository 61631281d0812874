"""Tests of statements, in certificates and of identities."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, generate_private_key
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding

from protocol.errors import EvidenceError
from tee_side.attest.claims import Claims, report_data
from tee_side.attest.evidence import Evidence
from tee_side.attest.receipts import verify
from tee_side.attest.simulated import verify_simulated
from tee_side.attest.statement import EXTENSION, Statement, key_digest, read_certificate
from tee_side.serve.identity import certify
from tests.kit.evidence import DIGESTS, MEASUREMENT, SERVICE, identity
from tests.kit.rows import each_row

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
    made = identity()
    nonce = bytes(range(32))
    stated = made.state(nonce)
    claims = Claims.decode(stated.claims)
    assert claims.nonce == nonce
    assert {name: getattr(claims, name) for name in DIGESTS} == DIGESTS
    assert claims.curve_keys["service 1"] == SERVICE
    assert claims.tls_key == key_digest(made.tls_key.public_key())
    assert (claims.hpke_suite, claims.hpke_key) == (made.hpke_key.suite, made.hpke_key.public)
    found = verify_simulated(Evidence.decode(stated.evidence).report)
    assert (found.measurement, found.report_data) == (MEASUREMENT, report_data(stated.claims))
    signed = made.receipts().sign(
        request=bytes(32),
        response=bytes(32),
        sampling={},
        seed=None,
        prompt_tokens=1,
        completion_tokens=2,
    )
    receipt = verify(signed, claims.receipt_key)
    assert (receipt.model, receipt.policy) == (DIGESTS["model"], DIGESTS["policy"])
    for digest in DIGESTS.values():
        assert digest.hex() in made.said


def test_its_certificate_has_the_same_claims_and_another_identity_no_key_of_them() -> None:
    made = identity()
    stated, tls_key = read_certificate(made.certificate)
    certified, fresh, other = (
        Claims.decode(one).model_dump(exclude={"time"})
        for one in (stated.claims, made.state(bytes(32)).claims, identity().state(b"").claims)
    )
    assert certified["tls_key"] == tls_key
    assert certified == fresh | {"nonce": b""}
    for name in ("tls_key", "hpke_key", "receipt_key"):
        assert other.pop(name) != certified.pop(name)
    assert other == certified
