"""Evidence is asked for as Linux has it; what a device does wrong is an EvidenceError."""

from __future__ import annotations

import errno
import struct
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from protocol.errors import EvidenceError
from tee_side.attest.attesters import System, find_attester
from tee_side.attest.evidence import MAX_EVIDENCE_BYTES, Evidence
from tee_side.attest.simulated import verify_simulated
from tee_side.attest.snp import verify_snp
from tee_side.attest.snp_report import SnpReport
from tests.tables import each_row
from tests.tools.fake_tsm import (
    BUSY,
    GUIDS,
    INVALID_LENGTH,
    PAGE,
    REPORTS,
    SEV_GUEST,
    FakeKernel,
    certificate_table,
    snp_report,
)
from tests.vectors import VECTORS, needs_vectors, read_bytes, read_pem

DATA = bytes(range(64))
# As AMD's are: the root names itself twice, the intermediate names it once.
VCEK, VLEK = b"a leaf, VCEK", b"a leaf, VLEK"
ASK, ASVK = b"SEV-Milan by ARK-Milan", b"SEV-VLEK-Milan by ARK-Milan"
ARK = b"ARK-Milan by ARK-Milan"
WHOLE = certificate_table([("ARK", ARK), ("ASK", ASK), ("VCEK", VCEK)])
LEAF_ALONE = certificate_table([("VCEK", VCEK)])
COLLATERAL = b'{"of": "Intel"}'

Report = Callable[[bytes, int], bytes]
MILAN = "microsoft-tee-attestation-verification"


def _quote(data: bytes, _vmpl: int) -> bytes:
    return b"a quote of " + data


def _snp(**settings: Any) -> FakeKernel:
    return FakeKernel(**{"table": WHOLE, **settings})


def _tdx(**settings: Any) -> FakeKernel:
    return FakeKernel(**{"provider": "tdx_guest", "report": _quote, **settings})


def _sev_guest(**settings: Any) -> FakeKernel:
    return _snp(**{"configfs": False, "sev_guest": True, **settings})


def _faults(calls: dict[str, list[int]]) -> defaultdict[str, list[int]]:
    return defaultdict(list, calls)


def _attest(kernel: FakeKernel, **options: Any) -> Evidence:
    """Ask for evidence, after which nothing may be left open or behind."""
    tdx = kernel.provider == "tdx_guest"
    if tdx:
        options = {"collateral": COLLATERAL, **options}
    try:
        attester = find_attester("tdx" if tdx else "snp", system=kernel.system(), **options)
        evidence = attester.attest(DATA)
    finally:
        assert (kernel.opened, kernel.entries) == (0, {})
    assert attester.kind == evidence.kind
    return evidence


def _refusal(kernel: FakeKernel, **options: Any) -> str:
    with pytest.raises(EvidenceError) as refused:
        _attest(kernel, **options)
    return str(refused.value)


@each_row(
    "kernel", [_snp(), _snp(largest_read=7), _sev_guest()], ids=["configfs", "parts", "ioctl"]
)
def test_a_report_comes_with_the_certificates_of_the_host_in_order(kernel: FakeKernel) -> None:
    evidence = _attest(kernel)
    assert evidence.report == snp_report(DATA)
    assert evidence.certificates == (VCEK, ASK, ARK)
    assert (evidence.kind, evidence.collateral) == ("snp", b"")
    assert kernel.pauses == []
    assert _attest(kernel, collateral=b"revoked").collateral == b"revoked"


@each_row("largest", [PAGE, 3])
def test_a_quote_comes_with_the_collateral_of_the_operator(largest: int) -> None:
    evidence = _attest(_tdx(largest_read=largest))
    assert evidence == Evidence(
        kind="tdx", report=_quote(DATA, 0), certificates=(), collateral=COLLATERAL
    )


def test_a_quote_without_collateral_is_refused_before_the_device_is_asked() -> None:
    kernel = _tdx()
    kernel.faults["read outblob"] = [errno.EIO]
    assert "got no collateral" in _refusal(kernel, collateral=b"")
    assert kernel.faults["read outblob"]


def test_an_empty_quote_is_refused() -> None:
    assert "got an empty report" in _refusal(_tdx(report=lambda _data, _vmpl: b""))


def test_each_report_has_a_directory_of_its_own() -> None:
    kernel = _snp()
    attester = find_attester("snp", system=kernel.system())
    attester.attest(DATA)
    attester.attest(DATA)
    assert len(set(kernel.made)) == len(kernel.made) == 3


