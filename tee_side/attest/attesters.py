"""Asks the hardware of a confidential VM for evidence of what runs in it.

What fails at a device raises OSError; `_again` tries it again, and makes an EvidenceError of what
does not pass by itself.

Sources: Linux, "configfs-tsm-report" (Documentation/ABI/testing) and <linux/sev-guest.h>; AMD,
"SEV-ES Guest-Hypervisor Communication Block Standardization" (56421), the table of certificates.
"""

import errno
import struct
from collections.abc import Callable, Sequence
from ctypes import addressof, create_string_buffer
from fcntl import ioctl
from functools import partial
from os import W_OK, access, rmdir
from tempfile import mkdtemp
from time import sleep
from typing import NamedTuple, TypeVar

from protocol.errors import EvidenceError
from tee_side.attest.guests import MEASUREMENT_BYTES, SnpReport, simulate
from tee_side.attest.statement import REPORT_DATA_BYTES, Evidence, Kind

T = TypeVar("T")

REPORTS, SEV_GUEST = "/sys/kernel/config/tsm/report", "/dev/sev-guest"

_PROVIDERS = {"snp": "sev_guest", "tdx": "tdx_guest"}

_ATTEMPTS, _PAUSE_S = 10, 0.5

# A signal, a quote that is still being made, a host that has been asked too often.
_TRANSIENT = (errno.EINTR, errno.EBUSY, errno.EAGAIN)

_CALL = struct.Struct("=B7xQQQ")  # snp_guest_request_ioctl

_REQUEST = struct.Struct("=64s32xQI4x")  # snp_ext_report_req, of VMPL 0

_RESPONSE = struct.Struct("=II24x3968s")  # snp_report_resp

_TABLE_BYTES = 4 * 4096  # whole pages, and the most that Linux takes


class Attester(NamedTuple):
    """Gives evidence of one kind.

    `attest`: takes 64 bytes and returns evidence that has them in it; it blocks, for seconds where
    the hardware is busy, and several threads may call it. Raises EvidenceError.
    """

    kind: Kind
    attest: Callable[[bytes], Evidence]


def find_attester(
    kind: Kind,
    *,
    certificates: Sequence[bytes] = (),
    collateral: bytes = b"",
    measurement: bytes = bytes(MEASUREMENT_BYTES),
) -> Attester:
    """Return what gives evidence of this kind, after it was asked once. Raises EvidenceError.

    `certificates`: of SEV-SNP, those that the host does not give, in DER, in any order.
    `collateral`: see `Evidence`; TDX needs it. `measurement`: 48 bytes, what a simulated TEE says.
    """
    if kind == "simulated":
        return Attester(kind, partial(simulate, measurement=measurement))
    by_ioctl = kind == "snp" and not access(REPORTS, W_OK)
    ask = _ask_sev_guest if by_ioctl else partial(_ask_configfs, kind)

    def attest(report_data: bytes) -> Evidence:
        EvidenceError.unless(
            kind != "tdx" or collateral, "tdx attester", "no collateral", "--attest-collateral"
        )
        report, table = _again(kind, partial(ask, report_data))
        # Some kernels say with an empty report that the host made no quote.
        EvidenceError.unless(
            report_data in report, f"{kind} attester", "a report of other data", "ours"
        )
        chain = _chain(report, table, certificates) if kind == "snp" else ()
        return Evidence(kind=kind, report=report, certificates=chain, collateral=collateral)

    _again(kind, partial(ask, bytes(REPORT_DATA_BYTES)))
    return Attester(kind, attest)


