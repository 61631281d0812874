"""What an enclave sends of itself: claims, and the evidence that is of them.

In a certificate it is an extension (RA-TLS): the key of a connection is one of the claims, so the
other end of the connection is the enclave, and nothing that copied its evidence.
"""

from __future__ import annotations

import hashlib
from typing import ClassVar

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.types import CertificatePublicKeyTypes
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from protocol.errors import EvidenceError
from tee_side.attest.claims import Claims
from tee_side.attest.evidence import Evidence
from tee_side.attest.record import Record

# Of the Trusted Computing Group, for evidence in a certificate ("DICE Attestation Architecture").
EXTENSION = x509.ObjectIdentifier("2.23.133.5.4.9")

# What the library raises for certificates that it cannot read.
_UNREADABLE = (
    *(ValueError, x509.ExtensionNotFound, x509.DuplicateExtension),
    *(x509.UnsupportedGeneralNameType, x509.InvalidVersion, UnsupportedAlgorithm),
)


class Statement(Record):
    """Claims and evidence, as bytes."""

    what: ClassVar[str] = "statement"
    max_bytes: ClassVar[int] = Claims.max_bytes + Evidence.max_bytes + 64

    claims: bytes
    evidence: bytes


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
