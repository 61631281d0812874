"""Evidence is asked for as Linux has it; what a device does wrong is an EvidenceError."""

import errno
import struct
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from protocol.errors import EvidenceError
from tee_side.attest import attesters
from tee_side.attest.attesters import find_attester
from tee_side.attest.statement import Evidence
from tests.kit.fake_tsm import BUSY, PAGE, FakeKernel, certificate_table, snp_report
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


def _quote(data: bytes, _vmpl: int) -> bytes:
    return b"a quote of " + data


def _snp(**settings: Any) -> FakeKernel:
    return FakeKernel(**{"table": WHOLE, **settings})


def _tdx(**settings: Any) -> FakeKernel:
    return FakeKernel(**{"provider": "tdx_guest", "report": _quote, **settings})


def _sev_guest(**settings: Any) -> FakeKernel:
    return _snp(**{"configfs": False, "sev_guest": True, **settings})


def _attest(kernel: FakeKernel, **options: Any) -> Evidence:
    """Ask for evidence, after which nothing may be left open or behind."""
    tdx = kernel.provider == "tdx_guest"
    of_kind = {"kind": "tdx", "collateral": COLLATERAL} if tdx else {"kind": "snp"}
    with pytest.MonkeyPatch.context() as patch:
        kernel.install(patch)
        try:
            attester = find_attester(**{**of_kind, **options})
            evidence = attester.attest(DATA)
        finally:
            assert (kernel.opened, kernel.entries) == (0, {})
    assert attester.kind == evidence.kind
    return evidence


def _refusal(kernel: FakeKernel, **options: Any) -> str:
    with pytest.raises(EvidenceError) as refused:
        _attest(kernel, **options)
    return str(refused.value)


# The longest table that Linux takes.
LONGEST = certificate_table([("CRL", bytes(3 * PAGE)), ("VCEK", VCEK), *AUTHORITIES])


@each_row(
    ("kernel", "made"),
    [
        (_snp(largest_read=7), 2),
        (_sev_guest(table=LONGEST), 0),
        # A user who may make no directory uses the device.
        (_snp(sev_guest=True, writable=False), 0),
    ],
)
def test_a_report_comes_with_the_certificates_of_the_host_in_order(
    kernel: FakeKernel, made: int
) -> None:
    evidence = _attest(kernel)
    assert len(kernel.made) == made
    assert evidence.report == snp_report(DATA)
    assert evidence.certificates == (VCEK, ASK, ARK)
    assert (evidence.kind, evidence.collateral) == ("snp", b"")
    assert kernel.pauses == []
    assert _attest(kernel, collateral=b"revoked").collateral == b"revoked"


def test_a_quote_comes_with_the_collateral_of_the_operator(monkeypatch: pytest.MonkeyPatch) -> None:
    for largest in (PAGE, 3):
        assert _attest(_tdx(largest_read=largest)) == Evidence(
            kind="tdx", report=_quote(DATA, 0), certificates=(), collateral=COLLATERAL
        )
    assert "got a report of other data" in _refusal(_tdx(report=lambda _data, _vmpl: b""))
    # Without any, it is refused before the device is asked.
    kernel = _tdx()
    kernel.install(monkeypatch)
    attester = find_attester("tdx")
    kernel.faults["read outblob"] = [errno.EIO]
    with pytest.raises(EvidenceError, match="got no collateral"):
        attester.attest(DATA)
    assert kernel.faults["read outblob"]


@each_row("call", ["mkdir", "open inblob", "read outblob"])
def test_a_failure_that_passes_is_tried_again(call: str) -> None:
    kernel = _snp(faults={call: [errno.EINTR, errno.EBUSY, errno.EAGAIN]})
    assert _attest(kernel).report == snp_report(DATA)
    assert not kernel.faults[call]
    kernel = _snp(faults={call: [errno.EBUSY] * 1000})
    assert "Device or resource busy" in _refusal(kernel)
    assert 1 <= sum(kernel.pauses) <= 60
    # One that stays is an error at once.
    kernel = _snp(faults={call: [errno.EIO]})
    assert _refusal(kernel).startswith("snp attester: got ")
    assert kernel.pauses == []
    # A host that throttles is asked again, too.
    kernel = _sev_guest(ioctl_faults=[(errno.EIO, BUSY)] * 3)
    assert _attest(kernel).report == snp_report(DATA)
    assert len(kernel.pauses) == 3


