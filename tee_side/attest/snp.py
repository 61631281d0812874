"""Verifies the evidence of AMD SEV-SNP: who signed a report, and that it is about that processor.

What the report says is appraised elsewhere (`appraisal`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Literal, NamedTuple

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ec import ECDSA
from cryptography.hazmat.primitives.asymmetric.utils import encode_dss_signature
from cryptography.hazmat.primitives.hashes import SHA384

from protocol.errors import EvidenceError
from tee_side.attest.amd_certificates import PINNED_ROOTS, Leaf, verify_chain
from tee_side.attest.snp_report import Product, SnpReport, Tcb


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
    report: bytes,
    certificates: Sequence[bytes],
    now: datetime,
    crl: bytes | None = None,
    roots: Mapping[str, Product] = PINNED_ROOTS,
) -> VerifiedSnp:
    """Verify a report of 1184 bytes by leaf, intermediate and root, in DER. Raises EvidenceError.

    `now`: when, with a time zone; `crl`: the root's list of revoked intermediates, in DER. A
    signature (r, s) has a twin, (r, n - s): a report is known by what is signed, not by its bytes.
    """
    parsed = SnpReport.parse(report)
    leaf = verify_chain(certificates, now, crl, roots)
    tcb = Tcb.parse(parsed.reported_tcb, leaf.product)
    _require_equal("processor", parsed.product or leaf.product, leaf.product)
    _require_equal("signing key", parsed.signing_key, leaf.kind)
    _require_equal("reported TCB", tcb, leaf.tcb)
    _require_chip(parsed, leaf)
    try:
        signature = encode_dss_signature(*parsed.signature)
        leaf.key.verify(signature, parsed.signed, ECDSA(SHA384()))
    except InvalidSignature:
        raise _refused("signature", "a wrong one", "that of the leaf's key") from None
    return VerifiedSnp(parsed, leaf.product, tcb, crl is not None)


def _require_chip(report: SnpReport, leaf: Leaf) -> None:
    """Require the chip that a VCEK is of; Turin's certificate has the first 8 bytes alone."""
    if leaf.chip_id is None:
        return
    if not leaf.chip_id or leaf.chip_id.ljust(len(report.chip_id), b"\0") != report.chip_id:
        raise _refused("chip id", "another", "the one of the leaf")


def _require_equal(what: str, got: object, expected: object) -> None:
    if got != expected:
        raise _refused(what, str(got), f"{expected}, as the leaf says")


def _refused(what: str, got: str, expected: str) -> EvidenceError:
    return EvidenceError(f"SNP report: {what}", got=got, expected=expected)
