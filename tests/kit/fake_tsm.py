"""A kernel with the devices of a confidential VM, for tests of `tee_side.attest.attesters`.

It does what Linux does (drivers/virt/coco, fs/configfs), without hardware and without waiting:

- files appear with `mkdir`; there are fewer of them for TDX;
- `generation` rises by one with each write; a report is made when it is read;
- binary files are written when they are closed;
- a read may return less than was asked for;
- each call can be told to fail, and another writer to come in between (`faults`, `intrusions`).
"""

import ctypes
import errno
import io
import os
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import IO, Any, cast
from uuid import UUID

import pytest

from tee_side.attest import attesters
from tee_side.attest.attesters import REPORTS, SEV_GUEST

PAGE = 4096
BUSY = 2 << 32
GUIDS = {
    "VCEK": UUID("63da758d-e664-4564-adc5-f4b93be8accd"),
    "VLEK": UUID("a8074bc2-a25a-483e-aae6-39c045a0b8a1"),
    "ASK": UUID("4ab7b379-bbac-4fe4-a02f-05aef327c782"),
    "ARK": UUID("c0b406a4-a803-4952-9743-3fb6014cd0ae"),
    "CRL": UUID("92f81bc3-5811-4d3d-97ff-d19f88dc67ea"),
}

# A read-write ioctl of type S, number 2, with the 32 bytes of snp_guest_request_ioctl.
_GET_EXT_REPORT = 3 << 30 | 32 << 16 | ord("S") << 8 | 2
_CALL = struct.Struct("<B7xQQQ")  # snp_guest_request_ioctl
_REQUEST = struct.Struct("<64sI28xQI4x")  # snp_ext_report_req


def snp_report(data: bytes, vmpl: int = 0, key: int = 0) -> bytes:
    """Return a report that can be parsed; its signature is none. `key`: 0 VCEK, 1 VLEK."""
    report = bytearray(1184)
    for at, number in ((0x00, 2), (0x08, 1 << 17), (0x30, vmpl), (0x34, 1), (0x48, key << 2)):
        struct.pack_into("<I", report, at, number)
    report[0x50:0x90] = data
    return bytes(report)


def certificate_table(certificates: Sequence[tuple[str, bytes]]) -> bytes:
    begin = 24 * (len(certificates) + 1)
    head, body = b"", b""
    for name, one in certificates:
        head += GUIDS[name].bytes + struct.pack("<II", begin + len(body), len(one))
        body += one
    return head + bytes(24) + body


@dataclass
class _Entry:
    generation: int = 0
    inblob: bytes = b""


