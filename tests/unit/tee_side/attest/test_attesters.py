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
from tee_side.attest import attesters
from tee_side.attest.attesters import Attester, find_attester
from tee_side.attest.evidence import Evidence
from tee_side.attest.simulated import verify_simulated
from tee_side.attest.snp import verify_snp
from tee_side.attest.snp_report import SnpReport
from tests.kit.evidence import OPENPCC, VECTORS, needs_vectors, read_bytes, read_pem
from tests.kit.fake_tsm import BUSY, GUIDS, PAGE, FakeKernel, certificate_table, snp_report
from tests.kit.rows import each_row

DATA = bytes(range(64))
# With names as AMD's have them: that of the issuer, and their own.
VCEK, VLEK = b"SEV-VCEK by SEV-Milan", b"SEV-VLEK by SEV-VLEK-Milan"
ASK, ASVK = b"SEV-Milan by ARK-Milan", b"SEV-VLEK-Milan by ARK-Milan"
ARK, CRL = b"ARK-Milan by ARK-Milan", b"revoked by ARK-Milan"
AUTHORITIES = [("ASK", ASK), ("ARK", ARK)]
WHOLE = certificate_table([("ARK", ARK), ("ASK", ASK), ("VCEK", VCEK)])
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


def _find(kernel: FakeKernel, **options: Any) -> Attester:
    tdx = kernel.provider == "tdx_guest"
    if tdx:
        options = {"collateral": COLLATERAL, **options}
    return find_attester(**{"kind": "tdx" if tdx else "snp", **options})


def _attest(kernel: FakeKernel, **options: Any) -> Evidence:
    """Ask for evidence, after which nothing may be left open or behind."""
    with pytest.MonkeyPatch.context() as patch:
        kernel.install(patch)
        try:
            attester = _find(kernel, **options)
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


def test_a_quote_without_collateral_is_refused_before_the_device_is_asked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kernel = _tdx()
    kernel.install(monkeypatch)
    attester = _find(kernel, collateral=b"")
    kernel.faults["read outblob"] = [errno.EIO]
    with pytest.raises(EvidenceError, match="got no collateral"):
        attester.attest(DATA)
    assert kernel.faults["read outblob"]


def test_an_empty_quote_is_refused() -> None:
    assert "got a report of other data" in _refusal(_tdx(report=lambda _data, _vmpl: b""))


