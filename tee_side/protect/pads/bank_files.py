"""The files of a pad bank: where they may lie; opened, locked, created, replaced.

Every error is a PadBankError that names file and both values.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from protocol.errors import PadBankError

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_OPEN = os.O_CLOEXEC | os.O_NOCTTY
_NEW = os.O_WRONLY | os.O_CREAT | _OPEN
_IN_MEMORY = ("tmpfs", "ramfs")
WITNESSES = Path("/dev/shm")  # noqa: S108 - the directory within it is this user's own


@dataclass(frozen=True)
class BankPlace:
    """Where the files of a bank are.

    `witness`: None for a file named by the bank's id, in this user's own directory within
    /dev/shm. `beside_bank`: key and index may lie on the bank's own file system.
    """

    bank: Path
    key: Path
    index: Path
    witness: Path | None = None
    beside_bank: bool = False

    @classmethod
    def at(
        cls,
        bank: Path,
        key: Path | None = None,
        index: Path | None = None,
        witness: Path | None = None,
        *,
        beside_bank: bool = False,
    ) -> BankPlace:
        """Fill in what was not given: the bank's name with `.key` and `.index`."""
        key, index = key or Path(f"{bank}.key"), index or Path(f"{bank}.index")
        return cls(bank, key, index, witness, beside_bank)

    def check_apart(self) -> None:
        """Refuse a key or index on the bank's own file system, one in memory excepted.

        A copy of that file system would hold all that decrypts recorded traffic.
        """
        if self.beside_bank:
            return
        for option, path in (("--bank-key", self.key), ("--bank-index", self.index)):
            with refusing(path):
                shared = _devices(path) & _devices(self.bank)
                PadBankError.unless(
                    all(map(_in_memory, shared)),
                    str(path),
                    f"the file system of the bank {self.bank}: a copy of it, with recorded"
                    " traffic, gives every row away",
                    f"another, best one in memory: {option} FILE, as in /dev/shm"
                    " (--bank-key-beside-bank allows this one)",
                )

    def witness_file(self, bank_id: str) -> Path:
        """Return where the witness of a bank is; its directory is this user's own."""
        if self.witness is not None:
            with refusing(self.witness):
                folder = self.witness.parent.resolve(strict=True)
                found = folder.stat().st_dev
                PadBankError.unless(
                    found not in _devices(self.bank) | _devices(self.index) or _in_memory(found),
                    f"--bank-witness {self.witness}",
                    "the file system of bank or index, with which it could be put back",
                    "another, best one in memory",
                )
                return _own(folder) / self.witness.name
        # One place whatever the environment is: two runs of one boot must find the same witness.
        PadBankError.unless(
            WITNESSES.is_dir() and _in_memory(WITNESSES.stat().st_dev),
            "--bank-witness",
            f"no file system in memory at {WITNESSES}",
            "FILE on one, or on a disk that neither bank nor index is on",
        )
        folder = WITNESSES / f"tsqp-{os.geteuid()}"
        with refusing(folder):
            folder.mkdir(mode=0o700, exist_ok=True)
        return _own(folder) / f"{bank_id}.witness"


def _devices(path: Path) -> set[int]:
    """Return the file systems of a file and its directory, as named and as links lead to it.

    A file may be a mount of its own, from another directory of the same disk.
    """
    places = {path.parent, path.resolve().parent, *([path] if path.exists() else [])}
    return {place.stat().st_dev for place in places}


def _in_memory(device: int) -> bool:
    """Whether a file system is in memory, as /proc/self/mountinfo says; False if it does not."""
    number = f"{os.major(device)}:{os.minor(device)}"
    for line in Path("/proc/self/mountinfo").read_text(encoding="utf-8").splitlines():
        mount, _, kind = line.partition(" - ")
        if mount.split()[2] == number:
            return kind.split()[0] in _IN_MEMORY
    return False


