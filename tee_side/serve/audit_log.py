"""The audit log: which key was served when, how much and how it ended, sealed against the host.

A record is a map of short fields, never of text of a prompt or an answer. The file:

    FILE      segment ...                 one of each run of the program
    segment   magic | salt (32) | chunk ...
    chunk     length (4, big endian) | AES-256-GCM of one record (msgpack), tag at the end

- The key of a segment comes from the log's key and the salt by HKDF-SHA256; nonces count from 0.
- `chain` is SHA-256 of itself and the next bytes of the file, salts and chunks alike. Each chunk is
  bound to the chain before it (as associated data), so a chunk that is changed, removed, repeated,
  moved or put in from another log is noticed, by it or by the one that follows.
- What a crash left of the last write is a torn tail: it is told apart, and cut off by the next run,
  which records that.

The host can cut whole records off the end, or put an old copy back: the file alone does not show
it. `records` and `chain` do, compared with values that were noted elsewhere.
"""

import fcntl
import hashlib
import os
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, BinaryIO

import msgpack
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from protocol.curve import SECRET_MODE
from protocol.errors import InputError
from tee_side.protect.randomness import derive_key

Field = str | int | float | bytes | None

_MAGIC = b"TSQPAUD1"
_HEADER_BYTES = len(_MAGIC) + 32
_LENGTH_BYTES = 4
_TAG_BYTES = 16
# No length looks like the magic bytes.
_MAX_CHUNK_BYTES = 2**16
# Kept while the disk takes nothing: some thousand records.
_MAX_PENDING_BYTES = 2**20
_SYNC_EVERY_S = 1.0


class AuditLogError(InputError):
    """An audit log that cannot be opened, is in use, is none, or was changed."""


