"""Sessions on disk: they come back as they were or not at all, and tell the disk nothing."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

from gpu_side import session_files, spill
from gpu_side.segment_parts import Part
from gpu_side.session_cache import GROWTH_TOKENS, CacheShape, SessionCache, Window
from gpu_side.session_files import SessionFiles
from gpu_side.session_settings import SessionSettings
from gpu_side.sessions import Sessions, SessionTotals
from gpu_side.spill import SessionName, SpilledSession, SpillKey
from protocol.errors import ErrorCode, ProtocolError
from protocol.tensors import raw_bytes
from tests.kit.rows import each_row

SHAPE = CacheShape(3, 2, 4, torch.float32, torch.device("cpu"))
UNIT = GROWTH_TOKENS * SHAPE.token_bytes
NAME = SessionName(b"client", bytes(15) + b"\x01", 0, 2)
TOKENS = 10
# Bytes on disk of a session of one token: a tag for each layer.
SMALLEST = SHAPE.token_bytes + 3 * 16


def _cache(shape: CacheShape = SHAPE) -> SessionCache:
    cache = SessionCache(shape)
    cache.resize(GROWTH_TOKENS)
    cache.length = TOKENS
    for tensor in cache.tensors:
        tensor.copy_(torch.randn(tensor.shape))
    return cache


def _stored(cache: SessionCache) -> list[torch.Tensor]:
    return [tensor[:, :, : cache.stored] for tensor in cache.tensors]


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer is several pieces, the last of which is smaller."""
    monkeypatch.setattr(spill, "_PIECE_BYTES", 300)


def _spilled(folder: Path, cache: SessionCache, key: SpillKey | None = None) -> SpilledSession:
    return SpilledSession(folder, NAME, cache, key or SpillKey())


def _descriptor(spilled: SpilledSession) -> int:
    descriptor: int = spilled._file.fileno()
    return descriptor


def _written(spilled: SpilledSession) -> bytes:
    return os.pread(_descriptor(spilled), 2**20, 0)


