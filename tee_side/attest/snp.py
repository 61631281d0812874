"""Verifies the evidence of AMD SEV-SNP: who signed a report, and that it is about that processor.

What the report says is appraised elsewhere (`appraisal`).
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Literal, NamedTuple

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ec import ECDSA
from cryptography.hazmat.primitives.asymmetric.utils import encode_dss_signature
from cryptography.hazmat.primitives.hashes import SHA384

from protocol.errors import EvidenceError
from tee_side.attest.amd_certificates import verify_chain
from tee_side.attest.snp_report import SIGNED_BYTES, Product, SnpReport, Tcb


class VerifiedSnp(NamedTuple):
    """A report that a processor of AMD's signed, of this product and with this firmware.

    `revocation_checked`: whether a list of revoked certificates was there.
    """

    report: SnpReport
    product: Product
    tcb: Tcb
    revocation_checked: bool
    kind: Literal["snp"] = "snp"

    @property
    def report_data(self) -> bytes:
        """What the guest had signed: 64 bytes."""
        return self.report.report_data


def verify_snp(
    report: bytes, certificates: Sequence[bytes], now: datetime, crl: bytes | None = None
) -> VerifiedSnp:
    """Verify a report of 1184 bytes by leaf, intermediate and root, in DER. Raises EvidenceError.

    `now`: when, with a time zone; `crl`: the root's list of revoked intermediates, in DER. A
    signature (r, s) has a twin, (r, n - s): a report is known by what is signed, not by its bytes.
    """
    parsed = SnpReport.parse(report)
    product, key = verify_chain(parsed, certificates, now, crl)
    # Two little-endian numbers of 72 bytes, of which those of P-384 take 48.
    r, s = (int.from_bytes(report[at : at + 72], "little") for at in (0x2A0, 0x2E8))
    try:
        key.verify(encode_dss_signature(r, s), report[:SIGNED_BYTES], ECDSA(SHA384()))
    except InvalidSignature:
        raise EvidenceError("SNP report", got="a wrong signature", expected="the leaf's") from None
    return VerifiedSnp(parsed, product, Tcb.parse(parsed.reported_tcb, product), crl is not None)
