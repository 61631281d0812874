"""A report's fields, and each thing in it that is refused before its signature is looked at."""

from __future__ import annotations

import re

import pytest

from protocol.errors import EvidenceError
from tee_side.attest.snp_report import REPORT_BYTES, SnpReport
from tests.kit import snp_chain
from tests.kit.rows import each_row


def _changed(at: int, value: bytes, version: int = 3) -> bytes:
    return snp_chain.make_report(version=version, changed={at: value})


@each_row("version", [2, 3, 5])
def test_fields_are_read(version: int) -> None:
    data = snp_chain.make_report(
        version=version,
        policy=0x10F0000,
        vmpl=3,
        report_data=bytes(range(64)),
        measurement=b"m" * 48,
        host_data=b"h" * 32,
        changed={0x1E0: b"committd", 0x1F0: b"launched", 0x180: b"reported"},
    )
    report = SnpReport.parse(data)
    assert (report.vmpl, report.alias_check, report.signing_key) == (3, True, "vcek")
    assert report.report_data == bytes(range(64))
    assert (report.measurement, report.host_data) == (b"m" * 48, b"h" * 32)
    assert (report.reported_tcb, report.launch_tcb) == (b"reported", b"launched")
    assert report.chip_id == snp_chain.chip_id_of("milan")
    assert report.product == (None if version == 2 else "milan")


def test_bits() -> None:
    """Of the policy, the platform, and the flags that say which key signed."""
    for bit in range(64):
        report = SnpReport.parse(snp_chain.make_report(policy=1 << 17 | 1 << bit))
        assert (report.debug, report.migration_agent) == (bit == 19, bit == 18), bit
        report = SnpReport.parse(snp_chain.make_report(platform=1 << bit))
        assert report.alias_check == (bit == 5), bit
    for flags, key in ((0, "vcek"), (3, "vcek"), (4, "vlek"), (7, "vlek"), (32, "vcek")):
        assert SnpReport.parse(_changed(0x48, bytes((flags,)))).signing_key == key, flags


@each_row(
    ("family", "models", "product"),
    [
        (0x19, (0x00, 0x01, 0x0F), "milan"),
        (0x19, (0x10, 0x11, 0x1F, 0xA0, 0xAF), "genoa"),
        (0x1A, (0x00, 0x02, 0x11), "turin"),
    ],
)
def test_product_is_told_by_cpuid(family: int, models: tuple[int, ...], product: str) -> None:
    for model in models:
        for version in (3, 5):
            data = _changed(0x188, bytes((family, model)), version)
            assert SnpReport.parse(data).product == product


@each_row(
    ("chip_id", "product"),
    [
        (b"\x01" * 8 + bytes(56), "turin"),
        (bytes(7) + b"\x01" + bytes(56), "turin"),
        (b"\x01" * 9 + bytes(55), None),
        (b"\x01" * 8 + bytes(55) + b"\x01", None),
        (bytes(64), None),
    ],
)
def test_product_of_version_2_is_told_by_the_chip_id(chip_id: bytes, product: str | None) -> None:
    assert SnpReport.parse(_changed(0x1A0, chip_id, version=2)).product == product
    # Of later versions CPUID says it, whatever the chip id is.
    assert SnpReport.parse(_changed(0x1A0, chip_id)).product == "milan"


def _processor(family: int, model: int) -> tuple[bytes, str]:
    text = f"processor: got family {family}, model {model}, expected Milan, Genoa or Turin"
    return _changed(0x188, bytes((family, model))), text


def _unsigned(at: int) -> tuple[bytes, str]:
    report = snp_chain.make_report()
    data = report[:at] + b"\1" + report[at + 1 :]
    return data, "bytes behind the signature: got others, expected unsigned zeros"


def _number(at: int, n: int, what: str, expected: str) -> tuple[bytes, str]:
    return _changed(at, n.to_bytes(4, "little")), f"{what}: got {n}, expected {expected}"


_ALGORITHM = ("signature algorithm", "1, ECDSA P-384 by SHA-384")


@each_row(
    ("data", "text"),
    [
        (b"", "size: got 0 bytes, expected 1184"),
        (snp_chain.make_report()[:-1], "size: got 1183 bytes, expected 1184"),
        (snp_chain.make_report() + b"\0", "size: got 1185 bytes, expected 1184"),
        *(
            _number(0, n, "version", "2 or 3 or 5")
            for n in (0, 1, 4, 6, 2 + 2**16, 3 + 2**24, 2**32 - 1)
        ),
        *(_number(0x34, n, *_ALGORITHM) for n in (0, 2, 257, 1 + 2**31)),
        *(
            (_changed(0x48, bytes((key << 2,))), f"signing key: got {key}, expected 0, a VCEK, or")
            for key in range(2, 8)
        ),
        *map(_unsigned, (0x330, 0x331, 0x400, REPORT_BYTES - 1)),
        *(
            (
                snp_chain.make_report(policy=policy),
                f"guest policy: got {policy:#x}, expected bit 17, always set",
            )
            for policy in (0, 0x1001F, 2**64 - 1 - 2**17)
        ),
        *(_processor(0x19, model) for model in (0x20, 0x9F, 0xB0, 0xFF)),
        *(_processor(0x1A, model) for model in (0x12, 0x50, 0xFF)),
        *(_processor(family, 0x01) for family in (0, 0x17, 0x18, 0x1B)),
    ],
)
def test_refused(data: bytes, text: str) -> None:
    with pytest.raises(EvidenceError, match=f"^SNP report: {re.escape(text)}"):
        SnpReport.parse(data)