@each_row("error", [errno.EINTR, errno.EBUSY, errno.EAGAIN], ids=errno.errorcode.__getitem__)
@pytest.mark.parametrize(
    "call",
    [
        "mkdir",
        "rmdir",
        "open provider",
        "read provider",
        "open inblob",
        "read generation",
        "open outblob",
        "read outblob",
        "read auxblob",
    ],
)
def test_a_failure_that_passes_is_tried_again(call: str, error: int) -> None:
    for times in 1, 3:
        kernel = _snp(faults=_faults({call: [error] * times}))
        assert _attest(kernel).report == snp_report(DATA)
        assert not kernel.faults[call]


@each_row("call", ["mkdir", "open inblob", "read outblob"])
def test_a_device_that_stays_busy_is_given_up_after_some_seconds(call: str) -> None:
    kernel = _snp(faults=_faults({call: [errno.EBUSY] * 1000}))
    assert "Device or resource busy" in _refusal(kernel)
    assert 1 <= sum(kernel.pauses) <= 60


def test_a_directory_that_cannot_be_removed_is_an_error() -> None:
    kernel = _snp(faults=_faults({"rmdir": [errno.EBUSY] * 10}))
    with pytest.raises(EvidenceError, match="busy"):
        find_attester("snp", system=kernel.system())


@each_row(
    ("call", "error"),
    [
        ("mkdir", errno.ENXIO),
        ("mkdir", errno.ENOSPC),
        ("open inblob", errno.EACCES),
        ("read outblob", errno.EIO),
        ("read outblob", errno.ENOTTY),
        ("read outblob", errno.ETIMEDOUT),
        ("read auxblob", errno.EFBIG),
        # The error of the write is lost, and the kernel has no data to report.
        ("commit inblob", errno.EBUSY),
    ],
)
def test_a_failure_that_stays_is_an_error_at_once(call: str, error: int) -> None:
    for kernel in _snp(), _tdx():
        if call == "read auxblob" and kernel.provider == "tdx_guest":
            continue
        kernel.faults[call] = [error]
        assert _refusal(kernel).startswith(("snp attester: got ", "tdx attester: got "))
        assert kernel.pauses == []


@each_row("name", ["outblob", "auxblob", "generation"])
def test_a_report_of_another_writer_is_not_ours(name: str) -> None:
    # The first read of `generation` comes before our write, when no report can be another's.
    again = 2 if name == "generation" else 1
    kernel = _snp(intrusions=[name] * again)
    assert _attest(kernel).report == snp_report(DATA)
    assert not kernel.intrusions
    assert len(kernel.pauses) >= 1
    always = _refusal(_snp(intrusions=[name] * 1000))
    assert "another writer" in always


def test_the_privilege_level_is_written_before_the_report_is_made() -> None:
    for kernel in _snp(), _sev_guest():
        assert SnpReport.parse(_attest(kernel, vmpl=2).report).vmpl == 2
        assert kernel.pauses == []
    assert "Invalid argument" in _refusal(_snp(), vmpl=4)


def test_a_report_that_is_too_long_is_refused() -> None:
    longest = _tdx(report=lambda _data, _vmpl: bytes(MAX_EVIDENCE_BYTES))
    assert len(_attest(longest).report) == MAX_EVIDENCE_BYTES
    longer = _tdx(report=lambda _data, _vmpl: bytes(MAX_EVIDENCE_BYTES + 1))
    assert f"{MAX_EVIDENCE_BYTES} bytes at most" in _refusal(longer)


@each_row("kernel", [_snp, _sev_guest], ids=["configfs", "ioctl"])
def test_a_report_of_other_data_is_refused(kernel: Callable[..., FakeKernel]) -> None:
    other: Report = lambda _data, vmpl: snp_report(bytes(64), vmpl)  # noqa: E731
    assert "a report of other data" in _refusal(kernel(report=other))
    assert "SNP report: size" in _refusal(kernel(report=_quote))


def test_what_is_not_here_is_an_error_that_names_where_it_was_looked_for() -> None:
    nothing = FakeKernel(configfs=False).system()
    with pytest.raises(EvidenceError) as refused:
        find_attester("snp", system=nothing)
    assert refused.value.where == "snp attester"
    assert refused.value.expected == f"sev_guest at {REPORTS} or {SEV_GUEST}"
    # A quote is not to be had by SEV-SNP's device.
    nothing = FakeKernel(configfs=False, sev_guest=True).system()
    with pytest.raises(EvidenceError) as refused:
        find_attester("tdx", system=nothing, collateral=COLLATERAL)
    assert refused.value.expected == f"tdx_guest at {REPORTS}"


@each_row(
    ("kind", "provider"), [("snp", "tdx_guest"), ("tdx", "sev_guest"), ("snp", "arm_cca_guest")]
)
def test_another_kind_of_machine_is_an_error(kind: Any, provider: str) -> None:
    kernel = FakeKernel(provider=provider)
    with pytest.raises(EvidenceError, match=f"got {provider}, expected "):
        find_attester(kind, system=kernel.system(), collateral=COLLATERAL)
    assert kernel.entries == {}


