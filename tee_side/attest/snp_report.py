"""The attestation report of AMD SEV-SNP, as its firmware writes it.

Source: AMD, "SEV Secure Nested Paging Firmware ABI Specification" (56860), the structure
ATTESTATION_REPORT. All numbers are little-endian.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

from protocol.errors import EvidenceError

Product: TypeAlias = Literal["milan", "genoa", "turin"]
SigningKey: TypeAlias = Literal["vcek", "vlek"]

REPORT_BYTES = 0x4A0
SIGNED_BYTES = 0x2A0
VERSIONS = (2, 3, 5)

_NUMBER_BYTES = 72  # of each of r and s; those of P-384 take 48
_R, _S = 0x2A0, 0x2A0 + _NUMBER_BYTES
_SIGNING_KEYS: dict[int, SigningKey] = {0: "vcek", 1: "vlek"}
_ECDSA_P384_SHA384 = 1
_CHIP_ID = slice(0x1A0, 0x1E0)
# A Turin has an id of 8 bytes, and zeros behind it.
_TURIN_CHIP_ID_BYTES = 8


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


class GuestPolicy(NamedTuple):
    """What the guest's owner allows (GUEST_POLICY)."""

    bits: int

    @property
    def migration_agent(self) -> bool:
        """Whether a migration agent may be attached, which can read the guest."""
        return bool(self.bits >> 18 & 1)

    @property
    def debug(self) -> bool:
        """Whether the host may read the guest's memory."""
        return bool(self.bits >> 19 & 1)


@dataclass(frozen=True, slots=True)
class SnpReport:
    """A report that was parsed, and not verified yet.

    `product`: by CPUID, which reports have from version 3 on, or by the chip id of a Turin; None
    where the report does not tell. `reported_tcb`, `launch_tcb`: 8 bytes whose
    meaning the product says. `signature`: r and s.
    """

    version: int
    policy: GuestPolicy
    vmpl: int
    alias_check: bool
    signing_key: SigningKey
    report_data: bytes
    measurement: bytes
    host_data: bytes
    reported_tcb: bytes
    launch_tcb: bytes
    product: Product | None
    chip_id: bytes
    signed: bytes
    signature: tuple[int, int]

    @classmethod
    def parse(cls, data: bytes) -> SnpReport:
        """Parse the 1184 bytes of a report. Raises EvidenceError."""
        if len(data) != REPORT_BYTES:
            raise _refused("size", f"{len(data)} bytes", f"{REPORT_BYTES}")

        def number(at: int, size: int = 4) -> int:
            return int.from_bytes(data[at : at + size], "little")

        version, flags = number(0x00), number(0x48)
        if version not in VERSIONS:
            raise _refused("version", str(version), " or ".join(map(str, VERSIONS)))
        if (algorithm := number(0x34)) != _ECDSA_P384_SHA384:
            raise _refused("signature algorithm", str(algorithm), "1, ECDSA P-384 with SHA-384")
        if (key := _SIGNING_KEYS.get(flags >> 2 & 7)) is None:
            raise _refused("signing key", str(flags >> 2 & 7), "0, a VCEK, or 1, a VLEK")
        if any(data[_S + _NUMBER_BYTES :]):
            raise _refused("bytes behind the signature", "others", "zeros: nothing signs them")
        policy = GuestPolicy(number(0x08, 8))
        if not policy.bits >> 17 & 1:
            raise _refused("guest policy", f"{policy.bits:#x}", "bit 17, which is always set")
        return cls(
            version=version,
            policy=policy,
            vmpl=number(0x30),
            alias_check=bool(number(0x40, 8) >> 5 & 1),
            signing_key=key,
            report_data=data[0x50:0x90],
            measurement=data[0x90:0xC0],
            host_data=data[0xC0:0xE0],
            reported_tcb=data[0x180:0x188],
            launch_tcb=data[0x1F0:0x1F8],
            product=_product(version, data),
            chip_id=data[_CHIP_ID],
            signed=data[:SIGNED_BYTES],
            signature=(number(_R, _NUMBER_BYTES), number(_S, _NUMBER_BYTES)),
        )


def _product(version: int, data: bytes) -> Product | None:
    if version == 2:
        chip_id = data[_CHIP_ID]
        turin = any(chip_id) and not any(chip_id[_TURIN_CHIP_ID_BYTES:])
        return "turin" if turin else None
    family, model = data[0x188], data[0x189]
    if family == 0x19 and model <= 0x0F:
        return "milan"
    if family == 0x19 and (0x10 <= model <= 0x1F or 0xA0 <= model <= 0xAF):
        return "genoa"
    if family == 0x1A and model <= 0x11:
        return "turin"
    raise _refused("processor", f"family {family}, model {model}", "Milan, Genoa or Turin")


def _refused(what: str, got: str, expected: str) -> EvidenceError:
    return EvidenceError(f"SNP report: {what}", got=got, expected=expected)
