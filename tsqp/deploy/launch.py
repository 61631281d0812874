"""How a host starts an image with SEV-SNP: what its measurement depends on, and its report says."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

# A guest's policy: bit 17 is always one, 16 lets it run with SMT. No debugging, no migration.
GUEST_POLICY = 1 << 17 | 1 << 16
NO_HOST_DATA = bytes(32)


@dataclass(frozen=True)
class Launch:
    """What the processor is told. `host_data`: 32 bytes, in the report and not measured."""

    vcpus: int
    vcpu_type: str
    firmware: Path
    host_data: bytes = NO_HOST_DATA
