"""The keys of a server, made at its start, and what it says of itself with them.

No key is ever on a disk, and none outlives the process.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple

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
from tee_side.attest.statement import EXTENSION, Claims, Statement, key_digest, report_data
from tee_side.serve.receipts import ReceiptChain
from tee_side.serve.sealed import HpkeKey

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

    def __str__(self) -> str:
        """Return what a person compares with what others find."""
        return (
            f"model {self.model.hex()}, policy {self.policy.hex()}, settings {self.settings.hex()}"
        )


def state(attester: Attester, about: About, time_s: float, **keys: Any) -> Statement:
    """Return a new statement of what an enclave runs and of `keys`: the other fields of its claims.

    Takes as long as the hardware does. Raises EvidenceError.
    """
    claims = Claims(time=round(time_s), **about._asdict(), **keys).encode()
    return Statement(claims=claims, evidence=attester.attest(report_data(claims)).encode())


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
        return f"attested by {self._attester.kind}: {self._about}"

    def receipts(self) -> ReceiptChain:
        """Return what signs receipts, with a new chain."""
        return ReceiptChain(self.receipt_key, self._about.model, self._about.policy)

    def state(self, nonce: bytes) -> Statement:
        """Return a new statement for a client's nonce, empty for a certificate. As `state`."""
        keys = {
            "tls_key": key_digest(self.tls_key.public_key()),
            "hpke_suite": self.hpke_key.suite,
            "hpke_key": self.hpke_key.public,
            "receipt_key": self.receipt_key.public_key().public_bytes_raw(),
        }
        time_s = self._utc().timestamp()
        return state(self._attester, self._about, time_s, purpose="serve", nonce=nonce, **keys)


def certify(
    key: EllipticCurvePrivateKey, statement: Statement, now: datetime, lasts: timedelta
) -> bytes:
    """Return a certificate (DER) of a key by itself, with a statement in it."""
    stated = x509.UnrecognizedExtension(EXTENSION, statement.encode())
    return (
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
        .public_bytes(Encoding.DER)
    )
