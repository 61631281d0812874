"""Firmware in the form of OVMF's, as far as a measurement of SEV-SNP reads it."""

from __future__ import annotations

import struct
import uuid

SIZE = 64 * 1024
_FOOTER = "96b582de-1fb2-45f7-baea-a366c55a082d"
_HASHES = "7255371f-3a3b-4b04-927b-1da6efa8d454"
_RESET = "00f771de-1a7e-4fcb-890e-68c77e2fb44e"
_METADATA = "dc886566-984a-4798-a75e-5585a7bf67cc"
_METADATA_FROM_END = 4096
_KERNEL_HASHES, _CPUID = 0x10, 3


def firmware(*, kernel_hashes: bool = True, fill: bytes = b"\0") -> bytes:
    """Return firmware, with or without a page for the hashes of a kernel."""
    sections = [struct.pack("<III", 0x80D000, 4096, _CPUID)]
    if kernel_hashes:
        sections.append(struct.pack("<III", 0x80F000, 4096, _KERNEL_HASHES))
    metadata = struct.pack("<4sIII", b"ASEV", 16 + 12 * len(sections), 1, len(sections))
    metadata += b"".join(sections)
    table = b"".join(
        _entry(guid, value)
        for guid, value in (
            (_METADATA, _METADATA_FROM_END),
            (_HASHES, 0x80FC00),
            (_RESET, 0x80B004),
        )
    )
    table += struct.pack("<H", len(table) + 18) + uuid.UUID(_FOOTER).bytes_le
    data = bytearray(fill * SIZE)
    data[-_METADATA_FROM_END : len(metadata) - _METADATA_FROM_END] = metadata
    data[-32 - len(table) : -32] = table
    return bytes(data)


def _entry(guid: str, value: int) -> bytes:
    return struct.pack("<IH", value, 22) + uuid.UUID(guid).bytes_le
