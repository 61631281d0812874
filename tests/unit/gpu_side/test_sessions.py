"""Sessions: each client's own, within limits of memory and time, and encrypted while on disk."""

import math
import os
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from gpu_side import session_cache
from gpu_side import sessions as sessions_module
from gpu_side.session_cache import GROWTH_TOKENS, CacheShape, SessionCache, SessionName, Window
from gpu_side.sessions import SegmentPart, SessionSettings, SessionStore, SessionTotals, free_bytes
from protocol.errors import ErrorCode, ProtocolError
from protocol.tensors import raw_bytes
from tests.kit.rows import each_row

SHAPE = CacheShape(2, 1, 2, torch.float32, torch.device("cpu"))
# What the smallest session takes in memory.
UNIT = GROWTH_TOKENS * SHAPE.token_bytes
LAYERS = (0, 1)
A, B = b"a", b"b"


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def _part(session: int, start: int, rows: int, parent: int = 0) -> SegmentPart:
    own, other = (number.to_bytes(16, "little") for number in (session, parent))
    return SegmentPart(own, start, rows, start + rows, other)


def _sessions(
    units: int = 4,
    of_one: int | None = None,
    clock: Clock | None = None,
    spill: Path | None = None,
    spill_bytes: int | None = None,
) -> SessionStore:
    of_one = units if of_one is None else of_one
    settings = SessionSettings(units * UNIT, of_one * UNIT, 60.0, spill, spill_bytes)
    return SessionStore(settings, 0, clock=clock or Clock())


def _running(sessions: SessionStore, client: bytes, *parts: SegmentPart) -> Any:
    return sessions.running(client, LAYERS, parts, SHAPE, Window())


def _write(cache: SessionCache, start: int, tokens: range) -> None:
    """Write the number of each token where its key and value would be."""
    for tensor in cache.tensors:
        for at, token in enumerate(tokens, start - cache.dropped):
            tensor[:, :, at] = token


def _run(sessions: SessionStore, client: bytes, *parts: SegmentPart) -> None:
    """Run a request whose tokens are the number of their session and their position."""
    with _running(sessions, client, *parts) as caches:
        rows = [part for part in parts if part.rows]
        for cache, part in zip(caches, rows, strict=True):
            first = 1000 * int.from_bytes(part.session, "little") + part.start
            _write(cache, part.start, range(first, first + part.rows))


def _code(sessions: SessionStore, client: bytes, *parts: SegmentPart) -> ErrorCode:
    with pytest.raises(ProtocolError) as caught, _running(sessions, client, *parts):
        pass
    return caught.value.code


def _held(sessions: SessionStore, client: bytes, session: int, tokens: int) -> list[float]:
    """Return what a session holds of its first tokens; the request adds none."""
    found: list[float] = []
    with suppress(ZeroDivisionError), _running(sessions, client, _part(session, tokens, 1)) as own:
        found += own[0].tensors[1][1, 0, :tokens, 1].tolist()
        raise ZeroDivisionError
    return found


def _known(sessions: SessionStore, client: bytes, *numbers: int) -> list[int]:
    """Return which sessions have a token; which of them was used last is as it was named."""
    found = []
    for number in numbers:
        with suppress(ProtocolError):
            _held(sessions, client, number, 1)
            found.append(number)
    return found


def test_a_session_is_found_by_its_client_and_layers_alone() -> None:
    sessions = _sessions()
    _run(sessions, A, _part(1, 0, 3))
    assert _code(sessions, B, _part(1, 3, 1)) is ErrorCode.UNKNOWN_SESSION
    assert _code(sessions, B, _part(2, 3, 1, parent=1)) is ErrorCode.UNKNOWN_SESSION
    shape = SHAPE._replace(layers=1)
    with (
        pytest.raises(ProtocolError),
        sessions.running(A, (0, 0), [_part(1, 3, 1)], shape, Window()),
    ):
        pass
    _run(sessions, B, _part(1, 0, 2))
    # A client that forgets its own forgets no other's.
    _run(sessions, B, _part(1, 0, 0), _part(2, 0, 1))
    assert _known(sessions, B, 1) == []
    assert _held(sessions, A, 1, 3) == [1000, 1001, 1002]