class AuditLog(AbstractContextManager["AuditLog"]):
    """Writes a log, of one thread; a new file, or behind what there is.

    `clock`: monotonic seconds, for `sync`. `utc`: the time of a record. `errors`: how often the
    disk refused; the records are kept for the next try. `lost`: records for which there was no
    room; one that follows says how many. Raises AuditLogError.
    """

    def __init__(
        self,
        path: Path,
        key: bytes,
        clock: Callable[[], float] = time.monotonic,
        utc: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        self._clock, self._utc = clock, utc
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        with AuditLogError.for_os(str(path), "an audit log"), ExitStack() as stack:
            self._file = stack.enter_context(os.fdopen(os.open(path, flags, SECRET_MODE), "r+b"))
            regular = stat.S_ISREG(os.fstat(self._file.fileno()).st_mode)
            AuditLogError.unless(regular, str(path), "no regular file", "an audit log")
            with AuditLogError.instead_of(
                BlockingIOError, str(path), "a log that another process writes", "one of its own"
            ):
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            reader = AuditReader(self._file, key, str(path))
            for _ in reader:
                pass
            if reader.torn_bytes:
                os.ftruncate(self._file.fileno(), reader.end)
            stack.pop_all()
        self.records, self.chain = reader.records, reader.chain
        self.errors = self.lost = self._lost_untold = 0
        # Sealed and not on the disk yet. A nonce is used once, whatever becomes of a write.
        self._pending = bytearray()
        self._end = reader.end
        self._synced_s, self._dirty = clock(), False
        self._salt = os.urandom(32)
        self._cipher, self._nonce = _cipher(key, self._salt), 0
        if reader.torn_bytes:
            self.record("torn", bytes=reader.torn_bytes)

    def __exit__(self, *_: object) -> None:
        self.close()

    def record(self, kind: str, **fields: Field) -> None:
        """Seal a record and append it; it is in the file unless `errors` has grown.

        It gets the `kind`, the `time` and these fields, below 64 KiB together (ValueError).
        """
        if self._lost_untold and self._seal("lost", {"records": self._lost_untold}):
            self._lost_untold = 0
        if self._lost_untold or not self._seal(kind, fields):
            self.lost += 1
            self._lost_untold += 1
        self._write()

    def sync(self) -> None:
        """Bring the file to the disk where the last time is a second ago and there is more.

        Takes as long as the disk does. It may run on a thread of its own while records are made.
        """
        now_s = self._clock()
        if self._dirty and now_s - self._synced_s >= _SYNC_EVERY_S:
            self._synced_s = now_s
            self._flush()

    def close(self) -> None:
        """Write what is left, bring it to the disk, close the file; the second time: nothing."""
        if not self._file.closed:
            self._write()
            self._flush()
            self._file.close()

    def _seal(self, kind: str, fields: dict[str, Field]) -> bool:
        stamp = self._utc().isoformat(timespec="milliseconds")
        packed: bytes = msgpack.packb({"kind": kind, "time": stamp} | fields)
        length = len(packed) + _TAG_BYTES
        if length > _MAX_CHUNK_BYTES:
            raise ValueError(f"audit log: got {length} bytes, expected {_MAX_CHUNK_BYTES} at most")
        if len(self._pending) + length > _MAX_PENDING_BYTES:
            self._write()
        if len(self._pending) + length > _MAX_PENDING_BYTES:
            return False
        if self._nonce == 0:
            self._append(_MAGIC + self._salt)
        sealed = self._cipher.encrypt(self._nonce.to_bytes(12), packed, self.chain)
        self._nonce += 1
        self.records += 1
        self._append(length.to_bytes(_LENGTH_BYTES) + sealed)
        return True

    def _append(self, content: bytes) -> None:
        self._pending += content
        self.chain = _next(self.chain, content)

    def _write(self) -> None:
        try:
            while self._pending:
                written = os.pwrite(self._file.fileno(), self._pending, self._end)
                # What a full disk took of a record stays: the rest follows behind it.
                self._end += written
                del self._pending[:written]
                self._dirty = True
        except OSError:
            self.errors += 1

    def _flush(self) -> None:
        self._dirty = False
        try:
            os.fsync(self._file.fileno())
        except OSError:
            self._dirty = True
            self.errors += 1


class AuditReader:
    """Iterates over the records of a log, each checked before it is given; of one pass.

    Afterwards `records` and `chain` are those of the whole file, `end` is where its last whole
    record ends, and `torn_bytes` what follows, left by a write that a crash ended. Raises
    AuditLogError where the log was changed, and OSError.
    """

    def __init__(self, file: BinaryIO, key: bytes, where: str) -> None:
        self._file, self._key, self._where = file, key, where
        self.records = self.end = self.torn_bytes = 0
        self.chain = bytes(32)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Return the records, the oldest first."""
        chain, cipher, nonce, start = self.chain, None, 0, 0
        while head := self._file.read(_LENGTH_BYTES):
            if head == _MAGIC[:_LENGTH_BYTES]:
                head += self._file.read(_HEADER_BYTES - len(head))
                whole = len(head) == _HEADER_BYTES
                if not whole or not head.startswith(_MAGIC):
                    return self._stop(start, head, torn=not whole)
                cipher, nonce = _cipher(self._key, head[len(_MAGIC) :]), 0
                chain, start = _next(chain, head), start + _HEADER_BYTES
                continue
            length = int.from_bytes(head)
            if length > _MAX_CHUNK_BYTES or cipher is None:
                return self._stop(start, head, torn=len(head) < _LENGTH_BYTES)
            sealed = self._file.read(length)
            if len(sealed) < length:
                return self._stop(start, head + sealed, torn=True)
            try:
                packed = cipher.decrypt(nonce.to_bytes(12), sealed, chain)
            except (InvalidTag, ValueError):
                return self._stop(start, head + sealed, torn=False)
            record = msgpack.unpackb(packed)
            nonce += 1
            chain, start = _next(chain, head + sealed), start + len(head) + length
            self.records, self.chain, self.end = self.records + 1, chain, start
            yield record
        self.torn_bytes = start - self.end
        return None

    def _stop(self, start: int, content: bytes, *, torn: bool) -> None:
        """End at what is no whole record. `torn`: the file ends in it. Raises AuditLogError."""
        rest = content + self._file.read()
        # After a loss of power, blocks that were not written read as zeros.
        if torn or len(rest.rstrip(b"\0")) < len(content):
            self.torn_bytes = start - self.end + len(rest)
            return
        raise AuditLogError(
            f"{self._where}: record {self.records + 1}, at byte {start}",
            got="other bytes than were written there",
            expected="the log as it was written, and its key",
        )


def open_log(path: Path) -> BinaryIO:
    """Open a log to read. Raises AuditLogError."""
    with AuditLogError.for_os(str(path), "an audit log"):
        return path.open("rb")


def _cipher(key: bytes, salt: bytes) -> AESGCM:
    return AESGCM(derive_key(key, b"tsqp audit segment", salt))


def _next(chain: bytes, content: bytes) -> bytes:
    return hashlib.sha256(chain + content).digest()