def _ask_configfs(kind: Kind, report_data: bytes) -> tuple[bytes, bytes]:
    """Return a report and, of SEV-SNP, the host's table of certificates. Raises OSError."""
    # A directory of configfs, in which the kernel has files.
    entry = mkdtemp(prefix="tsqp-", dir=REPORTS)
    try:
        if _read(f"{entry}/provider").strip().decode("ascii", "replace") != _PROVIDERS[kind]:
            raise OSError("another provider")
        before = int(_read(f"{entry}/generation"))
        with open(f"{entry}/inblob", "wb") as file:
            file.write(report_data)
        report = _read(f"{entry}/outblob")
        table = _read(f"{entry}/auxblob") if kind == "snp" else b""
        # It rises by one with each write, and not with ours alone.
        if int(_read(f"{entry}/generation")) != before + 1:
            raise OSError(errno.EAGAIN, "another writer came between")
        return report, table
    finally:
        _again(kind, partial(rmdir, entry))


def _read(path: str) -> bytes:
    with open(path, "rb") as file:
        data = file.read(Evidence.max_bytes + 1)
    if len(data) > Evidence.max_bytes:
        raise OSError(f"more than {Evidence.max_bytes} bytes")
    return data


def _ask_sev_guest(report_data: bytes) -> tuple[bytes, bytes]:
    """Return a report and the host's table of certificates. Raises OSError.

    SNP_GET_REPORT (0xC0205300) has no certificates. It is no second try: when the host refuses a
    request, the driver wipes its key to the firmware, and says ENOTTY from then on.
    """
    table, response = create_string_buffer(_TABLE_BYTES), create_string_buffer(_RESPONSE.size)
    request = create_string_buffer(_REQUEST.pack(report_data, addressof(table), _TABLE_BYTES))
    call = bytearray(_CALL.pack(1, addressof(request), addressof(response), 0))
    try:
        with open(SEV_GUEST, "r+b", 0) as device:
            ioctl(device, 0xC0205302, call)  # SNP_GET_EXT_REPORT
    except OSError as error:
        if _CALL.unpack(call)[3] >> 32 == 2:  # SNP_GUEST_VMM_ERR_BUSY
            raise OSError(errno.EAGAIN, "the host is busy") from error
        raise
    status, length, report = _RESPONSE.unpack_from(response)
    if status:
        raise OSError(f"status {status:#x} of the firmware")
    return report[:length], table.raw


def _again(kind: Kind, call: Callable[[], T], attempts: int = _ATTEMPTS) -> T:
    """Call it until it fails with no error that passes by itself. Raises EvidenceError."""
    try:
        return call()
    except OSError as error:
        if attempts == 1 or error.errno not in _TRANSIENT:
            expected = f"its device ({_PROVIDERS[kind]}), open to this user"
            raise EvidenceError(f"{kind} attester", got=str(error), expected=expected) from None
        sleep(_PAUSE_S)
        return _again(kind, call, attempts - 1)


def _chain(report: bytes, table: bytes, certificates: Sequence[bytes]) -> tuple[bytes, ...]:
    """Return leaf, intermediate and root: the host's where it gives them, else the operator's.

    The names in them tell them apart: a root has its own twice, as subject and issuer; what it
    signed has it once, and a leaf not at all.
    """
    key, given = SnpReport.parse(report).signing_key, [*certificates]
    # A host gives five at most; more entries than 16 are not looked at.
    for at in range(0, min(len(table) - 23, 16 * 24), 24):
        guid, begin, size = struct.unpack_from("<16sII", table, at)
        if not any(guid):
            break
        EvidenceError.unless(
            begin + size <= len(table), "snp attester", "a table that is cut off", "all of it"
        )
        given.append(table[begin : begin + size])
    found = {(one.count(b"ARK-"), b"SEV-" in one, b"SEV-VLEK" in one): one for one in given}
    places = (0, True, key == "vlek"), (1, True, key == "vlek"), (2, False, False)
    chain = tuple(found.get(place, b"") for place in places)
    got = f"{3 - chain.count(b'')} of 3 certificates"
    expected = f"{key.upper()}, ASK and ARK, of the host or in files: --attest-certificate"
    EvidenceError.unless(all(chain), "snp attester", got, expected)
    return chain