def test_a_device_that_is_here_is_asked_once_to_know_that_it_works(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for kernel in _snp(), _tdx():
        kernel.install(monkeypatch)
        kernel.faults["read outblob"] = [errno.EIO]
        with pytest.raises(EvidenceError, match="Input/output error"):
            _find(kernel)
        _find(kernel)
        assert len(kernel.made) == 2
    kernel = _sev_guest(ioctl_faults=[(errno.ENOTTY, 0xFF)])
    kernel.install(monkeypatch)
    with pytest.raises(EvidenceError, match="Inappropriate ioctl"):
        _find(kernel)


def test_each_report_has_a_directory_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = _snp()
    kernel.install(monkeypatch)
    attester = _find(kernel)
    attester.attest(DATA)
    attester.attest(DATA)
    assert len(set(kernel.made)) == len(kernel.made) == 3
    assert kernel.entries == {}


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
    with pytest.MonkeyPatch.context() as patch:
        kernel.install(patch)
        with pytest.raises(EvidenceError, match="busy"):
            _find(kernel)


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


def test_a_report_that_is_too_long_is_refused() -> None:
    longest = _tdx(report=lambda data, _vmpl: data.ljust(Evidence.max_bytes))
    assert len(_attest(longest).report) == Evidence.max_bytes
    longer = _tdx(report=lambda data, _vmpl: data.ljust(Evidence.max_bytes + 1))
    assert f"got more than {Evidence.max_bytes} bytes" in _refusal(longer)


@each_row("kernel", [_snp, _sev_guest], ids=["configfs", "ioctl"])
def test_a_report_of_other_data_is_refused(kernel: Callable[..., FakeKernel]) -> None:
    other: Report = lambda _data, vmpl: snp_report(bytes(64), vmpl)  # noqa: E731
    assert "a report of other data" in _refusal(kernel(report=other))
    assert "SNP report: size" in _refusal(kernel(report=_quote))


def test_what_is_not_here_is_an_error_that_names_where_it_was_looked_for() -> None:
    refusal = _refusal(FakeKernel(configfs=False))
    assert refusal.startswith("snp attester: got [Errno 2] No such file or directory")
    assert refusal.endswith(", expected its device (sev_guest), open to this user")
    # A quote is not to be had by SEV-SNP's device.
    refusal = _refusal(FakeKernel(configfs=False, sev_guest=True), kind="tdx")
    assert refusal.endswith(", expected its device (tdx_guest), open to this user")


@each_row(
    ("kind", "provider"), [("snp", "tdx_guest"), ("tdx", "sev_guest"), ("snp", "arm_cca_guest")]
)
def test_another_kind_of_machine_is_an_error(kind: Any, provider: str) -> None:
    refusal = _refusal(FakeKernel(provider=provider, sev_guest=True), kind=kind)
    expected = {"snp": "sev_guest", "tdx": "tdx_guest"}[kind]
    assert refusal.startswith(
        f"{kind} attester: got another provider, expected its device ({expected})"
    )


def test_a_user_who_may_use_the_device_alone_uses_it() -> None:
    kernel = _snp(sev_guest=True, writable=False)
    assert _attest(kernel).certificates == (VCEK, ASK, ARK)
    assert kernel.made == []
    denied = _faults({"open sev-guest": [errno.EACCES]})
    for kernel in _sev_guest(faults=denied), _tdx(writable=False):
        assert "Permission denied" in _refusal(kernel)


def test_a_table_that_is_longer_than_the_buffer_is_an_error() -> None:
    """Linux takes no longer buffer."""
    longest = certificate_table([("CRL", bytes(3 * PAGE)), ("VCEK", VCEK), *AUTHORITIES])
    assert _attest(_sev_guest(table=longest)).certificates == (VCEK, ASK, ARK)
    longer = certificate_table([("CRL", bytes(4 * PAGE)), ("VCEK", VCEK), *AUTHORITIES])
    assert "Input/output error" in _refusal(_sev_guest(table=longer))


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
        (0, [("CRL", CRL), ("ARK", ARK), ("ASK", ASK), ("CRL", CRL)], [VCEK], (VCEK, ASK, ARK)),
        # A table may have the leaves of both keys: the report says which one signed it.
        (1, [("VCEK", VCEK), ("VLEK", VLEK), ("ASK", ASVK), ("ARK", ARK)], [], (VLEK, ASVK, ARK)),
        (0, [("VCEK", VCEK), ("VLEK", VLEK), ("ASK", ASK), ("ARK", ARK)], [], (VCEK, ASK, ARK)),
        # An operator may have all that there are.
        (0, [], [ARK, ASK, ASVK, VLEK, VCEK], (VCEK, ASK, ARK)),
        (1, [], [VCEK, VLEK, ASVK, ASK, ARK], (VLEK, ASVK, ARK)),
        # What the host gives is of this processor; a file may be older than its firmware.
        (0, [("VCEK", VCEK), ("ASK", ASK), ("ARK", ARK)], [b"old " + VCEK], (VCEK, ASK, ARK)),
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
        (1, certificate_table([("VLEK", VLEK)]), [ASK, ARK], "2 of 3 certificates"),
        (0, certificate_table([("VCEK", b""), ("ASK", ASK), ("ARK", ARK)]), [], "2 of 3"),
        (0, certificate_table([("VCEK", VCEK), ("CRL", CRL)]), [ARK], "2 of 3 certificates"),
        # The sixteenth entry is the last that is looked at.
        (0, certificate_table([*[("CRL", CRL)] * 14, *AUTHORITIES, ("VCEK", VCEK)]), [], "2 of 3"),
    ],
)
def test_a_chain_that_lacks_one_is_an_error_that_says_what_to_do(
    key: int, table: bytes, files: Sequence[bytes], got: str
) -> None:
    report: Report = lambda data, vmpl: snp_report(data, vmpl, key)  # noqa: E731
    refusal = _refusal(_snp(report=report, table=table), certificates=files)
    assert f"got {got}" in refusal
    assert "--attest-certificate" in refusal
    assert f"expected {'VLEK' if key else 'VCEK'}, ASK and ARK" in refusal