def test_a_fork_begins_with_tokens_that_its_parent_has() -> None:
    sessions = _sessions()
    _run(sessions, A, _part(1, 0, 2))
    for parts in (
        [_part(3, 3, 1, parent=1)],
        [_part(3, 1, 1, parent=3)],
        [_part(3, 1, 1, parent=9)],
        [_part(3, 1, 1)],
        [_part(1, 0, 0), _part(3, 1, 1, parent=1)],
    ):
        assert _code(sessions, A, *parts) is ErrorCode.UNKNOWN_SESSION, parts
    # A fork without room beside its parent is sent again.
    sessions = _sessions(3)
    _run(sessions, A, _part(1, 0, 2 * GROWTH_TOKENS))
    fork = _part(2, 2 * GROWTH_TOKENS, 1, parent=1)
    assert _code(sessions, A, fork) is ErrorCode.UNKNOWN_SESSION
    _run(sessions, A, _part(2, 0, 2 * GROWTH_TOKENS + 1))


def test_time_ends_a_session_that_is_not_used(tmp_path: Path) -> None:
    """In memory, and on disk."""
    clock = Clock()
    sessions = _sessions(1, clock=clock, spill=tmp_path)
    assert sessions.expire() == math.inf
    for number in (1, 2, 3):
        _run(sessions, A, _part(number, 0, 1))
        clock.now += 10
    assert (sessions.totals.spilled, sessions.expire()) == (2, 30)
    clock.now += 29
    assert (sessions.expire(), sessions.totals[::2]) == (1, (1, 2))
    clock.now += 1
    assert (sessions.expire(), sessions.totals[::2]) == (10, (1, 1))
    # Also where none but a request looks at the time; one that is used begins anew.
    clock.now += 9
    _run(sessions, A, _part(2, 1, 1))
    clock.now += 20
    assert _code(sessions, A, _part(3, 1, 1)) is ErrorCode.UNKNOWN_SESSION
    assert (sessions.expire(), sessions.totals[::2]) == (40, (1, 0))
    clock.now += 40
    assert (sessions.expire(), sessions.totals) == (math.inf, SessionTotals())


def test_clients_that_have_gone_or_are_let_in_no_more_lose_all(tmp_path: Path) -> None:
    for end in ("revoked", "gone"):
        sessions = _sessions(2, spill=tmp_path)
        for number in (1, 2):
            for client in (A, B):
                _run(sessions, client, _part(number, 0, 1))
        sessions.forget_revoked({A, B}.__contains__)
        assert sessions.totals[::2] == (2, 2)
        if end == "revoked":
            sessions.forget_revoked({B}.__contains__)
        else:
            sessions.forget_client(A)
        assert sessions.totals[::2] == (1, 1), end
        assert (_known(sessions, A, 1, 2), _known(sessions, B, 1, 2)) == ([], [1, 2])
        sessions.forget_revoked(lambda _client: False)
        assert sessions.totals == SessionTotals()


def test_the_least_recently_used_makes_room_of_its_own_client_first() -> None:
    sessions = _sessions(4, of_one=2)
    _run(sessions, B, _part(1, 0, 1))
    for number in (1, 2, 3):
        _run(sessions, A, _part(number, 0, 1))
    assert sessions.totals == SessionTotals(3, 3 * UNIT)
    assert (_known(sessions, A, 1, 3, 2), _known(sessions, B, 1)) == ([3, 2], [1])
    # All of its memory is not all that there is.
    too_large = _part(9, 0, 2 * GROWTH_TOKENS + 1)
    assert _code(sessions, A, too_large) is ErrorCode.SESSIONS_FULL
    assert sessions.totals.sessions == 3
    # Within its limit, it is the oldest of all that goes.
    _run(sessions, b"c", _part(1, 0, 1), _part(2, 0, 1))
    assert _known(sessions, A, 2, 3) == [2]


