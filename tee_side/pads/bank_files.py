"""The files of a pad bank: opened, locked, created, replaced; errors name file and both values."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from pathlib import Path

from protocol.errors import PadBankError

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_OPEN = os.O_CLOEXEC | os.O_NOCTTY


def open_file(path: Path, flags: int) -> int:
    """Open a file for this process alone. Raises PadBankError."""
    try:
        # Not blocking: a pipe would let us wait for ever. Files do not know the difference.
        descriptor = os.open(path, flags | os.O_NONBLOCK | _OPEN)
    except OSError as error:
        raise PadBankError(
            str(path), got=error.strerror or type(error).__name__, expected="a file of a pad bank"
        ) from None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise PadBankError(str(path), got="no regular file", expected="a file of a pad bank")
    return descriptor


def lock(descriptor: int, path: Path) -> None:
    """Lock a file until its descriptor is closed. Raises PadBankError if another holds it."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno != errno.EWOULDBLOCK:
            raise refusal(path, error, 0) from None
        raise PadBankError(
            str(path), got=f"a bank in use{_holder(descriptor)}", expected="one process at a time"
        ) from None


def _holder(descriptor: int) -> str:
    """Say which process holds the lock, if the kernel tells us."""
    inode = f":{os.fstat(descriptor).st_ino}"
    try:
        locks = Path("/proc/locks").read_text(encoding="ascii").splitlines()
    except OSError:
        return ""
    for fields in map(str.split, locks):
        # "1: FLOCK ADVISORY WRITE 4711 fd:00:131073 0 EOF"; a waiting one has "->" in between.
        if len(fields) == 8 and fields[1] == "FLOCK" and fields[5].endswith(inode):
            return f" by process {fields[4]}" if int(fields[4]) > 0 else ""
    return ""


def require_space(path: Path, needed: int) -> None:
    """Raise PadBankError unless the volume has `needed` bytes left."""
    available = _free_bytes(path)
    if available < needed:
        raise PadBankError(
            str(path), got=f"{available} bytes available", expected=f"{needed} bytes"
        )


def _free_bytes(path: Path) -> int:
    volume = os.statvfs(path.parent)
    return volume.f_bavail * volume.f_frsize


def refusal(path: Path, error: OSError, needed: int) -> PadBankError:
    """Say what the operating system refused; `needed`: bytes that were still to be written."""
    if error.errno in _FULL:
        return PadBankError(
            str(path), got=f"{_free_bytes(path)} bytes available", expected=f"{needed} bytes"
        )
    reason = error.strerror or type(error).__name__
    return PadBankError(str(path), got=reason, expected="to read and write it")


def write_new(path: Path, content: bytes, size: int, made: list[Path]) -> None:
    """Create a file that nobody else may read, `size` bytes of which the rest is a hole."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _OPEN, 0o600)
    made.append(path)
    try:
        _write_all(descriptor, content)
        os.ftruncate(descriptor, size)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    _sync_directory(path)


def replace(path: Path, content: bytes) -> None:
    """Replace a file as a whole; when this returns, the new content outlives a crash."""
    beside = Path(f"{path}.new")
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | _OPEN
    descriptor = os.open(beside, flags, 0o600)
    try:
        _write_all(descriptor, content)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    os.replace(beside, path)
    _sync_directory(path)


def _write_all(descriptor: int, content: bytes) -> None:
    rest = memoryview(content)
    while rest:
        rest = rest[os.write(descriptor, rest) :]


def _sync_directory(path: Path) -> None:
    descriptor = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | _OPEN)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