@each_row("name", ["outblob", "auxblob", "generation"])
def test_a_report_of_another_writer_is_not_ours(name: str) -> None:
    # The first read of `generation` comes before our write, when no report can be another's.
    again = 2 if name == "generation" else 1
    kernel = _snp(intrusions=[name] * again)
    assert _attest(kernel).report == snp_report(DATA)
    assert not kernel.intrusions
    assert len(kernel.pauses) >= 1
    assert "another writer" in _refusal(_snp(intrusions=[name] * 1000))


def test_another_report_than_was_asked_for_is_refused() -> None:
    for kernel in (_snp, _sev_guest):
        other: Report = lambda _data, vmpl: snp_report(bytes(64), vmpl)  # noqa: E731
        assert "a report of other data" in _refusal(kernel(report=other))
        assert "SNP report: size" in _refusal(kernel(report=_quote))
    longer = _tdx(report=lambda data, _vmpl: data.ljust(Evidence.max_bytes + 1))
    assert f"got more than {Evidence.max_bytes} bytes" in _refusal(longer)


@each_row(
    ("kernel", "kind", "got"),
    [
        # A quote is not to be had by SEV-SNP's device.
        (FakeKernel(configfs=False, sev_guest=True), "tdx", "[Errno 2] No such file or directory"),
        (FakeKernel(provider="tdx_guest", sev_guest=True), "snp", "another provider"),
        (_tdx(writable=False), "tdx", "[Errno 13] Permission denied"),
        (_sev_guest(status=0x16), "snp", "status 0x16 of the firmware"),
    ],
)
def test_a_machine_without_a_device_that_works_is_an_error_that_names_it(
    kernel: FakeKernel, kind: str, got: str
) -> None:
    assert _refusal(kernel, kind=kind).startswith(f"{kind} attester: got {got}")
    assert kernel.pauses == []


CHAIN, OF_VLEK = (VCEK, ASK, ARK), (VLEK, ASVK, ARK)
OF_HOST = [("VCEK", VCEK), ("ASK", ASK), ("ARK", ARK)]


@each_row(
    ("key", "host", "files", "chain"),
    [
        (0, [], [ARK, VCEK, ASK], CHAIN),
        # Some clouds give the leaf alone.
        (1, [("VLEK", VLEK)], [ARK, ASVK], OF_VLEK),
        # A table may have the leaves of both keys: the report says which one signed it.
        (1, [("VCEK", VCEK), ("VLEK", VLEK), ("ASK", ASVK), ("ARK", ARK)], [], OF_VLEK),
        # One that lacks some is an error that says what to do.
        (1, [("VLEK", VLEK)], [ASK, ARK], "got 2 of 3 certificates, expected VLEK, ASK and ARK"),
        # The sixteenth entry is the last that is looked at.
        (0, [*[("CRL", CRL)] * 14, *AUTHORITIES, ("VCEK", VCEK)], [], "got 2 of 3"),
    ],
)
def test_the_chain_is_of_what_the_host_and_the_operator_give(
    key: int,
    host: Sequence[tuple[str, bytes]],
    files: Sequence[bytes],
    chain: tuple[bytes, ...] | str,
) -> None:
    report: Report = lambda data, vmpl: snp_report(data, vmpl, key)  # noqa: E731
    table = certificate_table(host)
    if isinstance(chain, str):
        assert chain in _refusal(_snp(report=report, table=table), certificates=files)
        return
    for kernel in _snp, _sev_guest:
        assert _attest(kernel(report=report, table=table), certificates=files).certificates == chain


def test_a_table_that_is_cut_off_is_refused_and_none_is_too_odd_to_be_read() -> None:
    whole = certificate_table(OF_HOST)
    for table in (whole[:-1], b"\1" * 16 + struct.pack("<II", 0, 1 << 31) + whole):
        assert "cut off" in _refusal(_snp(table=table), certificates=CHAIN)
    for length in range(len(whole)):
        for table in (whole[:length], b"\xff" * length):
            with suppress(EvidenceError):
                _attest(_snp(table=table))


def test_the_calls_of_the_real_system_take_these_arguments(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    nowhere, null = str(tmp_path / "none"), "/dev/null"
    for kind, reports, device, refusal in (
        ("snp", nowhere, nowhere, r"No such file.*none"),
        # A device, but one that does not know the ioctl.
        ("snp", nowhere, null, "Inappropriate ioctl"),
        # A directory, but none of configfs: no file appears in it.
        ("snp", str(tmp_path), null, r"No such file.*tsqp-.*/provider"),
    ):
        monkeypatch.setattr(attesters, "REPORTS", reports)
        monkeypatch.setattr(attesters, "SEV_GUEST", device)
        with pytest.raises(EvidenceError, match=refusal):
            find_attester(kind)  # type: ignore[arg-type]
    assert not list(tmp_path.iterdir())
