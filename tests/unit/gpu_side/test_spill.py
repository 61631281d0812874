"""A session on disk: it comes back as it was or not at all, and tells the disk nothing."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

from gpu_side import session_files, spill
from gpu_side.session_cache import GROWTH_TOKENS, CacheShape, SessionCache
from gpu_side.session_files import SessionFiles
from gpu_side.spill import SessionName, SpilledSession, SpillKey
from protocol.tensors import raw_bytes
from tests.kit.rows import each_row

NAME = SessionName(b"client", bytes(15) + b"\x01", 0, 2)
SHAPE = CacheShape(3, 2, 4, torch.float32, torch.device("cpu"))
TOKENS = 10


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
    # The same once more is nothing like it.
    other = _spilled(tmp_path, cache, spilled.key)
    assert _written(other)[:64] != written[:64]
    spilled.close()
    other.close()


def test_a_nonce_is_never_used_twice_by_a_key(tmp_path: Path) -> None:
    key = SpillKey()
    used = [key.next_nonce() for _ in range(100)]
    assert len(set(used)) == 100
    assert {len(nonce) for nonce in used} == {12}
    # The last one is the last.
    key = SpillKey(2**96 - 2)
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
    key = SpillKey()
    spilled, other = _spilled(tmp_path, _cache(), key), _spilled(tmp_path, _cache(), key)
    # The other is of the same key and session: its nonces are others.
    for content in (damaged(_written(spilled)), _written(other)):
        os.ftruncate(_descriptor(spilled), 0)
        os.pwrite(_descriptor(spilled), content, 0)
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
