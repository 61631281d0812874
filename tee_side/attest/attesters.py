"""Asks the hardware of a confidential VM for evidence of what runs in it.

Sources: Linux, "configfs-tsm-report" (Documentation/ABI/testing) and <linux/sev-guest.h>; AMD,
"SEV-ES Guest-Hypervisor Communication Block Standardization" (56421), the table of certificates.
"""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from ctypes import addressof, create_string_buffer
from functools import partial
from typing import IO, Any, NamedTuple, TypeAlias, TypeVar

from protocol.errors import EvidenceError
from tee_side.attest.evidence import MAX_EVIDENCE_BYTES, Evidence, Kind
from tee_side.attest.simulated import MEASUREMENT_BYTES, simulate
from tee_side.attest.snp_report import SigningKey, SnpReport

# A report and, of SEV-SNP, the host's table of certificates.
Found: TypeAlias = tuple[bytes, bytes]
T = TypeVar("T")

_PROVIDERS = {"snp": "sev_guest", "tdx": "tdx_guest"}
_ATTEMPTS, _PAUSE_S = 10, 0.5
# A signal, a quote that is still being made, a host that has been asked too often.
_TRANSIENT = (errno.EINTR, errno.EBUSY, errno.EAGAIN)

# SNP_GET_REPORT (0xC0205300) has no certificates. It is no second try: when the host refuses a
# request, the driver wipes its key to the firmware, and says ENOTTY from then on.
_GET_EXT_REPORT = 0xC0205302
_CALL = struct.Struct("=B7xQQQ")  # snp_guest_request_ioctl
_REQUEST = struct.Struct("=64sI28xQI4x")  # snp_ext_report_req
_RESPONSE_BYTES, _REPORT_AT = 4000, 0x20
_TABLE = 4 * 4096  # whole pages, and the most that Linux takes today
_INVALID_LENGTH, _BUSY = 1, 2  # errors of the VMM

_ENTRY = struct.Struct("<16sII")
# GUIDs, of which the bytes are in the order in which they are written, not in that of EFI.
_NAMES = {
    bytes.fromhex("63da758de6644564adc5f4b93be8accd"): "VCEK",
    bytes.fromhex("a8074bc2a25a483eaae639c045a0b8a1"): "VLEK",
    bytes.fromhex("4ab7b379bbac4fe4a02f05aef327c782"): "ASK",
    bytes.fromhex("c0b406a4a803495297433fb6014cd0ae"): "ARK",
}


class Attester(NamedTuple):
    """Gives evidence of one kind.

    `attest`: takes 64 bytes and returns evidence that has them in it; it blocks, for seconds where
    the hardware is busy, and several threads may call it. Raises EvidenceError.
    """

    kind: Kind
    attest: Callable[[bytes], Evidence]


class System(NamedTuple):
    """Where the kernel's devices are, and how it is called; tests have a kernel of their own."""

    reports: str = "/sys/kernel/config/tsm/report"
    sev_guest: str = "/dev/sev-guest"
    open: Callable[[str, str, int], IO[Any]] = open
    mkdir: Callable[[str], None] = os.mkdir
    rmdir: Callable[[str], None] = os.rmdir
    ioctl: Callable[[IO[Any], int, bytearray], int] = fcntl.ioctl
    sleep: Callable[[float], None] = time.sleep


_SYSTEM = System()


def find_attester(
    kind: Kind,
    *,
    certificates: Sequence[bytes] = (),
    collateral: bytes = b"",
    vmpl: int | None = None,
    measurement: bytes = bytes(MEASUREMENT_BYTES),
    system: System = _SYSTEM,
) -> Attester:
    """Return what gives evidence of this kind here. Raises EvidenceError.

    `certificates`: of SEV-SNP, those that the host does not give, in DER, in any order.
    `collateral`: see `Evidence`; TDX needs it. `vmpl`: the privilege level that SEV-SNP's report is
    of, the kernel's default for None. `measurement`: 48 bytes, what a simulated TEE says.
    """
    if kind == "simulated":
        return Attester(kind, partial(simulate, measurement=measurement))
    ask = _again(kind, system, partial(_find, kind, vmpl, system))

    def attest(report_data: bytes) -> Evidence:
        if kind == "tdx" and not collateral:
            raise _refused(kind, "no collateral", "what Intel says of this platform, in JSON")
        report, table = _again(kind, system, partial(ask, report_data))
        chain: tuple[bytes, ...] = ()
        if kind == "snp":
            parsed = SnpReport.parse(report)
            if parsed.report_data != report_data:
                raise _refused(kind, "a report of other data", "one of the data that it was given")
            chain = _chain(parsed.signing_key, table, certificates)
        if not report:
            # This is how some kernels say that the host made no quote.
            raise _refused(kind, "an empty report", "a quote")
        return Evidence(kind=kind, report=report, certificates=chain, collateral=collateral)

    return Attester(kind, attest)


