"""Tests of the sealed log: what is read back, what is noticed, and what a crash or a disk does."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from protocol.errors import KeyFileError
from tee_side.serve import audit_log
from tee_side.serve.audit_log import (
    AuditLog,
    AuditLogError,
    AuditReader,
    encode_key,
    open_log,
    read_key,
    read_key_from,
)
from tests.kit.rows import each_row

KEY, OTHER_KEY = bytes(range(32)), bytes(32)
HEADER = 40


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
    """Cut a log into its headers and chunks."""
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


def test_any_field_of_a_record_is_read_back(path: Path) -> None:
    fields = {"key": "alice", "tokens": 2**40, "duration_s": 0.125, "digest": b"\xff", "none": None}
    with AuditLog(path, KEY) as log:
        log.record("receipt", **fields)
    (record,), _ = read(path)
    assert record.pop("kind") == "receipt"
    assert abs(datetime.now(UTC) - datetime.fromisoformat(record.pop("time"))).total_seconds() < 600
    assert record == fields


def test_nothing_is_in_the_clear_and_no_run_repeats_another(tmp_path: Path) -> None:
    paths = [tmp_path / name for name in "ab"]
    for path in paths:
        with AuditLog(path, KEY, utc=utc) as log:
            log.record("request", key="alice")
            log.record("request", key="alice")
    contents = [path.read_bytes() for path in paths]
    assert not any(word in content for content in contents for word in (b"alice", b"request"))
    sealed = [piece for path in paths for piece in pieces(path)]
    assert len(set(sealed)) == len(sealed) == 6


def test_a_new_log_is_empty(path: Path) -> None:
    assert write(path) == (0, bytes(32))
    assert path.read_bytes() == b""
    assert read(path)[0] == []


def test_a_record_is_in_the_file_when_record_returns(path: Path) -> None:
    with AuditLog(path, KEY) as log:
        log.record("start")
        assert [record["kind"] for record in read(path)[0]] == ["start"]


def test_a_record_has_an_upper_size(path: Path) -> None:
    with AuditLog(path, KEY, utc=utc) as log:
        with pytest.raises(ValueError, match="expected 65536 at most"):
            log.record("receipt", content=bytes(2**16))
        log.record("request", number=1)
    assert numbers_of(path) == [1]


# -------------------------------------------------------------------------- what the host does


@pytest.fixture
def three_runs(path: Path) -> Path:
    for start in (0, 3, 6):
        write(path, start, start + 1, start + 2)
    return path


def test_every_changed_byte_is_noticed(path: Path) -> None:
    write(path, 0, 1)
    write(path, 2)
    content = path.read_bytes()
    for place in range(len(content)):
        for change in (0x01, 0x80):
            path.write_bytes(
                content[:place] + bytes([content[place] ^ change]) + content[place + 1 :]
            )
            try:
                records, reader = read(path)
            except AuditLogError as error:
                assert "got other bytes than were written there" in str(error)  # noqa: PT017
            else:
                # A length that now reaches beyond the end looks like a write that was cut short.
                assert reader.torn_bytes, place
                assert len(records) < 3


def _without(n: int) -> Callable[[list[bytes]], list[bytes]]:
    return lambda found: found[:n] + found[n + 1 :]


def _swapped(a: int, b: int) -> Callable[[list[bytes]], list[bytes]]:
    def change(found: list[bytes]) -> list[bytes]:
        found[a], found[b] = found[b], found[a]
        return found

    return change


# Of three runs: header 0, chunks 1-3; header 4, chunks 5-7; header 8, chunks 9-11.
CHANGES: dict[str, Callable[[list[bytes]], list[bytes]]] = {
    "a record removed from the middle": _without(6),
    "the first record of a run removed": _without(5),
    "the last record of a run that is not the last removed": _without(7),
    "the header of a run removed": _without(4),
    "the first header removed": _without(0),
    "a run removed": lambda found: found[:4] + found[8:],
    "the first run removed": lambda found: found[4:],
    "two records swapped": _swapped(5, 6),
    "records of two runs swapped": _swapped(2, 6),
    "two headers swapped": _swapped(4, 8),
    "two runs swapped": lambda found: found[:4] + found[8:] + found[4:8],
    "a record repeated": lambda found: found[:6] + found[5:],
    "a record repeated at the end": lambda found: [*found, found[11]],
    "a run repeated at the end": lambda found: found + found[8:],
    "an old record at the end": lambda found: [*found, found[1]],
    "zeros in the middle": lambda found: [*found[:6], bytes(4), *found[6:]],
    "other bytes at the end": lambda found: [*found, (40).to_bytes(4) + bytes([7] * 40)],
    "another beginning": lambda found: [b"GIF8" + bytes(100), *found],
    "a longer length than any": lambda found: [*found, (2**16 + 1).to_bytes(4)],
}


@each_row(("what", "change"), list(CHANGES.items()), ids=lambda row: row[0])
def test_records_cannot_be_removed_moved_or_repeated(
    tmp_path_factory: pytest.TempPathFactory,
    what: str,
    change: Callable[[list[bytes]], list[bytes]],
) -> None:
    path = tmp_path_factory.mktemp("log") / "audit.log"
    for start in (0, 3, 6):
        write(path, start, start + 1, start + 2)
    path.write_bytes(b"".join(change(pieces(path))))
    with pytest.raises(AuditLogError, match="got other bytes than were written there"):
        read(path)
    # Nothing is written behind a log that was changed, and nothing of it is cut off.
    content = path.read_bytes()
    with pytest.raises(AuditLogError):
        AuditLog(path, KEY)
    assert path.read_bytes() == content


def test_a_record_of_another_log_is_noticed(tmp_path: Path) -> None:
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    write(ours, 0, 1)
    write(theirs, 0, 1)
    ours.write_bytes(b"".join([*pieces(ours)[:2], pieces(theirs)[2]]))
    with pytest.raises(AuditLogError, match="record 2, at byte"):
        read(ours)


def test_what_was_before_the_change_is_read(three_runs: Path) -> None:
    three_runs.write_bytes(b"".join(_without(6)(pieces(three_runs))))
    with open_log(three_runs) as file:
        records = iter(AuditReader(file, KEY, "log"))
        assert [next(records)["number"] for _ in range(4)] == [0, 1, 2, 3]
        with pytest.raises(AuditLogError, match="record 5, at byte"):
            next(records)


def test_zeros_at_the_end_are_a_write_that_was_cut_short(three_runs: Path) -> None:
    *_, last = found = pieces(three_runs)
    three_runs.write_bytes(b"".join([*found, last[:-1] + b"\0"]))
    records, reader = read(three_runs)
    assert (len(records), reader.torn_bytes) == (9, len(last))
    write(three_runs)
    assert three_runs.read_bytes()[: reader.end] == b"".join(found)
    (torn,) = read(three_runs)[0][9:]
    assert (torn["kind"], torn["bytes"]) == ("torn", len(last))


def test_a_cut_off_end_shows_in_number_and_chain_alone(three_runs: Path) -> None:
    _, whole = read(three_runs)
    three_runs.write_bytes(b"".join(pieces(three_runs)[:-1]))
    _, cut = read(three_runs)
    assert (cut.torn_bytes, cut.records) == (0, whole.records - 1)
    assert cut.chain != whole.chain


def test_another_key_reads_nothing(path: Path) -> None:
    write(path, 0)
    with pytest.raises(AuditLogError, match=r"record 1, at byte 40: .* and its key"):
        read(path, OTHER_KEY)
    with pytest.raises(AuditLogError):
        AuditLog(path, OTHER_KEY)


# -------------------------------------------------------------------------- what a crash does


def test_a_write_cut_anywhere_leaves_a_torn_tail_that_the_next_run_cuts_off(path: Path) -> None:
    write(path, 0)
    first = path.stat().st_size
    write(path, 1)
    content = path.read_bytes()
    for size in range(first + 1, len(content)):
        path.write_bytes(content[:size])
        records, reader = read(path)
        assert [record["number"] for record in records] == [0]
        assert (reader.end, reader.torn_bytes) == (first, size - first)
        assert write(path, 2)[0] == 3
        kinds = [(record["kind"], record.get("bytes")) for record in read(path)[0]]
        assert kinds == [("request", None), ("torn", size - first), ("request", None)]
        assert numbers_of(path) == [0, None, 2]


def test_a_first_write_that_was_cut(path: Path) -> None:
    write(path, 0)
    content = path.read_bytes()
    for size in (1, 4, 8, 39, 40, 43, 50, len(content) - 1):
        path.write_bytes(content[:size])
        assert read(path)[1].torn_bytes == size
        write(path)
        assert [record["kind"] for record in read(path)[0]] == ["torn"]


def test_blocks_that_were_not_written_before_a_loss_of_power(path: Path) -> None:
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
    assert read(path)[1].torn_bytes == 0


# ------------------------------------------------------------------------- what the disk does


class Disk:
    """Takes so many bytes, then refuses; counts syncs."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.room: int | None = None
        self.syncs = self.failing_syncs = 0
        self._pwrite = os.pwrite
        monkeypatch.setattr(os, "pwrite", self.pwrite)
        monkeypatch.setattr(os, "fsync", self.fsync)

    def pwrite(self, descriptor: int, content: bytes, offset: int) -> int:
        if self.room is None:
            return self._pwrite(descriptor, content, offset)
        if self.room == 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written = self._pwrite(descriptor, content[: self.room], offset)
        self.room -= written
        return written

    def fsync(self, descriptor: int) -> None:
        if self.failing_syncs:
            self.failing_syncs -= 1
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        self.syncs += 1


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    return Disk(monkeypatch)