def test_a_user_who_may_use_the_device_alone_uses_it() -> None:
    def denied(*calls: str) -> defaultdict[str, list[int]]:
        return _faults({call: [errno.EACCES] for call in calls})

    kernel = _snp(sev_guest=True, faults=denied("mkdir"))
    assert _attest(kernel).certificates == (VCEK, ASK, ARK)
    assert kernel.made == []
    for kernel in _snp(faults=denied("mkdir")), _sev_guest(faults=denied("open sev-guest")):
        assert "Permission denied" in _refusal(kernel)


def test_a_table_that_is_longer_than_the_buffer_gets_a_longer_one() -> None:
    long = certificate_table([("CRL", bytes(9 * PAGE)), ("VCEK", VCEK), ("ASK", ASK), ("ARK", ARK)])
    assert _attest(_sev_guest(table=long)).certificates == (VCEK, ASK, ARK)
    longer = certificate_table([("CRL", bytes(MAX_EVIDENCE_BYTES))])
    assert "Input/output error" in _refusal(_sev_guest(table=longer))


def test_a_host_that_names_no_longer_buffer_is_not_asked_again() -> None:
    kernel = _sev_guest(ioctl_faults=[(errno.EIO, INVALID_LENGTH)] * 2)
    assert "Input/output error" in _refusal(kernel)
    assert len(kernel.ioctl_faults) == 1


@each_row(
    ("error", "exit_information"), [(errno.EIO, BUSY), (errno.EAGAIN, 0xFF), (errno.EINTR, 0xFF)]
)
def test_a_host_that_throttles_is_asked_again(error: int, exit_information: int) -> None:
    kernel = _sev_guest(ioctl_faults=[(error, exit_information)] * 3)
    assert _attest(kernel).report == snp_report(DATA)
    assert len(kernel.pauses) == 3
    kernel = _sev_guest(ioctl_faults=[(error, exit_information)] * 1000)
    assert "snp attester: got [Errno" in _refusal(kernel)
    assert 1 <= sum(kernel.pauses) <= 60


@each_row("error", [errno.ENOTTY, errno.EIO, errno.ETIMEDOUT], ids=errno.errorcode.__getitem__)
def test_an_ioctl_that_fails_is_an_error_at_once(error: int) -> None:
    kernel = _sev_guest(ioctl_faults=[(error, 0xFF)] * 2)
    assert f"got [Errno {error}]" in _refusal(kernel)
    assert (kernel.pauses, len(kernel.ioctl_faults)) == ([], 1)


def test_a_firmware_that_refuses_is_quoted() -> None:
    assert "status 0x16 of the firmware" in _refusal(_sev_guest(status=0x16))


@each_row(
    ("key", "host", "files", "chain"),
    [
        (0, [("VCEK", VCEK), ("ASK", ASK), ("ARK", ARK)], [], (VCEK, ASK, ARK)),
        (0, [], [VCEK, ASK, ARK], (VCEK, ASK, ARK)),
        (0, [], [ARK, VCEK, ASK], (VCEK, ASK, ARK)),
        # Some clouds give the leaf alone.
        (1, [("VLEK", VLEK)], [ARK, ASVK], (VLEK, ASVK, ARK)),
        (0, [("VCEK", VCEK)], [ASK, ARK], (VCEK, ASK, ARK)),
        (0, [("CRL", b"x"), ("ARK", ARK), ("ASK", ASK)], [VCEK], (VCEK, ASK, ARK)),
        # A table may have the leaves of both keys: the report says which one signed it.
        (1, [("VCEK", VCEK), ("VLEK", VLEK), ("ASK", ASVK), ("ARK", ARK)], [], (VLEK, ASVK, ARK)),
        (0, [("VCEK", VCEK), ("VLEK", VLEK), ("ASK", ASK), ("ARK", ARK)], [], (VCEK, ASK, ARK)),
        # What the host gives is of this processor; a file may be older than its firmware.
        (0, [("VCEK", VCEK), ("ASK", ASK), ("ARK", ARK)], [b"old"], (VCEK, ASK, ARK)),
    ],
)
def test_the_chain_is_of_what_the_host_and_the_operator_give(
    key: int, host: Sequence[tuple[str, bytes]], files: Sequence[bytes], chain: tuple[bytes, ...]
) -> None:
    report: Report = lambda data, vmpl: snp_report(data, vmpl, key)  # noqa: E731
    for kernel in _snp, _sev_guest:
        table = certificate_table(host)
        assert _attest(kernel(report=report, table=table), certificates=files).certificates == chain