@dataclass
class FakeKernel:
    """A kernel. `largest_read`: bytes that one read returns at most.

    `writable`: whether this user may make directories. `faults`: for each call the errors of its
    first times: "mkdir", or "open" or "read" with the name of a file.
    `ioctl_faults`: the same of the ioctl, with `exitinfo2`. `intrusions`: names of files; before
    the next read of one, another writer writes.
    """

    provider: str = "sev_guest"
    configfs: bool = True
    writable: bool = True
    sev_guest: bool = False
    report: Callable[[bytes, int], bytes] = snp_report
    table: bytes = b""
    status: int = 0
    largest_read: int = PAGE
    faults: dict[str, list[int]] = field(default_factory=dict)
    ioctl_faults: list[tuple[int, int]] = field(default_factory=list)
    intrusions: list[str] = field(default_factory=list)
    entries: dict[str, _Entry] = field(default_factory=dict)
    made: list[str] = field(default_factory=list)
    pauses: list[float] = field(default_factory=list)
    opened: int = 0

    def install(self, patch: pytest.MonkeyPatch) -> None:
        """Let attesters call it in the place of the real one."""
        calls = {"access": self.access, "mkdtemp": self.mkdtemp, "rmdir": self.rmdir}
        calls |= {"open": self.open, "ioctl": self.ioctl, "sleep": self.pauses.append}
        for name, call in calls.items():
            patch.setattr(attesters, name, call, raising=name != "open")

    def fail(self, call: str) -> None:
        """Raise the next error that this call was told to have."""
        if errors := self.faults.get(call):
            _fail(errors.pop(0))

    def access(self, path: str, mode: int) -> bool:
        return (path, mode) == (REPORTS, os.W_OK) and self.configfs and self.writable

    def mkdtemp(self, prefix: str, dir: str) -> str:  # noqa: A002
        self.fail("mkdir")
        if dir != REPORTS or not self.configfs:
            _fail(errno.ENOENT)
        if not self.writable:
            _fail(errno.EACCES)
        path = f"{dir}/{prefix}{len(self.made)}"
        self.entries[path] = _Entry()
        self.made.append(path)
        return path

    def rmdir(self, path: str) -> None:
        if self.entries.pop(path, None) is None:
            _fail(errno.ENOENT)

    def open(self, path: str, mode: str, buffering: int = -1) -> IO[Any]:
        folder, name = os.path.split(path)
        self.fail(f"open {name}")
        if path == SEV_GUEST and self.sev_guest:
            if (mode, buffering) != ("r+b", 0):
                _fail(errno.ESPIPE)
            return cast("IO[Any]", _File(self, name))
        read = ["generation", "provider", "outblob"]
        if self.provider == "sev_guest":
            read.append("auxblob")
        # A file that is not there cannot be made.
        if folder not in self.entries or name not in (read if mode == "rb" else ["inblob"]):
            _fail(errno.ENOENT)
        raw = _File(self, name)
        raw.entry = self.entries[folder]
        buffered: Any = io.BufferedReader(raw) if mode == "rb" else io.BufferedWriter(raw)
        return cast("IO[Any]", buffered)

    def show(self, entry: _Entry, name: str) -> bytes:
        self.fail(f"read {name}")
        if name in self.intrusions:
            self.intrusions.remove(name)
            self.store(entry, b"\xee" * 64)
        if name == "generation":
            return b"%d\n" % entry.generation
        if name == "provider":
            return self.provider.encode() + b"\n"
        if not entry.inblob:
            _fail(errno.EINVAL)
        return self.report(entry.inblob, 0) if name == "outblob" else self.table

    def store(self, entry: _Entry, data: bytes) -> None:
        """Write what a report is to have in it."""
        entry.inblob = data
        entry.generation += 1

    def ioctl(self, device: IO[Any], code: int, argument: bytearray) -> int:
        if device.closed or code != _GET_EXT_REPORT:
            _fail(errno.ENOTTY)
        version, request_at, response_at, _ = _CALL.unpack(argument)
        request = ctypes.string_at(request_at, _REQUEST.size)
        data, vmpl, table_at, size = _REQUEST.unpack(request)
        if self.ioctl_faults:
            error, exitinfo2 = self.ioctl_faults.pop(0)
            _CALL.pack_into(argument, 0, version, request_at, response_at, exitinfo2)
            _fail(error)
        if version != 1 or size % PAGE or not len(self.table) <= size <= 4 * PAGE:
            _fail(errno.EINVAL)
        report = b"" if self.status else self.report(data, vmpl)
        head = struct.pack("<II24x", self.status, len(report))
        ctypes.memmove(response_at, (head + report).ljust(4000, b"\0"), 4000)
        ctypes.memmove(table_at, self.table.ljust(size, b"\0"), size)
        return 0


class _File(io.RawIOBase):
    entry = _Entry()

    def __init__(self, kernel: FakeKernel, name: str) -> None:
        super().__init__()
        self._kernel, self._name = kernel, name
        self._shown: bytes | None = None
        self._written = b""
        kernel.opened += 1

    def readable(self) -> bool:
        return True

    def writable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        if self._shown is None:
            self._shown = self._kernel.show(self.entry, self._name)
        part = self._shown[: min(len(buffer), self._kernel.largest_read)]
        self._shown = self._shown[len(part) :]
        buffer[: len(part)] = part
        return len(part)

    def write(self, data: Any) -> int:
        self._written += bytes(data)
        return len(data)

    def close(self) -> None:
        if not self.closed:
            super().close()
            self._kernel.opened -= 1
            if self._written:
                self._kernel.store(self.entry, self._written)


def _fail(error: int) -> None:
    raise OSError(error, os.strerror(error))
