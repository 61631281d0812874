"""What an enclave sends of itself: claims, and the evidence that is of them.

In a certificate it is an extension (RA-TLS): the key of a connection is one of the claims, so the
other end of the connection is the enclave, and nothing that copied its evidence.
"""

from __future__ import annotations

import hashlib
from datetime import datetime, timedelta

import msgpack
from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey
from cryptography.hazmat.primitives.asymmetric.types import CertificatePublicKeyTypes
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from pydantic import BaseModel, ConfigDict

from protocol.errors import EvidenceError
from tee_side.attest.claims import MAX_CLAIMS_BYTES
from tee_side.attest.evidence import MAX_EVIDENCE_BYTES, Bytes, Evidence, read_map

# Of the Trusted Computing Group, for evidence in a certificate ("DICE Attestation Architecture").
EXTENSION = x509.ObjectIdentifier("2.23.133.5.4.9")

_MAX_BYTES = MAX_CLAIMS_BYTES + MAX_EVIDENCE_BYTES
_NAME = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "tsqp")])
_CLOCKS_APART = timedelta(minutes=5)
# What the library raises for certificates that it cannot read.
_UNREADABLE = (
    *(ValueError, x509.ExtensionNotFound, x509.DuplicateExtension),
    *(x509.UnsupportedGeneralNameType, x509.InvalidVersion, UnsupportedAlgorithm),
)


class Statement(BaseModel):
    """Claims and evidence, as bytes."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    claims: Bytes
    evidence: Bytes

    def encode(self) -> bytes:
        """Return it as bytes."""
        packed: bytes = msgpack.packb(self.model_dump())
        return packed

    @classmethod
    def decode(cls, data: bytes) -> Statement:
        """Read what the other side sent. Raises EvidenceError."""
        return read_map(cls, data, "statement", _MAX_BYTES)

    def read_evidence(self) -> Evidence:
        """Return the evidence. Raises EvidenceError."""
        return Evidence.decode(self.evidence)


def certify(
    key: EllipticCurvePrivateKey, statement: Statement, now: datetime, lasts: timedelta
) -> bytes:
    """Return a certificate (DER) of a key by itself, with a statement in it."""
    stated = x509.UnrecognizedExtension(EXTENSION, statement.encode())
    made = (
        x509.CertificateBuilder()
        .subject_name(_NAME)
        .issuer_name(_NAME)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _CLOCKS_APART)
        .not_valid_after(now + lasts)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(stated, critical=False)
        .sign(key, SHA256())
    )
    return made.public_bytes(Encoding.DER)


def read_certificate(encoded: bytes) -> tuple[Statement, bytes]:
    """Return the statement in a certificate (DER), and the digest of its key.

    Raises EvidenceError.
    """
    try:
        certificate = x509.load_der_x509_certificate(encoded)
        stated = certificate.extensions.get_extension_for_oid(EXTENSION).value
        public = certificate.public_key()
        if not isinstance(stated, x509.UnrecognizedExtension):
            raise ValueError
    except _UNREADABLE:
        expected = f"a certificate with evidence ({EXTENSION.dotted_string})"
        where = "certificate of the server"
        raise EvidenceError(where, got="another", expected=expected) from None
    return Statement.decode(stated.value), key_digest(public)


def key_digest(public: CertificatePublicKeyTypes) -> bytes:
    """Return SHA-256 over a public key (SubjectPublicKeyInfo), as claims have it."""
    encoded = public.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    return hashlib.sha256(encoded).digest()
