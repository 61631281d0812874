"""The attestation report of AMD SEV-SNP, as its firmware writes it.

Source: AMD, "SEV Secure Nested Paging Firmware ABI Specification" (56860), the structure
ATTESTATION_REPORT. All numbers are little-endian.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

from protocol.errors import EvidenceError

Product: TypeAlias = Literal["milan", "genoa", "turin"]
SigningKey: TypeAlias = Literal["vcek", "vlek"]

REPORT_BYTES, SIGNED_BYTES = 0x4A0, 0x2A0
# 0x00 version, 0x08 policy, 0x30 VMPL, 0x34 signature algorithm, 0x40 platform, 0x48 flags; then
# what is bytes, from 0x50, 0x90, 0xC0, 0x180, 0x1A0 and 0x1F0 on.
_LAYOUT = struct.Struct("<I4xQ 32xII 8xQ I4x 64s 48s 32s 160x8s 24x64s 16x8s")
_BYTES = ("report_data", "measurement", "host_data", "reported_tcb", "chip_id", "launch_tcb")


class Tcb(NamedTuple):
    """Security versions of a processor's firmware; `fmc` is of Turin alone, 0 on others."""

    bootloader: int
    tee: int
    snp: int
    microcode: int
    fmc: int = 0

    @classmethod
    def parse(cls, word: bytes, product: Product) -> Tcb:
        """Read the 8 bytes of a TCB_VERSION."""
        if product == "turin":
            return cls(word[1], word[2], word[3], word[7], word[0])
        return cls(word[0], word[1], word[6], word[7])


@dataclass(frozen=True, slots=True)
class SnpReport:
    """A report that was parsed, and not verified yet.

    `debug`: whether the host may read the guest's memory; `migration_agent`: whether one may be
    attached, which can read the guest. `product`: by CPUID, which reports have from version 3 on,
    or by the chip id of a Turin; None where the report does not tell. `reported_tcb`, `launch_tcb`:
    8 bytes whose meaning the product says.
    """

    report_data: bytes
    measurement: bytes
    host_data: bytes
    reported_tcb: bytes
    chip_id: bytes
    launch_tcb: bytes
    product: Product | None
    signing_key: SigningKey
    vmpl: int
    debug: bool
    migration_agent: bool
    alias_check: bool

    @classmethod
    def parse(cls, data: bytes) -> SnpReport:
        """Parse the 1184 bytes of a report. Raises EvidenceError."""
        _require(len(data) == REPORT_BYTES, "size", f"{len(data)} bytes", f"{REPORT_BYTES}")
        version, policy, vmpl, algorithm, platform, flags, *strings = _LAYOUT.unpack_from(data)
        key = flags >> 2 & 7
        _require(version in (2, 3, 5), "version", str(version), "2 or 3 or 5")
        _require(algorithm == 1, "signature algorithm", str(algorithm), "1, ECDSA P-384 by SHA-384")
        _require(key in (0, 1), "signing key", str(key), "0, a VCEK, or 1, a VLEK")
        _require(bool(policy >> 17 & 1), "guest policy", f"{policy:#x}", "bit 17, always set")
        _require(not any(data[0x330:]), "bytes behind the signature", "others", "unsigned zeros")
        return cls(
            **dict(zip(_BYTES, strings, strict=True)),
            product=_product(version, data),
            signing_key="vlek" if key else "vcek",
            vmpl=vmpl,
            debug=bool(policy >> 19 & 1),
            migration_agent=bool(policy >> 18 & 1),
            alias_check=bool(platform >> 5 & 1),
        )


def _product(version: int, data: bytes) -> Product | None:
    family, model, chip_id = data[0x188], data[0x189], data[0x1A0:0x1E0]
    if version == 2:
        # A Turin has an id of 8 bytes, and zeros behind it.
        return "turin" if any(chip_id[:8]) and not any(chip_id[8:]) else None
    if family == 0x19 and (model <= 0x1F or 0xA0 <= model <= 0xAF):
        return "milan" if model <= 0x0F else "genoa"
    turin = family == 0x1A and model <= 0x11
    _require(turin, "processor", f"family {family}, model {model}", "Milan, Genoa or Turin")
    return "turin"


def _require(condition: bool, what: str, got: str, expected: str) -> None:
    if not condition:
        raise EvidenceError(f"SNP report: {what}", got=got, expected=expected)
