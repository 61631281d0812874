"""The sealed log: what is read back, what is noticed, and what a crash or a disk does."""

import errno
import os
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from tee_side.serve import audit_log
from tee_side.serve.audit_log import AuditLog, AuditLogError, AuditReader, open_log
from tests.kit.rows import each_row
from tests.kit.serve import Clock

KEY, OTHER_KEY = bytes(range(32)), bytes(32)
HEADER, TAG = 40, 16
CHANGED = "got other bytes than were written there"


def utc() -> datetime:
    return datetime(2026, 1, 31, 12, 0, 0, 250_000, tzinfo=UTC)


def write(path: Path, *numbers: int, key: bytes = KEY) -> tuple[int, bytes]:
    """Append records in one run; return what the writer says the log holds."""
    with AuditLog(path, key, utc=utc) as log:
        for number in numbers:
            log.record("request", number=number)
        return log.records, log.chain


def read(path: Path, key: bytes = KEY) -> tuple[list[dict[str, Any]], AuditReader]:
    with open_log(path) as file:
        reader = AuditReader(file, key, str(path))
        return list(reader), reader


def numbers_of(path: Path) -> list[int | None]:
    return [record.get("number") for record in read(path)[0]]


def pieces(path: Path) -> list[bytes]:
    content, found = path.read_bytes(), []
    while content:
        length = HEADER if content[:4] == b"TSQP" else 4 + int.from_bytes(content[:4])
        found.append(content[:length])
        content = content[length:]
    return found


# The salts are, and so the records. One record in 256 ends in a zero: where it is the last one and
# out of place it looks like a write that a loss of power cut short, and is cut off as such.
pytestmark = pytest.mark.usefixtures("same_draws")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "audit.log"


def test_records_are_read_back_across_runs(path: Path) -> None:
    assert write(path) == (0, bytes(32))
    assert (path.read_bytes(), read(path)[0]) == (b"", [])
    write(path, 0, 1)
    assert (path.stat().st_mode & 0o777) == 0o600
    assert write(path) == (2, read(path)[1].chain)  # a run without records adds nothing
    noted = write(path, 2)
    records, reader = read(path)
    assert records == [
        {"kind": "request", "time": "2026-01-31T12:00:00.250+00:00", "number": number}
        for number in range(3)
    ]
    assert (reader.records, reader.chain) == noted
    assert (reader.end, reader.torn_bytes) == (path.stat().st_size, 0)


def test_nothing_is_in_the_clear_and_no_run_repeats_another(path: Path) -> None:
    for _ in range(2):
        with AuditLog(path, KEY, utc=utc) as log:
            log.record("request", key="alice")
            log.record("request", key="alice")
    assert not any(word in path.read_bytes() for word in (b"alice", b"request"))
    sealed = [piece[4:-TAG] for piece in pieces(path) if len(piece) != HEADER]
    assert len(set(sealed)) == len(sealed) == 4


def test_every_changed_byte_is_noticed(path: Path) -> None:
    write(path, 0, 1)
    write(path, 2)
    content = path.read_bytes()
    for place in range(len(content)):
        flipped = bytes([content[place] ^ (0x01, 0x80)[place % 2]])
        path.write_bytes(content[:place] + flipped + content[place + 1 :])
        try:
            records, reader = read(path)
        except AuditLogError as error:
            assert CHANGED in str(error)  # noqa: PT017
        else:
            # A length that now reaches beyond the end looks like a write that was cut short.
            assert reader.torn_bytes, place
            assert len(records) < 3


# Of three runs: header 0, chunks 1-3; header 4, chunks 5-7; header 8, chunks 9-11. In what order
# they are afterwards; bytes stand as they are.
CHANGES: dict[str, Sequence[int | bytes]] = {
    "a record removed from the middle": [*range(6), *range(7, 12)],
    "the last record of a run that is not the last removed": [*range(7), *range(8, 12)],
    "the first run removed": range(4, 12),
    "two headers swapped": [*range(4), 8, 5, 6, 7, 4, 9, 10, 11],
    "two runs swapped": [*range(4), *range(8, 12), *range(4, 8)],
    "a record repeated at the end": [*range(12), 11],
    "a run repeated at the end": [*range(12), *range(8, 12)],
    "zeros in the middle": [*range(6), bytes(4), *range(6, 12)],
    "other bytes at the end": [*range(12), (40).to_bytes(4) + bytes([7] * 40)],
    "a longer length than any": [*range(12), (2**16 + 1).to_bytes(4)],
}


@each_row("what", CHANGES)
def test_records_cannot_be_removed_moved_or_repeated(path: Path, what: str) -> None:
    path.unlink(missing_ok=True)
    for start in (0, 3, 6):
        write(path, start, start + 1, start + 2)
    found = pieces(path)
    parts = [part if isinstance(part, bytes) else found[part] for part in CHANGES[what]]
    content = b"".join(parts)
    path.write_bytes(content)
    records: list[dict[str, Any]] = []
    with open_log(path) as file, pytest.raises(AuditLogError, match=CHANGED) as noticed:
        records.extend(AuditReader(file, KEY, "log"))
    # Those before the change were read.
    assert [record["number"] for record in records] == [*range(len(records))]
    assert f"record {len(records) + 1}, at byte" in str(noticed.value)
    # Nothing is written behind a log that was changed, and nothing of it is cut off.
    with pytest.raises(AuditLogError):
        AuditLog(path, KEY)
    assert path.read_bytes() == content


