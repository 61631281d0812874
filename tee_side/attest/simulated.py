"""A simulated TEE, for development: evidence of its own kind, by a key that everybody has.

It proves nothing. No appraisal accepts it but in development.
"""

from __future__ import annotations

import hashlib
from typing import Literal, NamedTuple

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from protocol.errors import EvidenceError
from tee_side.attest.evidence import REPORT_DATA_BYTES, Evidence

MEASUREMENT_BYTES = 48

_HEADER = b"TSQP simulated TEE 1\0"
_SIGNED_BYTES = len(_HEADER) + MEASUREMENT_BYTES + REPORT_DATA_BYTES
# Of whom it is does not matter: it is published here.
_ROOT = Ed25519PrivateKey.from_private_bytes(hashlib.sha256(_HEADER).digest())


class VerifiedSimulated(NamedTuple):
    """What a simulated report says: 48 and 64 bytes."""

    measurement: bytes
    report_data: bytes
    kind: Literal["simulated"] = "simulated"


def simulate(report_data: bytes, measurement: bytes) -> Evidence:
    """Return evidence of a measurement (48 bytes) and of `report_data` (64 bytes)."""
    signed = _HEADER + measurement + report_data
    report = signed + _ROOT.sign(signed)
    return Evidence(kind="simulated", report=report, certificates=(), collateral=b"")


def verify_simulated(report: bytes) -> VerifiedSimulated:
    """Verify that `simulate` wrote it. Raises EvidenceError."""
    signed, signature = report[:_SIGNED_BYTES], report[_SIGNED_BYTES:]
    try:
        _ROOT.public_key().verify(signature, signed)
    except InvalidSignature:
        signed = b""
    if not signed.startswith(_HEADER):
        raise EvidenceError("simulated report", got="other bytes", expected="one that was signed")
    return VerifiedSimulated(signed[len(_HEADER) : -REPORT_DATA_BYTES], signed[-REPORT_DATA_BYTES:])