def _find(kind: Kind, vmpl: int | None, system: System) -> Callable[[bytes], Found]:
    try:
        with _report_entry(kind, system) as entry:
            got = _read(system, f"{entry}/provider").decode("ascii", "replace").strip()
    except (FileNotFoundError, PermissionError) as error:
        got = str(error.strerror)
        if kind == "snp":
            with suppress(FileNotFoundError), system.open(system.sev_guest, "r+b", 0):
                return partial(_ask_sev_guest, vmpl or 0, system)
    if got != _PROVIDERS[kind]:
        either = f" or {system.sev_guest}" if kind == "snp" else ""
        raise _refused(kind, got, f"{_PROVIDERS[kind]} at {system.reports}{either}")
    return partial(_ask_configfs, kind, vmpl, system)


def _ask_configfs(kind: Kind, vmpl: int | None, system: System, report_data: bytes) -> Found:
    writes = {} if vmpl is None else {"privlevel": str(vmpl).encode()}
    writes["inblob"] = report_data
    with _report_entry(kind, system) as entry:
        before = int(_read(system, f"{entry}/generation"))
        for name, data in writes.items():
            with system.open(f"{entry}/{name}", "wb", -1) as file:
                file.write(data)
        report = _read(system, f"{entry}/outblob")
        table = _read(system, f"{entry}/auxblob") if kind == "snp" else b""
        # It rises by one with each write, and not with ours alone.
        if int(_read(system, f"{entry}/generation")) != before + len(writes):
            raise OSError(errno.EAGAIN, "another writer came between")
    return report, table


@contextmanager
def _report_entry(kind: Kind, system: System) -> Iterator[str]:
    entry = f"{system.reports}/tsqp-{secrets.token_hex(16)}"
    system.mkdir(entry)
    try:
        yield entry
    finally:
        _again(kind, system, partial(system.rmdir, entry))


def _ask_sev_guest(vmpl: int, system: System, report_data: bytes, size: int = _TABLE) -> Found:
    table, response = create_string_buffer(size), create_string_buffer(_RESPONSE_BYTES)
    request = create_string_buffer(_REQUEST.pack(report_data, vmpl, addressof(table), size))
    call = bytearray(_CALL.pack(1, addressof(request), addressof(response), 0))
    try:
        with system.open(system.sev_guest, "r+b", 0) as device:
            system.ioctl(device, _GET_EXT_REPORT, call)
    except OSError as error:
        vmm_error, needed = _CALL.unpack(call)[3] >> 32, _REQUEST.unpack_from(request)[3]
        if vmm_error == _BUSY:
            raise OSError(errno.EAGAIN, "the host is busy") from error
        if vmm_error == _INVALID_LENGTH and size < needed <= MAX_EVIDENCE_BYTES:
            return _ask_sev_guest(vmpl, system, report_data, needed)
        raise
    status, length = struct.unpack_from("<II", response)
    if status:
        raise _refused("snp", f"status {status:#x} of the firmware", "0")
    return response.raw[_REPORT_AT : _REPORT_AT + length], table.raw


def _chain(key: SigningKey, table: bytes, certificates: Sequence[bytes]) -> tuple[bytes, ...]:
    """Return leaf, intermediate and root: the host's where it gives them, else the operator's."""
    found: dict[str, bytes] = {}
    for guid, begin, size in _ENTRY.iter_unpack(table[: len(table) // _ENTRY.size * _ENTRY.size]):
        if not any(guid):
            break
        if begin + size > len(table):
            raise _refused("snp", "a table of certificates that is cut off", "a whole one")
        found[_NAMES.get(guid, "other")] = table[begin : begin + size]
    # An ARK names itself twice, as subject and issuer; what it signed names it once; a leaf never.
    given = {one.count(b"ARK-"): one for one in certificates}
    names = (key.upper(), "ASK", "ARK")
    chain = tuple(found.get(name) or given.get(n, b"") for n, name in enumerate(names))
    if not all(chain):
        expected = f"{', '.join(names)}, of the host or in files: --attest-certificates"
        raise _refused("snp", f"{3 - chain.count(b'')} of 3 certificates", expected)
    return chain


def _read(system: System, path: str) -> bytes:
    with system.open(path, "rb", -1) as file:
        data: bytes = file.read(MAX_EVIDENCE_BYTES + 1)
    if len(data) > MAX_EVIDENCE_BYTES:
        raise EvidenceError(path, got="more", expected=f"{MAX_EVIDENCE_BYTES} bytes at most")
    return data


def _again(kind: Kind, system: System, call: Callable[[], T]) -> T:
    """Call it until it fails with no error that passes by itself. Raises EvidenceError."""
    got = ""
    for _ in range(_ATTEMPTS):
        try:
            return call()
        except OSError as error:
            got = str(error)
            if error.errno not in _TRANSIENT:
                break
        system.sleep(_PAUSE_S)
    raise _refused(kind, got, "a device that answers this user")


def _refused(kind: Kind, got: str, expected: str) -> EvidenceError:
    return EvidenceError(f"{kind} attester", got=got, expected=expected)