@each_row("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_it_comes_back_as_it_was(tmp_path: Path, dtype: torch.dtype) -> None:
    shape = SHAPE._replace(dtype=dtype)
    cache, found = _cache(shape), _cache(shape)
    cache.length, cache.sinks, cache.dropped = 30, 2, 20
    spilled = _spilled(tmp_path, cache)
    assert (spilled.tokens, spilled.shape) == (10, shape)
    assert spilled.read_into(found)
    assert (found.length, found.sinks, found.dropped) == (30, 2, 20)
    for mine, theirs in zip(_stored(found), _stored(cache), strict=True):
        assert torch.equal(mine, theirs)
    spilled.close()


@each_row("nameless", [True, False])
def test_the_disk_gets_no_name_and_no_plain_bytes(tmp_path: Path, nameless: bool) -> None:
    """Whether the file system has files without a name or not."""
    with pytest.MonkeyPatch.context() as patch:
        if not nameless:
            patch.setattr(tempfile, "_O_TMPFILE_WORKS", False)
        cache = _cache()
        spilled = _spilled(tmp_path, cache)
    assert list(tmp_path.iterdir()) == []
    status = os.fstat(_descriptor(spilled))
    assert (status.st_nlink, status.st_mode & 0o777) == (0, 0o600)
    written = _written(spilled)
    assert len(written) == status.st_size == spilled.bytes
    plain = b"".join(bytes(raw_bytes(tensor)) for tensor in _stored(cache))
    pieces = 3 * len(cache.tensors)  # 640 bytes a layer: 300, 300 and 40
    assert len(written) == len(plain) + 16 * pieces
    assert not any(plain[n : n + 8] in written for n in range(0, len(plain) - 8, 4))
    assert NAME.client not in written
    # The same once more, with another key, is nothing like it.
    other = _spilled(tmp_path, cache)
    assert _written(other)[:64] != written[:64]
    spilled.close()
    other.close()


def test_a_nonce_is_never_used_twice_by_a_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    used: list[tuple[int, bytes]] = []
    real = spill.AESGCM

    class Noted:
        def __init__(self, key: bytes) -> None:
            self._cipher = real(key)
            self.decrypt = self._cipher.decrypt

        def encrypt(self, nonce: bytes, data: Any, bound: bytes) -> bytes:
            used.append((id(self), nonce))
            return self._cipher.encrypt(nonce, data, bound)

        @staticmethod
        def generate_key(bits: int) -> bytes:
            assert bits == 256
            return os.urandom(32)

    monkeypatch.setattr(spill, "AESGCM", Noted)
    sessions = _sessions(tmp_path, units=1)
    for turn in range(4):
        for number in (1, 2, 3):
            _run(sessions, _part(number, turn, 1))
    assert len(used) >= 3 * 9
    assert len(set(used)) == len(used)
    assert len({cipher for cipher, _ in used}) == 3
    assert {len(nonce) for _, nonce in used} == {12}
    sessions.close()
    # The last one is the last.
    key = SpillKey(2**96 - 2)
    assert [key.next_nonce()[-1:] for _ in range(2)] == [b"\xfe", b"\xff"]
    for _ in range(2):
        with pytest.raises(OverflowError):
            key.next_nonce()
    with pytest.raises(OverflowError):
        _spilled(tmp_path, _cache(), key)


@each_row("damage", ["a bit", "a tag", "pieces in another order", "the end", "all", "another file"])
def test_a_file_that_was_changed_is_no_session(tmp_path: Path, damage: str) -> None:
    key = SpillKey()
    spilled = _spilled(tmp_path, _cache(), key)
    content = bytearray(_written(spilled))
    if damage == "a bit":
        content[700] ^= 1
    elif damage == "a tag":
        content[310] ^= 0x80
    elif damage == "pieces in another order":
        content[:316], content[316:632] = content[316:632], content[:316]
    elif damage == "the end":
        del content[-1:]
    elif damage == "all":
        content.clear()
    else:
        # Of the same key and session, from before: its nonces are others.
        other = _spilled(tmp_path, _cache(), key)
        content = bytearray(_written(other))
        other.close()
    os.ftruncate(_descriptor(spilled), 0)
    os.pwrite(_descriptor(spilled), content, 0)
    assert not spilled.read_into(_cache())
    spilled.close()


@each_row(
    ("field", "value"),
    [
        ("name", NAME._replace(client=b"other")),
        ("name", NAME._replace(session=bytes(16))),
        ("name", NAME._replace(first_layer=1)),
        ("name", NAME._replace(last_layer=3)),
        ("_sizes", (TOKENS, 1, 0)),
        ("_shape", SHAPE._replace(heads=4, head_dim=2)),
        ("_shape", SHAPE._replace(dtype=torch.int32)),
        ("key", SpillKey()),
    ],
)
def test_what_was_written_is_bound_to_its_session(tmp_path: Path, field: str, value: Any) -> None:
    spilled = _spilled(tmp_path, _cache())
    assert spilled.read_into(_cache())
    setattr(spilled, field, value)
    assert not spilled.read_into(_cache())
    spilled.close()


# -------------------------------------------------------------------- as a part of all sessions


def _sessions(
    directory: Path, *, units: int = 2, spilled: int | None = None, clock: Any = None
) -> Sessions:
    settings = SessionSettings(units * UNIT, units * UNIT, 60.0, directory, spilled)
    return Sessions(settings, 0, clock=clock or (lambda: 0.0))


def _part(session: int, start: int, rows: int, parent: int = 0) -> Part:
    numbers = (number.to_bytes(16, "little") for number in (session, parent))
    return Part(next(numbers), start, rows, start + rows, next(numbers))


def _run(sessions: Sessions, *parts: Part) -> list[float]:
    """Run a request; return what the first part's session held before."""
    with sessions.running(b"client", (0, 2), parts, SHAPE, Window()) as caches:
        before = caches[0].tensors[2][1, 1, : caches[0].length, 3].tolist()
        running = [part for part in parts if part.rows]
        for cache, part in zip(caches, running, strict=True):
            for tensor in cache.tensors:
                tensor[:, :, part.start : part.start + part.rows] = part.session[0] + part.start / 8
    return before


def _is_lost(sessions: Sessions, part: Part) -> bool:
    with pytest.raises(ProtocolError) as caught:
        _run(sessions, part)
    return caught.value.code is ErrorCode.UNKNOWN_SESSION


def test_sessions_wait_on_disk_for_their_next_request(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    sessions = _sessions(tmp_path)
    for number in (1, 2, 3, 4):
        _run(sessions, _part(number, 0, 1))
        _run(sessions, _part(number, 1, 1))
    bytes_of_two = 2 * (SMALLEST + SHAPE.token_bytes)
    assert sessions.totals == SessionTotals(2, 2 * UNIT, 2, bytes_of_two)
    for number in (1, 2, 3, 4, 1):
        assert _run(sessions, _part(number, 2, 1)) == [number, number + 1 / 8]
    # A fork of one that waits.
    assert _run(sessions, _part(9, 2, 1, parent=2)) == [2, 2 + 1 / 8]
    # A session that is begun anew, or forgotten, waits no more.
    assert sessions.totals.spilled > 0
    _run(sessions, _part(3, 0, 1))
    _run(sessions, _part(3, 1, 1), *(_part(number, 0, 0) for number in (1, 2, 4, 9)))
    assert sessions.totals == SessionTotals(1, UNIT)
    assert caplog.messages == []
    # A damaged file is a session that is lost.
    _run(sessions, *(_part(number, 0, 1) for number in (5, 6)))
    [(spilled, _)] = sessions._files._files.values()
    (byte,) = os.pread(_descriptor(spilled), 1, 7)
    os.pwrite(_descriptor(spilled), bytes([byte ^ 1]), 7)
    assert _is_lost(sessions, _part(3, 2, 1))
    assert caplog.messages == ["spill_damaged"]
    assert _run(sessions, _part(3, 0, 1)) == []
    sessions.close()
    assert sessions.totals == SessionTotals()


def test_files_go_with_their_time_and_their_client(tmp_path: Path) -> None:
    now = 0.0
    sessions = _sessions(tmp_path, units=1, clock=lambda: now)
    for number in (1, 2, 3):
        _run(sessions, _part(number, 0, 1))
        now += 10
    sessions.forget_client(b"another")
    assert (sessions.totals.spilled, sessions.expire()) == (2, 30)
    now = 60.0
    assert (sessions.expire(), sessions.totals.spilled, sessions.totals.sessions) == (10, 1, 1)
    assert _is_lost(sessions, _part(1, 1, 1))
    now = 69.0
    assert _run(sessions, _part(2, 1, 1)) == [2]
    assert sessions.totals.spilled == 1
    sessions.forget_client(b"client")
    assert sessions.totals == SessionTotals()


@each_row(("limit", "files"), [(2 * SMALLEST + 1, 512), (2**20, 2)])
def test_what_waits_is_bounded_in_bytes_and_files(tmp_path: Path, limit: int, files: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(session_files, "MAX_FILES", files)
        sessions = _sessions(tmp_path, units=1, spilled=limit)
        for number in (1, 2, 3, 4):
            _run(sessions, _part(number, 0, 1))
        assert sessions.totals == SessionTotals(1, UNIT, 2, 2 * SMALLEST)
        assert _is_lost(sessions, _part(1, 1, 1))
        assert _run(sessions, _part(2, 1, 1)) == [2]
        sessions.close()


@each_row(("most", "files"), [(4, 512), (1000, 4)])
def test_a_client_with_more_than_half_of_the_disk_loses_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: int, files: int
) -> None:
    monkeypatch.setattr(session_files, "MAX_FILES", files)
    kept = SessionFiles(tmp_path, most * (TOKENS * SHAPE.token_bytes + 9 * 16))

    def put(client: bytes, *numbers: int) -> str:
        """Write sessions, and return all that are left."""
        for number in numbers:
            kept.begin_request()
            kept.put(SessionName(client, bytes([number]), 0, 2), _cache(), SpillKey(), 0.0)
        return " ".join(sorted(f"{name.client.decode()}{name.session[0]}" for name in kept))

    put(b"a", 1)
    assert put(b"b", *range(1, 8)) == "a1 b5 b6 b7"
    # Also where it is another that needs the room.
    assert put(b"a", 2) == "a1 a2 b6 b7"
    # With half of it each, what was used least recently goes.
    kept.touch(SessionName(b"a", b"\1", 0, 2))
    assert put(b"c", 1, 2) == "a1 a2 c1 c2"
    assert put(b"c", 3) == "a1 a2 c2 c3"
    kept.forget_client(b"c")
    assert put(b"c") == "a1 a2"
    kept.close()
    assert (len(kept), kept.total_bytes) == (0, 0)


def test_a_request_has_so_many_bytes_and_files_written_and_the_rest_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(session_files, "REQUEST_BYTES", 3 * SHAPE.token_bytes)
        sessions = _sessions(tmp_path, units=4)
        for turn in (0, 4):
            # Of four that make room two are written: another one has two tokens.
            _run(sessions, *(_part(turn + n, 0, 1 + (n == 3)) for n in (1, 2, 3)))
            _run(sessions, _part(turn + 4, 0, 1))
        assert sessions.totals.spilled == 3
        assert _is_lost(sessions, _part(3, 2, 1))
        for number in (1, 2, 4):
            assert _run(sessions, _part(number, 1, 1)) == [number]
        sessions.close()
    made: list[int] = []

    def write(spilled: SpilledSession, piece: memoryview) -> None:
        made.append(1)
        spilled.bytes += len(piece)

    monkeypatch.setattr(session_files, "MAX_FILES", 3)
    monkeypatch.setattr(SpilledSession, "_write", write)
    sessions = _sessions(tmp_path, units=5)
    for first in (1, 6):
        _run(sessions, *(_part(number, 0, 1) for number in range(first, first + 5)))
    assert (len(made), sessions.totals.spilled) == (3 * SHAPE.layers, 3)
    sessions.close()


@each_row("error", [OSError("full"), OverflowError()])
def test_a_session_that_cannot_be_written_is_lost(tmp_path: Path, error: Exception) -> None:
    def fails(*_: object) -> None:
        raise error

    sessions = _sessions(tmp_path, units=1)
    _run(sessions, _part(1, 0, 1))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SpilledSession, "_write", fails)
        _run(sessions, _part(2, 0, 1))
    assert sessions.totals == SessionTotals(1, UNIT)
    assert _is_lost(sessions, _part(1, 1, 1))
    sessions.close()