@each_row("table", [WHOLE[:-1], GUIDS["CRL"].bytes + struct.pack("<II", 0, 1 << 31) + WHOLE])
def test_a_table_that_is_cut_off_is_refused(table: bytes) -> None:
    assert "cut off" in _refusal(_snp(table=table), certificates=[VCEK, ASK, ARK])


def test_no_table_is_too_odd_to_be_read() -> None:
    for length in range(len(WHOLE)):
        for table in (WHOLE[:length], b"\xff" * length):
            with suppress(EvidenceError):
                _attest(_snp(table=table))


def test_the_simulated_tee_says_the_measurement_that_it_is_given() -> None:
    attester = find_attester("simulated", measurement=b"m" * 48)
    evidence = attester.attest(DATA)
    assert (attester.kind, evidence.kind) == ("simulated", "simulated")
    verified = verify_simulated(evidence.report)
    assert (verified.measurement, verified.report_data) == (b"m" * 48, DATA)


def test_the_calls_of_the_real_system_take_these_arguments(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(attesters, "REPORTS", str(tmp_path / "none"))
    for kind, name in ("tdx", "none/tsqp-"), ("snp", "no device"):
        monkeypatch.setattr(attesters, "SEV_GUEST", str(tmp_path / "no device"))
        with pytest.raises(EvidenceError, match=rf"No such file.*{name}"):
            find_attester(kind)
    # A device, but one that does not know the ioctl.
    monkeypatch.setattr(attesters, "SEV_GUEST", "/dev/null")
    with pytest.raises(EvidenceError, match="Inappropriate ioctl"):
        find_attester("snp")
    # A directory, but none of configfs: no file appears in it.
    monkeypatch.setattr(attesters, "REPORTS", str(tmp_path))
    for kind in "tdx", "snp":
        with pytest.raises(EvidenceError, match=r"No such file.*tsqp-.*/provider"):
            find_attester(kind)
    assert not list(tmp_path.iterdir())


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
        with pytest.MonkeyPatch.context() as patch:
            kernel.install(patch)
            attester = _find(kernel, certificates=() if by_host else given)
            evidence = attester.attest(SnpReport.parse(report).report_data)
        now = datetime(2026, 11, 1, tzinfo=UTC)
        assert verify_snp(evidence.report, evidence.certificates, now).product == product


@needs_vectors
def test_certificates_of_amd_are_told_apart_by_the_names_in_them() -> None:
    """How often they name a root, and what else they name."""
    seen = set[str]()
    names = {
        "ark.der": (2, False, False),
        "ask.der": (1, True, False),
        "asvk.der": (1, True, True),
        "live-vcek-genoa.der": (0, True, False),
        "test-vlek.der": (0, True, True),
    }
    for path in VECTORS.rglob("*.der"):
        if path.name in names:
            seen.add(path.name)
            one = path.read_bytes()
            told = one.count(b"ARK-"), b"SEV-" in one, b"SEV-VLEK" in one
            assert told == names[path.name]
    assert seen == names.keys()
    for crl in read_pem(OPENPCC)[:2]:
        assert (crl.count(b"ARK-"), b"SEV-" in crl) == (1, False)