class AnyRequests(RuleBasedStateMachine):
    """Against plain lists of tokens: what is answered is right, and limits are kept.

    There is room on disk for all, so that nothing is lost but by time.
    """

    UNITS, OF_ONE = 6, 4

    def __init__(self) -> None:
        super().__init__()
        self.clock, self.count = Clock(), 0
        self.folder = tempfile.TemporaryDirectory()
        room = 2**20
        self.sessions = _sessions(self.UNITS, self.OF_ONE, self.clock, Path(self.folder.name), room)
        self.known: dict[tuple[bytes, int], tuple[list[int], float]] = {}

    def _tokens(self, client: bytes, session: int) -> list[int]:
        tokens, used_s = self.known.get((client, session), ([], 0.0))
        return tokens if used_s > self.clock.now - 60 else []

    @rule(
        client=st.sampled_from([A, B]),
        session=st.integers(1, 3),
        parent=st.integers(0, 3),
        start=st.integers(0, 200),
        rows=st.integers(0, 150),
        fails=st.booleans(),
        later_s=st.sampled_from([0, 0, 0, 30, 61]),
    )
    def ask(
        self,
        client: bytes,
        session: int,
        parent: int,
        start: int,
        rows: int,
        fails: bool,
        later_s: float,
    ) -> None:
        self.clock.now += later_s
        tokens = list(range(self.count, self.count + rows))
        self.count += rows
        mine, theirs = self._tokens(client, session), self._tokens(client, parent)
        is_there = len(mine) >= start
        source = mine if is_there else theirs if parent != session else []
        now, after = self.clock.now, source[:start] + tokens if rows else []
        if not is_there and theirs:
            self.known[client, parent] = theirs, now
        try:
            with _running(self.sessions, client, _part(session, start, rows, parent)) as caches:
                assert len(source) >= start or not rows
                for cache in caches:
                    _write(cache, start, range(tokens[0], tokens[0] + rows))
                    for tensor in cache.tensors:
                        held = tensor[0, 0, : start + rows, 0].tolist()
                        assert held == source[:start] + tokens
                if fails:
                    raise ZeroDivisionError
        except ProtocolError as error:
            unknown = error.code is ErrorCode.UNKNOWN_SESSION
            assert unknown or start + rows > (self.OF_ONE - 1) * GROWTH_TOKENS
            assert not (unknown and is_there)
            with _running(self.sessions, client, _part(session, 0, 0)):
                after = []
        except ZeroDivisionError:
            after = after[:start]
            assert all(cache.length == start for cache in caches)
        self.known[client, session] = after, now

    @invariant()
    def limits_are_kept(self) -> None:
        totals = self.sessions.totals
        assert totals.bytes <= self.UNITS * UNIT
        assert totals.sessions + totals.spilled <= 6
        held = self.sessions._held
        assert totals.bytes == sum(cache.bytes for cache in held.values())
        for client in (A, B):
            sizes = [one.bytes for name, one in held.items() if name.client == client]
            account = self.sessions._ledger.of(client)
            found = account.bytes, account.bytes - account.resting_bytes, len(account.resting)
            assert found == (sum(sizes), 0, len(sizes))

    def teardown(self) -> None:
        self.sessions.forget_revoked(lambda _client: False)
        assert self.sessions.totals == SessionTotals()
        assert not self.sessions._ledger.clients
        self.folder.cleanup()


AnyRequests.TestCase.settings = hypothesis_settings(
    max_examples=30, stateful_step_count=30, deadline=None
)
TestAnyRequests = AnyRequests.TestCase


