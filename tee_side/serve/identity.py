"""The keys of a server, made at its start, and what it says of itself with them.

No key is ever on a disk, and none outlives the process.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import UTC, datetime, timedelta
from typing import NamedTuple

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ec import (
    SECP256R1,
    EllipticCurvePrivateKey,
    generate_private_key,
)
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding

from tee_side.attest.attesters import Attester
from tee_side.attest.claims import Claims, report_data
from tee_side.attest.statement import EXTENSION, Statement, key_digest
from tee_side.serve.hpke_key import HpkeKey
from tee_side.serve.receipt_chain import ReceiptChain

_LASTS = timedelta(days=365)
_CLOCKS_APART = timedelta(minutes=5)
_NAME = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "tsqp")])


class About(NamedTuple):
    """What an enclave runs; see Claims."""

    model: bytes
    policy: bytes
    settings: bytes
    curve_keys: Mapping[str, bytes]
    plugins: Mapping[str, bytes]
    version: str
    attested_services: str


class Identity:
    """Keys of a server: of its connections, of bodies sealed to it, of its receipts.

    `certificate`: of `tls_key`, in DER, with a statement in it. Raises EvidenceError where the
    hardware gives no evidence.
    """

    def __init__(
        self,
        attester: Attester,
        about: About,
        utc: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        self._attester, self._about, self._utc = attester, about, utc
        self.tls_key = generate_private_key(SECP256R1())
        self.hpke_key = HpkeKey()
        self.receipt_key = Ed25519PrivateKey.generate()
        self.certificate = certify(self.tls_key, self.state(b""), utc(), _LASTS)

    @property
    def said(self) -> str:
        """What a person is told, to compare with what clients find."""
        about = self._about
        named = {"model": about.model, "policy": about.policy, "settings": about.settings}
        claims = ", ".join(f"{name} {digest.hex()}" for name, digest in named.items())
        return f"attested by {self._attester.kind}: {claims}"

    def receipts(self) -> ReceiptChain:
        """Return what signs receipts, with a new chain."""
        return ReceiptChain(self.receipt_key, self._about.model, self._about.policy)

    def state(self, nonce: bytes) -> Statement:
        """Return a new statement for a client's nonce, empty for a certificate.

        Takes as long as the hardware does. Raises EvidenceError.
        """
        claims = Claims(
            nonce=nonce,
            time=round(self._utc().timestamp()),
            tls_key=key_digest(self.tls_key.public_key()),
            hpke_suite=self.hpke_key.suite,
            hpke_key=self.hpke_key.public,
            receipt_key=self.receipt_key.public_key().public_bytes_raw(),
            **self._about._asdict(),
        ).encode()
        evidence = self._attester.attest(report_data(claims))
        return Statement(claims=claims, evidence=evidence.encode())


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