def test_a_record_of_another_log_and_another_key_are_noticed(tmp_path: Path) -> None:
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    write(ours, 0, 1)
    write(theirs, 0, 1)
    for act in (read, AuditLog):
        with pytest.raises(AuditLogError, match=r"record 1, at byte 40: .* and its key"):
            act(ours, OTHER_KEY)
    ours.write_bytes(b"".join([*pieces(ours)[:2], pieces(theirs)[2]]))
    with pytest.raises(AuditLogError, match="record 2, at byte"):
        read(ours)


def test_a_write_cut_anywhere_leaves_a_torn_tail_that_the_next_run_cuts_off(path: Path) -> None:
    write(path, 0)
    first = path.stat().st_size
    write(path, 1)
    content = path.read_bytes()
    # Within the first write of a log as well.
    for size in (*range(1, first, 3), *range(first + 1, len(content), 3)):
        path.write_bytes(content[:size])
        whole, torn = (0, size) if size < first else (1, size - first)
        reader = read(path)[1]
        assert (reader.records, reader.torn_bytes) == (whole, torn)
        assert write(path, 2)[0] == whole + 2
        kinds = [(record["kind"], record.get("bytes")) for record in read(path)[0]]
        assert kinds == [*[("request", None)] * whole, ("torn", torn), ("request", None)]


def test_zeros_at_the_end_are_a_write_that_a_loss_of_power_cut_short(path: Path) -> None:
    write(path, 0)
    first = path.stat().st_size
    write(path, 1, 2)
    content = path.read_bytes()
    for kept in range(first, first + HEADER + 10):
        path.write_bytes(content[:kept] + bytes(len(content) - kept + 5000))
        records, reader = read(path)
        assert [record["number"] for record in records] == [0]
        assert reader.torn_bytes == len(content) - first + 5000
    write(path, 3)
    assert numbers_of(path) == [0, None, 3]
    last = pieces(path)[-1]
    path.write_bytes(path.read_bytes()[:-1] + b"\0")
    assert read(path)[1].torn_bytes == len(last)


def test_a_record_has_an_upper_size(path: Path) -> None:
    with AuditLog(path, KEY, utc=utc) as log:
        with pytest.raises(ValueError, match="expected 65536 at most"):
            log.record("receipt", content=bytes(2**16))
        log.record("request", number=1)
    assert numbers_of(path) == [1]


class Disk:
    """Takes so many bytes, then refuses."""

    # The system's, whatever another disk has put in its place.
    _pwrite = staticmethod(os.pwrite)

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.room: int | None = None
        monkeypatch.setattr(os, "pwrite", self.pwrite)

    def pwrite(self, descriptor: int, content: bytes, offset: int) -> int:
        if self.room == 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written = self._pwrite(descriptor, content[: self.room], offset)
        if self.room is not None:
            self.room -= written
        return written


@each_row("room", [0, 100])
def test_a_full_disk_ends_nothing_and_its_records_follow_later(
    path: Path, monkeypatch: pytest.MonkeyPatch, room: int
) -> None:
    path.unlink(missing_ok=True)
    disk = Disk(monkeypatch)
    log = AuditLog(path, KEY, utc=utc)
    disk.room = room
    for number in range(5):
        log.record("request", number=number)
    assert 0 < log.errors <= 5
    # A crash at this place leaves a torn tail, and records that were whole.
    assert read(path)[1].end <= path.stat().st_size == room
    disk.room = None
    if room == 0:
        log.record("request", number=5)
    log.close()  # else what was kept is written at the end
    assert numbers_of(path)[:5] == [0, 1, 2, 3, 4]
    assert (log.lost, log.chain) == (0, read(path)[1].chain)


def test_what_is_kept_is_bounded_and_what_was_lost_is_told(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = Disk(monkeypatch)
    monkeypatch.setattr(audit_log, "_MAX_PENDING_BYTES", 1000)
    with AuditLog(path, KEY, utc=utc) as log:
        disk.room = 0
        for number in range(100):
            log.record("request", number=number)
            assert len(log._pending) <= 1000 + HEADER
        assert 80 < log.lost < 100
        kept, disk.room = 100 - log.lost, None
        log.record("request", number=100)
        log.record("request", number=101)
    records, _ = read(path)
    assert [record.get("number") for record in records] == [*range(kept), None, 100, 101]
    assert (records[kept]["kind"], records[kept]["records"]) == ("lost", 100 - kept)


def test_a_sync_a_second_and_one_at_the_end(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, fsync = Clock(), Mock()
    monkeypatch.setattr(os, "fsync", fsync)
    log = AuditLog(path, KEY, clock=clock)
    for step_s, syncs in ((0.0, 0), (0.9, 0), (0.125, 1), (0.9, 1), (5.0, 2), (5.0, 3)):
        clock.wait(step_s)
        log.record("request")
        log.sync()
        assert fsync.call_count == syncs
    # One that failed is tried again.
    log.record("request")
    fsync.side_effect = [OSError(errno.EIO, ""), None, None]
    for syncs in (4, 5):
        clock.wait(1)
        log.sync()
        assert (fsync.call_count, log.errors) == (syncs, 1)
    log.close()
    log.close()
    assert fsync.call_count == 6


def test_a_log_has_one_writer_and_is_a_file(tmp_path: Path) -> None:
    path = tmp_path / "audit.log"
    with AuditLog(path, KEY), pytest.raises(AuditLogError, match="got a log that another process"):
        AuditLog(path, KEY)
    write(path, 0)
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to(tmp_path / "target")
    for name in ("pipe", "link"):
        with pytest.raises(AuditLogError, match="expected an audit log"):
            AuditLog(tmp_path / name, KEY)