def test_a_damaged_file_is_a_session_that_is_lost(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    sessions = _sessions(1, spill=tmp_path)
    for number in (5, 6):
        _run(sessions, A, _part(number, 0, 1))
    [spilled] = sessions._files.values()
    os.pwrite(spilled._file.fileno(), bytes([_written(spilled)[7] ^ 1]), 7)
    assert _code(sessions, A, _part(5, 1, 1)) is ErrorCode.UNKNOWN_SESSION
    assert caplog.messages == ["spill_damaged"]
    _run(sessions, A, _part(5, 0, 1))
    sessions.forget_revoked(lambda _client: False)


@each_row("error", [OSError("full"), OverflowError()])
def test_a_session_that_cannot_be_written_is_lost(tmp_path: Path, error: Exception) -> None:
    sessions = _sessions(1, spill=tmp_path)
    with pytest.MonkeyPatch.context() as patch:
        # A device without memory leaves nothing.
        patch.setattr(torch, "empty", Mock(side_effect=MemoryError))
        with pytest.raises(MemoryError), _running(sessions, A, _part(1, 0, 1)):
            pass
    assert sessions.totals == SessionTotals()
    _run(sessions, A, _part(1, 0, 1))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(session_cache.SpilledSession, "_bound", Mock(side_effect=error))
        _run(sessions, A, _part(2, 0, 1))
    assert sessions.totals == SessionTotals(1, UNIT)
    assert _known(sessions, A, 1) == []
    sessions.forget_revoked(lambda _client: False)


NAME = SessionName(b"client", bytes(15) + b"\x01", 0, 2)
WIDE = CacheShape(3, 2, 4, torch.float32, torch.device("cpu"))
TOKENS = 10


def _cache(shape: CacheShape = WIDE) -> SessionCache:
    cache = SessionCache(shape)
    cache.resize(GROWTH_TOKENS)
    cache.length = TOKENS
    for tensor in cache.tensors:
        tensor.copy_(torch.randn(tensor.shape))
    return cache


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut a layer into several pieces, the last of which is smaller."""
    monkeypatch.setattr(session_cache, "_PIECE_BYTES", 300)


def _spilled(folder: Path, cache: SessionCache, key: Any = None) -> session_cache.SpilledSession:
    cache.key = key or cache.key
    return session_cache.SpilledSession(folder, NAME, cache)


def _written(spilled: session_cache.SpilledSession) -> bytes:
    return os.pread(spilled._file.fileno(), 2**20, 0)


@each_row("nameless", [True, False])
def test_the_disk_gets_no_name_and_no_plain_bytes(tmp_path: Path, nameless: bool) -> None:
    """Whether the file system has files without a name or not."""
    with pytest.MonkeyPatch.context() as patch:
        if not nameless:
            patch.setattr(tempfile, "_O_TMPFILE_WORKS", False)
        cache = _cache()
        spilled = _spilled(tmp_path, cache)
    assert list(tmp_path.iterdir()) == []
    status = os.fstat(spilled._file.fileno())
    assert (status.st_nlink, status.st_mode & 0o777) == (0, 0o600)
    written = _written(spilled)
    assert len(written) == status.st_size == spilled.bytes
    stored = [tensor[:, :, : cache.stored] for tensor in cache.tensors]
    plain = b"".join(bytes(raw_bytes(tensor)) for tensor in stored)
    pieces = 3 * len(cache.tensors)  # 640 bytes a layer: 300, 300 and 40
    assert len(written) == len(plain) + 16 * pieces
    assert not any(plain[n : n + 8] in written for n in range(0, len(plain) - 8, 4))
    assert NAME.client not in written
    # The same once more is nothing like it.
    other = _spilled(tmp_path, cache, spilled.key)
    assert _written(other)[:64] != written[:64]
    spilled.close()
    other.close()


def test_a_nonce_is_never_used_twice_by_a_key(tmp_path: Path) -> None:
    key = session_cache.SpillKey()
    used = [key.next_nonce() for _ in range(100)]
    assert len(set(used)) == 100
    assert {len(nonce) for nonce in used} == {12}
    # The last one is the last.
    key = session_cache.SpillKey(2**96 - 2)
    assert [key.next_nonce()[-1:] for _ in range(2)] == [b"\xfe", b"\xff"]
    for _ in range(2):
        with pytest.raises(OverflowError):
            key.next_nonce()
    with pytest.raises(OverflowError):
        _spilled(tmp_path, _cache(), key)


@each_row(
    "damaged",
    [
        lambda old: old[:700] + bytes([old[700] ^ 1]) + old[701:],
        lambda old: old[:310] + bytes([old[310] ^ 0x80]) + old[311:],  # a tag
        lambda old: old[316:632] + old[:316] + old[632:],  # pieces in another order
        lambda old: old[:-1],
        lambda old: b"",
    ],
)
def test_a_file_that_was_changed_is_no_session(tmp_path: Path, damaged: Any) -> None:
    key = session_cache.SpillKey()
    spilled, other = _spilled(tmp_path, _cache(), key), _spilled(tmp_path, _cache(), key)
    # The other is of the same key and session: its nonces are others.
    for content in (damaged(_written(spilled)), _written(other)):
        os.ftruncate(spilled._file.fileno(), 0)
        os.pwrite(spilled._file.fileno(), content, 0)
        assert not spilled.read_into(_cache())
    spilled.close()
    other.close()


@each_row(
    ("field", "value"),
    [
        ("name", NAME._replace(client=b"other")),
        ("name", NAME._replace(session=bytes(16))),
        ("name", NAME._replace(first_layer=1)),
        ("name", NAME._replace(last_layer=3)),
        ("_sizes", (TOKENS, 1, 0)),
        ("shape", WIDE._replace(heads=4, head_dim=2)),
        ("shape", WIDE._replace(dtype=torch.int32)),
        ("key", session_cache.SpillKey()),
    ],
)
def test_what_was_written_is_bound_to_its_session(tmp_path: Path, field: str, value: Any) -> None:
    spilled = _spilled(tmp_path, _cache())
    assert spilled.read_into(_cache())
    setattr(spilled, field, value)
    assert not spilled.read_into(_cache())
    spilled.close()


@each_row(("most", "files"), [(4, 512), (1000, 4)])
def test_a_client_with_more_than_half_of_the_disk_loses_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: int, files: int
) -> None:
    monkeypatch.setattr(sessions_module, "MAX_FILES", files)
    room = most * (TOKENS * WIDE.token_bytes + 9 * 16)
    kept = SessionStore(SessionSettings(spill=tmp_path, spill_bytes=room), 2**30)

    def put(client: bytes, *numbers: int) -> str:
        """Write sessions, and return all that are left."""
        for number in numbers:
            kept._spill_left = sessions_module.REQUEST_BYTES
            kept._spill(SessionName(client, bytes([number]), 0, 2), _cache())
        return " ".join(sorted(f"{name.client.decode()}{name.session[0]}" for name in kept._files))

    put(b"a", 1)
    assert put(b"b", *range(1, 8)) == "a1 b5 b6 b7"
    # Also where it is another that needs the room.
    assert put(b"a", 2) == "a1 a2 b6 b7"
    # With half of it each, what was used least recently goes.
    asked = [_part(9, 1, 1), SegmentPart(b"\1", 1, 1, 2)]
    with pytest.raises(ProtocolError), kept.running(b"a", (0, 2), asked, WIDE, Window()):
        raise AssertionError
    assert put(b"c", 1, 2) == "a1 a2 c1 c2"
    assert put(b"c", 3) == "a1 a2 c2 c3"
    kept.forget_client(b"c")
    assert put(b"c") == "a1 a2"
    kept.forget_client(b"a")
    assert kept.totals == SessionTotals()


@each_row(("most", "files", "kept"), [(3, 512, [0, 1, 2, 5, 6, 7]), (1000, 2, [5, 6])])
def test_a_request_has_so_much_written_and_the_rest_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: int, files: int, kept: list[int]
) -> None:
    """Others wait while it is encrypted and written, and while files are made."""
    size = TOKENS * WIDE.token_bytes
    monkeypatch.setattr(sessions_module, "MAX_FILES", files)
    monkeypatch.setattr(sessions_module, "REQUEST_BYTES", most * size)
    found = SessionStore(SessionSettings(spill=tmp_path, spill_bytes=2**30), 2**30)
    for number in range(10):
        if number % 5 == 0:
            found._spill_left = most * size
        found._spill(SessionName(A, bytes([number]), 0, 2), _cache())
    assert [name.session[0] for name in found._files] == kept
    found.forget_client(A)


def test_without_a_limit_it_is_half_of_what_is_free_and_half_of_that_for_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = tmp_path / "meminfo"
    said.write_text("MemTotal:  9000 kB\nMemFree:  10 kB\nMemAvailable:  1000 kB\n")
    monkeypatch.setattr(sessions_module, "_MEMINFO", said)
    sessions = SessionStore(SessionSettings(), free_bytes(torch.device("cpu")))
    assert (sessions._most, sessions._most_client) == (500 * 1024, 250 * 1024)