def _own(folder: Path) -> Path:
    """Return a directory that no other user can write to."""
    found = os.lstat(folder)
    ours = stat.S_ISDIR(found.st_mode) and found.st_uid in (0, os.geteuid())
    PadBankError.unless(ours, str(folder), "a link or another user's", "a directory")
    PadBankError.unless(
        not found.st_mode & 0o022,
        str(folder),
        stat.filemode(found.st_mode),
        "a directory of this user alone, as mkdir -m 700 makes it",
    )
    return folder


def open_file(path: Path, flags: int) -> int:
    """Open a file for this process alone. Raises PadBankError."""
    try:
        # Not blocking: a pipe would let us wait for ever. Files do not know the difference.
        descriptor = os.open(path, flags | os.O_NONBLOCK | _OPEN)
    except OSError as error:
        raise PadBankError(
            str(path), error.strerror or type(error).__name__, "a file of a pad bank"
        ) from None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise PadBankError(str(path), "no regular file", "a file of a pad bank")
    return descriptor


def read_file(path: Path, most: int, *, private: bool = False) -> bytes:
    """Return the first `most` bytes of a file. Raises PadBankError.

    `private`: the file has to be this user's alone, and no link.
    """
    descriptor = open_file(path, os.O_RDONLY | (os.O_NOFOLLOW if private else 0))
    with refusing(path), os.fdopen(descriptor, "rb") as file:
        found = os.fstat(descriptor)
        PadBankError.unless(
            not private or (found.st_uid == os.geteuid() and not found.st_mode & 0o077),
            f"{path}: owner and mode",
            f"user {found.st_uid}, {stat.filemode(found.st_mode)}",
            f"user {os.geteuid()}, -rw-------",
        )
        return file.read(most)


def lock(descriptor: int, path: Path) -> None:
    """Lock a file until its descriptor is closed. Raises PadBankError if another holds it."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno != errno.EWOULDBLOCK:
            raise refusal(path, error, 0) from None
        raise PadBankError(
            str(path), f"a bank in use{_holder(descriptor)}", "one process at a time"
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
    if _free_bytes(path) < needed:
        raise refusal(path, OSError(errno.ENOSPC, "full"), needed)


def _free_bytes(path: Path) -> int:
    volume = os.statvfs(path.parent)
    return volume.f_bavail * volume.f_frsize


def refusal(path: Path, error: OSError, needed: int) -> PadBankError:
    """Say what the operating system refused; `needed`: bytes that were still to be written."""
    if error.errno in _FULL:
        return PadBankError(str(path), f"{_free_bytes(path)} bytes available", f"{needed} bytes")
    reason = error.strerror or type(error).__name__
    return PadBankError(str(path), reason, "to read and write it")


@contextmanager
def refusing(path: Path, needed: int = 0) -> Iterator[None]:
    """Raise what the operating system refuses in the block as `refusal` says it."""
    try:
        yield
    except OSError as error:
        raise refusal(path, error, needed) from error


def write_new(path: Path, content: bytes, size: int) -> None:
    """Create a file for its owner alone, `size` bytes of which the rest is a hole.

    Nothing is left of it after a failure.
    """
    descriptor = os.open(path, os.O_EXCL | _NEW, 0o600)
    try:
        _write_out(descriptor, content, size)
        _sync_directory(path)
    except BaseException:
        path.unlink()
        raise


def replace(path: Path, content: bytes) -> None:
    """Replace a file as a whole; when this returns, the new content outlives a crash."""
    beside = Path(f"{path}.new")
    descriptor = os.open(beside, os.O_TRUNC | os.O_NOFOLLOW | _NEW, 0o600)
    _write_out(descriptor, content, len(content))
    os.replace(beside, path)
    _sync_directory(path)


def _write_out(descriptor: int, content: bytes, size: int) -> None:
    """Write a new file, up to `size` with a hole, sync and close it."""
    try:
        rest = memoryview(content)
        while rest:
            rest = rest[os.write(descriptor, rest) :]
        os.ftruncate(descriptor, size)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sync_directory(path: Path) -> None:
    descriptor = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | _OPEN)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
