"""Evidence: what hardware says of what runs, with the certificates that prove it.

A verifier needs nothing else, and no network.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, TypeAlias

from pydantic import Field

from tee_side.attest.record import Name, Record

Kind: TypeAlias = Literal["snp", "tdx", "simulated"]
Certificates: TypeAlias = Annotated[tuple[bytes, ...], Field(strict=False)]

REPORT_DATA_BYTES = 64


class GpuEvidence(Record):
    """A GPU's report, and its certificates in DER from leaf to root; see `nvidia`."""

    report: bytes
    certificates: Annotated[Certificates, Field(min_length=1)]


class Evidence(Record):
    """Evidence of one kind, and of the GPUs of the same machine.

    `report`: a report of SEV-SNP, a quote of TDX, or what `simulated` writes. `certificates`: in
    DER, of SEV-SNP: leaf, intermediate, root. `collateral`: of SEV-SNP a list of revoked
    certificates (DER) or nothing, of TDX what Intel says of the platform (JSON). `gpus`: by name;
    each has a digest of the claims in its report.
    """

    what: ClassVar[str] = "evidence"
    max_bytes: ClassVar[int] = 128 * 1024

    kind: Kind
    report: bytes
    certificates: Certificates
    collateral: bytes
    gpus: Annotated[dict[Name, GpuEvidence], Field(max_length=8)] = Field(default_factory=dict)