@each_row(
    ("key", "table", "files", "got"),
    [
        (0, b"", [], "0 of 3 certificates"),
        (0, bytes(24), [], "0 of 3 certificates"),
        (0, bytes(2 * PAGE), [], "0 of 3 certificates"),
        (0, certificate_table([("VLEK", VLEK)]), [ASK, ARK], "2 of 3 certificates"),
        (1, certificate_table([("VLEK", VLEK)]), [], "1 of 3 certificates"),
        (0, certificate_table([("VCEK", b""), ("ASK", ASK), ("ARK", ARK)]), [], "2 of 3"),
        # As EFI stores a GUID, which the table does not.
        (0, GUIDS["VCEK"].bytes_le + LEAF_ALONE[16:], [ASK, ARK], "2 of 3 certificates"),
    ],
)
def test_a_chain_that_lacks_one_is_an_error_that_says_what_to_do(
    key: int, table: bytes, files: Sequence[bytes], got: str
) -> None:
    report: Report = lambda data, vmpl: snp_report(data, vmpl, key)  # noqa: E731
    refusal = _refusal(_snp(report=report, table=table), certificates=files)
    assert f"got {got}" in refusal
    assert "--attest-certificates" in refusal
    assert ("VLEK, ASK, ARK" if key else "VCEK, ASK, ARK") in refusal


@each_row("table", [WHOLE[:-1], GUIDS["CRL"].bytes + struct.pack("<II", 0, 1 << 31) + WHOLE])
def test_a_table_that_is_cut_off_is_refused(table: bytes) -> None:
    assert "cut off" in _refusal(_snp(table=table), certificates=[VCEK, ASK, ARK])


def test_no_table_is_too_odd_to_be_read() -> None:
    for length in range(len(WHOLE)):
        for table in (WHOLE[:length], b"\xff" * length):
            with suppress(EvidenceError):
                _attest(_snp(table=table))


def test_the_simulated_tee_says_the_measurement_that_it_is_given() -> None:
    attester = find_attester("simulated", measurement=b"m" * 48, system=FakeKernel().system())
    evidence = attester.attest(DATA)
    assert (attester.kind, evidence.kind) == ("simulated", "simulated")
    verified = verify_simulated(evidence.report)
    assert (verified.measurement, verified.report_data) == (b"m" * 48, DATA)


def test_the_calls_of_the_real_system_take_these_arguments(tmp_path: Path) -> None:
    nowhere = System(reports=str(tmp_path / "none"), sev_guest=str(tmp_path / "none"))
    with pytest.raises(EvidenceError, match="No such file"):
        find_attester("snp", system=nowhere)
    # A directory, but none of configfs: no file appears in it.
    with pytest.raises(EvidenceError, match="No such file"):
        find_attester("tdx", system=System(reports=str(tmp_path)), collateral=COLLATERAL)
    assert not list(tmp_path.iterdir())
    # A device, but one that does not know the ioctl.
    attester = find_attester("snp", system=nowhere._replace(sev_guest="/dev/null"))
    with pytest.raises(EvidenceError, match="Inappropriate ioctl"):
        attester.attest(DATA)


@needs_vectors
@each_row("by_host", [False, True])
def test_genuine_evidence_is_verified_after_its_way_through_a_device(by_host: bool) -> None:
    for product in "milan", "genoa", "turin":
        report = read_bytes(f"{MILAN}/tests/test_data/{product}_attestation_report.bin")
        leaf = read_pem(f"{MILAN}/tests/test_data/{product}_vcek.pem")
        intermediate = read_pem(f"{MILAN}/tests/test_data/{product}_ask.pem")
        root = read_pem(f"{MILAN}/src/pinned_arks/{product}_ark.pem")
        names = ("ARK", "VCEK", "ASK")
        given = [*root, *leaf, *intermediate]
        table = certificate_table(list(zip(names, given, strict=True))) if by_host else b""
        kernel = FakeKernel(report=lambda _data, _vmpl, one=report: one, table=table)  # type: ignore[misc]
        attester = find_attester(
            "snp", system=kernel.system(), certificates=() if by_host else given
        )
        evidence = attester.attest(SnpReport.parse(report).report_data)
        now = datetime(2026, 11, 1, tzinfo=UTC)
        assert verify_snp(evidence.report, evidence.certificates, now).product == product


@needs_vectors
def test_certificates_of_amd_are_told_apart_by_how_often_they_name_a_root() -> None:
    seen = dict[str, int]()
    names = {
        "ark.der": 2,
        "ask.der": 1,
        "asvk.der": 1,
        "live-vcek-genoa.der": 0,
        "test-vlek.der": 0,
    }
    for path in VECTORS.rglob("*.der"):
        if path.name in names:
            seen[path.name] = seen.get(path.name, 0) + 1
            assert path.read_bytes().count(b"ARK-") == names[path.name]
    assert seen.keys() == names.keys()