@pytest.mark.parametrize("room", [0, 1, 30, 45, 100])
def test_a_full_disk_ends_nothing_and_its_records_follow_later(
    path: Path, disk: Disk, room: int
) -> None:
    with AuditLog(path, KEY, utc=utc) as log:
        disk.room = room
        for number in range(5):
            log.record("request", number=number)
        assert 0 < log.errors <= 5
        assert path.stat().st_size == room
        # A crash at this place leaves a torn tail, and records that were whole.
        assert read(path)[1].end <= room
        disk.room = None
        log.record("request", number=5)
        assert (log.lost, numbers_of(path)) == (0, [0, 1, 2, 3, 4, 5])
        assert (log.records, log.chain) == (6, read(path)[1].chain)


def test_what_was_kept_is_written_at_the_end(path: Path, disk: Disk) -> None:
    log = AuditLog(path, KEY)
    disk.room = 0
    log.record("request", number=0)
    disk.room = None
    log.close()
    log.close()
    assert numbers_of(path) == [0]


def test_what_is_kept_is_bounded_and_what_was_lost_is_told(
    path: Path, disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
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


def test_a_sync_a_second_and_one_at_the_end(path: Path, disk: Disk) -> None:
    now = [50.0]
    log = AuditLog(path, KEY, clock=lambda: now[0])
    for step_s, syncs in ((0.0, 0), (0.9, 0), (0.1, 1), (0.9, 1), (5.0, 2), (5.0, 3)):
        now[0] += step_s
        log.record("request")
        log.sync()
        assert disk.syncs == syncs
    now[0] += 5
    log.sync()  # nothing is new
    assert disk.syncs == 3
    log.close()
    assert disk.syncs == 4


def test_a_sync_that_failed_is_tried_again(path: Path, disk: Disk) -> None:
    now = [50.0]
    with AuditLog(path, KEY, clock=lambda: now[0]) as log:
        disk.failing_syncs = 1
        log.record("request")
        for syncs in (0, 1):
            now[0] += 1
            log.sync()
            assert (disk.syncs, log.errors) == (syncs, 1)


def test_records_can_be_made_while_another_thread_syncs(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go_on = threading.Event(), threading.Event()

    def slow(_descriptor: int) -> None:
        begun.set()
        assert go_on.wait(30)

    now = [50.0]
    with AuditLog(path, KEY, clock=lambda: now[0]) as log:
        log.record("request", number=0)
        now[0] += 1
        with monkeypatch.context() as patched:
            patched.setattr(os, "fsync", slow)
            thread = threading.Thread(target=log.sync)
            thread.start()
            assert begun.wait(30)
            log.record("request", number=1)
            assert numbers_of(path) == [0, 1]
            go_on.set()
            thread.join()
        assert log._dirty  # the second one is not on the disk yet


# ---------------------------------------------------------------------- files that are refused


def test_a_log_has_one_writer(path: Path) -> None:
    with AuditLog(path, KEY), pytest.raises(AuditLogError, match="got a log that another process"):
        AuditLog(path, KEY)
    write(path, 0)


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to(tmp_path / "target")
    for name in ("pipe", "link", ".", "none/log"):
        with pytest.raises(AuditLogError, match="expected an audit log"):
            AuditLog(tmp_path / name, KEY)
    with pytest.raises(AuditLogError, match="got No such file"):
        open_log(tmp_path / "none")


def test_a_key_is_read_from_a_file_and_from_a_descriptor(tmp_path: Path) -> None:
    path = tmp_path / "key"
    path.write_text(encode_key(KEY))
    path.chmod(0o600)
    assert read_key(path) == KEY
    reader, writer = os.pipe()
    os.write(writer, encode_key(KEY).rstrip().encode())
    os.close(writer)
    assert read_key_from(reader) == KEY
    with pytest.raises(KeyFileError, match=f"descriptor {reader}: got Bad file descriptor"):
        read_key_from(reader)
    path.chmod(0o640)
    with pytest.raises(KeyFileError, match="got mode 0640, expected 0600"):
        read_key(path)


@each_row("text", ["", KEY.hex(), encode_key(KEY)[:-2], encode_key(KEY) + "\n", "tsqp-audit-key 2"])
def test_a_malformed_key_is_refused_and_not_quoted(
    tmp_path_factory: pytest.TempPathFactory, text: str
) -> None:
    path = tmp_path_factory.mktemp("key") / "key"
    path.write_text(text)
    path.chmod(0o600)
    with pytest.raises(KeyFileError) as refused:
        read_key(path)
    assert KEY.hex()[:20] not in str(refused.value)
    with pytest.raises(KeyFileError) as refused:
        read_key_from(os.open(path, os.O_RDONLY))
    assert KEY.hex()[:20] not in str(refused.value)
