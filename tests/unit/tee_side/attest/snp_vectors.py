"""The genuine reports of SEV-SNP in the shared vectors, with what their sources say of them."""

from __future__ import annotations

import json
from base64 import b64decode
from dataclasses import dataclass
from datetime import UTC, datetime

from tee_side.attest.snp_report import Product, SigningKey, Tcb
from tests.vectors import read_bytes, read_pem

MICROSOFT = "microsoft-tee-attestation-verification/tests/test_data"
PINNED = "microsoft-tee-attestation-verification/src/pinned_arks"
RUST = "confidential-dot-ai-attestation-rs/crates/attestation"
RUST_SNP = f"{RUST}/test_data/snp"
GO = "google-go-sev-guest/verify"
VIRTEE = "virtee-sev/tests/certs_data"
DSTACK = "dstack/dstack/dstack-attest/tests"
OPENPCC = "openpcc/attestation/attest/testdata/sev_certificates.txt"

# Inside the time of every leaf but the VLEK's, which is of 2025.
NOW = datetime(2026, 7, 1, tzinfo=UTC)
NOW_VLEK = datetime(2025, 7, 1, tzinfo=UTC)


def authority(product: Product, which: str) -> bytes:
    """Return AMD's ARK, ASK or ASVK of a product."""
    return read_bytes(f"{RUST}/certs/amd/{product}/{which}.der")


def certificates(leaf: bytes, product: Product, kind: SigningKey = "vcek") -> tuple[bytes, ...]:
    """Return a chain of a leaf."""
    intermediate = authority(product, "asvk" if kind == "vlek" else "ask")
    return leaf, intermediate, authority(product, "ark")


@dataclass(frozen=True)
class SnpVector:
    """A report, its leaf, and what they say."""

    name: str
    report_path: str
    leaf_path: str
    version: int
    product: Product
    tcb: Tcb
    kind: SigningKey = "vcek"
    vmpl: int = 0
    debug: bool = False

    @property
    def report(self) -> bytes:
        """The 1184 bytes."""
        data = read_bytes(self.report_path)
        if self.report_path.endswith(".json"):
            return b64decode(json.loads(data)["evidence"]["attestation_report"])
        if self.report_path.endswith(".hex"):
            return bytes.fromhex(data.decode())
        # One source has 4 bytes before the report, and more behind it.
        return data[4:1188] if self.name == "dstack" else data

    @property
    def leaf(self) -> bytes:
        """VCEK or VLEK, in DER."""
        if self.leaf_path.endswith(".json"):
            return b64decode(
                json.loads(read_bytes(self.leaf_path))["evidence"]["cert_chain"]["vcek"]
            )
        if self.leaf_path.endswith(".pem"):
            (leaf,) = read_pem(self.leaf_path)
            return leaf
        return read_bytes(self.leaf_path)

    @property
    def chain(self) -> tuple[bytes, ...]:
        """Leaf, intermediate and root."""
        return certificates(self.leaf, self.product, self.kind)

    @property
    def now(self) -> datetime:
        """A time at which the certificates are valid."""
        return NOW_VLEK if self.kind == "vlek" else NOW


def _of_microsoft(product: Product, version: int, tcb: Tcb) -> SnpVector:
    files = f"{MICROSOFT}/{product}"
    report, leaf = f"{files}_attestation_report.bin", f"{files}_vcek.pem"
    return SnpVector(f"microsoft {product}", report, leaf, version, product, tcb)


SNP_VECTORS = (
    _of_microsoft("milan", 3, Tcb(4, 0, 24, 219)),
    _of_microsoft("genoa", 3, Tcb(10, 0, 23, 84)),
    _of_microsoft("turin", 5, Tcb(1, 1, 4, 81, fmc=1)),
    SnpVector(
        "live genoa",
        f"{RUST_SNP}/live-report-v5-genoa.bin",
        f"{RUST_SNP}/live-vcek-genoa.der",
        5,
        "genoa",
        Tcb(10, 0, 27, 27),
    ),
    SnpVector(
        "live genoa evidence",
        f"{RUST_SNP}/live-evidence-genoa.json",
        f"{RUST_SNP}/live-evidence-genoa.json",
        5,
        "genoa",
        Tcb(10, 0, 27, 27),
    ),
    SnpVector(
        "attestation-rs milan",
        f"{RUST_SNP}/test-report.bin",
        f"{RUST_SNP}/test-vcek.der",
        2,
        "milan",
        Tcb(3, 0, 8, 115),
    ),
    SnpVector(
        "attestation-rs vlek",
        f"{RUST_SNP}/test-vlek-report.bin",
        f"{RUST_SNP}/test-vlek.der",
        3,
        "milan",
        Tcb(4, 0, 24, 217),
        kind="vlek",
        vmpl=1,
    ),
    SnpVector(
        "go-sev-guest debug",
        f"{GO}/testdata/attestation.bin",
        f"{GO}/testdata/vcek.testcer",
        2,
        "milan",
        Tcb(2, 0, 5, 68),
        debug=True,
    ),
    SnpVector(
        "virtee milan",
        f"{VIRTEE}/report_milan.hex",
        f"{VIRTEE}/vcek_milan.der",
        2,
        "milan",
        Tcb(3, 0, 8, 115),
    ),
    SnpVector(
        "dstack",
        f"{DSTACK}/sev_snp_attestation.bin",
        f"{DSTACK}/sev_snp_vcek.pem",
        3,
        "milan",
        Tcb(4, 0, 23, 213),
    ),
)
