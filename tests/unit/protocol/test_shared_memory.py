"""The segment that both ends map: what a service takes for one, and how messages lie in it."""

from __future__ import annotations

import fcntl
import os
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest

from protocol import shared_memory
from protocol.errors import ErrorCode, ProtocolError
from protocol.shared_memory import SLOTS, Areas, Lane, adopt, create, frames_in
from protocol.tensors import Buffer
from tests.kit.rows import each_row
from tests.kit.shm import PAGE, memfd, message, write_line

AREAS = Areas(2, PAGE, 2 * PAGE)
SHRINK, GROW, SEAL = fcntl.F_SEAL_SHRINK, fcntl.F_SEAL_GROW, fcntl.F_SEAL_SEAL
FRAMES = [b"header", bytes(range(200))]
US = os.getuid()


@pytest.fixture
def ends() -> Iterator[tuple[Lane, Lane]]:
    """The client's and the service's end of one segment."""
    client, file = create(1000, 3000)
    yield client, adopt(file, US)
    os.close(file)


def _read(lane: Lane, slot: int) -> list[bytes]:
    frames = frames_in(lane.view(slot), "peer", max_frames=4, max_message_bytes=10_000)
    return list(map(bytes, frames))


def _opened() -> int:
    return len(os.listdir("/proc/self/fd"))


def _head(areas: tuple[int, ...], magic: bytes = b"TSQPshm1") -> bytes:
    return struct.pack("<8sIxxxxQQ", magic, *areas)


@each_row(
    ("how", "said"),
    [
        ({"seals": 0}, "a file that may change its size"),
        ({"seals": GROW | SEAL}, "a file that may change its size"),
        ({"seals": SHRINK | SEAL}, "a file that may change its size"),
        ({"seals": SHRINK | GROW}, "a file that may change its size"),
        ({"seals": SHRINK | GROW | SEAL | fcntl.F_SEAL_WRITE}, "cannot be mapped"),
        ({"size": 0, "head": b""}, "got 0 bytes, expected 32 to"),
        ({"size": 31, "head": b""}, "got 31 bytes, expected 32 to"),
        ({"size": 2**40}, f"got {2**40} bytes, expected 32 to"),
        ({"size": AREAS.total - PAGE}, "got another head"),
        ({"size": AREAS.total + PAGE}, "got another head"),
        ({"head": _head(AREAS, b"TSQPshm2")}, "got another head"),
        ({"areas": Areas(0, PAGE, PAGE)}, "got another head"),
        ({"areas": Areas(SLOTS + 1, PAGE, PAGE)}, "got another head"),
        ({"areas": Areas(2, 0, 3 * PAGE)}, "got another head"),
        ({"areas": Areas(2, 3 * PAGE, 0)}, "got another head"),
        ({"areas": Areas(2, PAGE + 8, 2 * PAGE - 8)}, "got another head"),
        # Sizes that add up only modulo a word.
        ({"head": _head((2, 2**64 - PAGE, AREAS.request_bytes))}, "got another head"),
    ],
)
def test_a_file_that_is_no_segment_is_refused(how: dict[str, object], said: str) -> None:
    before = _opened()
    file = memfd(**{"areas": AREAS, **how})  # type: ignore[arg-type]
    with pytest.raises(ProtocolError, match=f"shared memory: .*{said}") as info:
        adopt(file, US)
    limit, code = "expected 32 to" in said, info.value.code
    assert code is (ErrorCode.LIMIT_EXCEEDED if limit else ErrorCode.MALFORMED_MESSAGE)
    del info  # its frames have the memory
    os.close(file)
    assert _opened() == before


def test_what_is_no_memfd_or_another_users_is_refused(tmp_path: Path) -> None:
    (tmp_path / "plain").write_bytes(bytes(AREAS.total))
    for path in (str(tmp_path / "plain"), "/dev/zero", str(tmp_path)):
        file = os.open(path, os.O_RDONLY)
        with pytest.raises(ProtocolError, match="expected a memfd"):
            adopt(file, US)
        os.close(file)
    file = memfd(AREAS)
    with pytest.raises(ProtocolError, match="got a file of another user"):
        adopt(file, US + 1)
    os.close(file)


def test_huge_pages_are_refused_but_transparent_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """There may be none left when one is touched."""
    file = memfd(AREAS)
    fields = (*tuple(os.fstat(file))[:10], *(None,) * 9)
    transparent = os.stat_result(fields, {"st_blksize": 2**21})
    huge = os.statvfs_result((2**21, *tuple(os.fstatvfs(file))[1:]))
    with monkeypatch.context() as patch:
        patch.setattr(shared_memory.os, "fstat", lambda _: transparent)
        adopt(file, US)
    monkeypatch.setattr(shared_memory.os, "fstatvfs", lambda _: huge)
    with pytest.raises(ProtocolError, match="got pages of 2097152 bytes"):
        adopt(file, US)
    os.close(file)


def test_what_is_put_is_seen_once_by_an_end_that_is_woken_up(ends: tuple[Lane, Lane]) -> None:
    for us, peer in (ends, ends[::-1]):
        assert peer.look() == -1
        assert us.put(3, FRAMES) is False
        assert peer.look() == 3
        assert _read(peer, 3) == FRAMES
        assert peer.look() == peer.look(100) == -1
        peer.sleeps(True)
        assert us.put(0, FRAMES) is True
        peer.sleeps(False)
        assert us.put(1, FRAMES) is False
        assert (peer.look(), peer.look()) == (0, 1)
        us.put(5, ())  # no message gives the slot back
        assert peer.look() == 5
        assert not peer.view(5)
    client, service = ends
    assert client.put(2, [bytes(2 * PAGE - 64)]) is False
    assert client.put(6, [bytes(2 * PAGE - 63)]) is None
    assert (service.look(), service.look()) == (2, -1)
    client._put = 2**32 - 2  # the numbers begin anew, without a zero
    for slot in (4, 1, 6):
        client.put(slot, FRAMES)
    assert [service.look() for _ in range(3)] == [1, 4, 6]
    assert [service.number(slot) for slot in (4, 1, 6)] == [2**32 - 1, 1, 2]


def test_a_size_is_read_once_and_held_against_the_area(ends: tuple[Lane, Lane]) -> None:
    client, service = ends
    client.put(0, FRAMES)
    assert service.look() == 0
    write_line(client, 0, 1, 2**64 - 1, of_client=True)
    assert _read(service, 0) == FRAMES
    for number, size in enumerate((2 * PAGE + 1, 2**63, 2**64 - 1), start=1):
        write_line(client, 7, number, size, of_client=True)
        assert service.look() == 7
        with pytest.raises(ProtocolError, match=f"got a message of {size} bytes") as info:
            service.view(7)
        assert info.value.code is ErrorCode.LIMIT_EXCEEDED


@each_row(
    ("content", "said"),
    [
        (b"", "got 0 frames in"),
        (message([b"x"])[:64].replace(b"\1", b"\0", 1), "got 0 frames in"),
        (struct.pack("<I5Q", 5, *(0,) * 5) + bytes(20), "got 5 frames in"),
        (message(FRAMES)[:-1], "got 2 frames in"),
        (message(FRAMES) + b"\0", "got 2 frames in"),
        (struct.pack("<IQ", 1, 900) + bytes(100), "got 1 frames in"),
        # Each is small enough; the second sum is no number of 64 bits.
        (struct.pack("<I2Q", 2, 600, 600) + bytes(2000), "expected at most 1000"),
        (struct.pack("<I2Q", 2, 2**64 - 1, 2) + bytes(2000), "expected at most 1000"),
    ],
)
def test_what_is_no_message_is_refused(content: bytes, said: str) -> None:
    view = memoryview(bytearray(content))
    with pytest.raises(ProtocolError, match=f"message from peer: .*{said}") as info:
        frames_in(view, "peer", max_frames=4, max_message_bytes=1000)
    limit = "at most" in said
    assert info.value.code is (ErrorCode.LIMIT_EXCEEDED if limit else ErrorCode.MALFORMED_MESSAGE)


def test_what_lies_in_the_slot_is_put_where_it_belongs(ends: tuple[Lane, Lane]) -> None:
    client, service = ends
    client.put(0, [b"request", b"tensor"])
    assert service.look() == 0
    reply = service.memory(0).reply
    # Where the second frame goes, as a device leaves it, and elsewhere.
    for start in (64 + 64, 1024):
        reply[start : start + 5] = b"right"
        frames: list[Buffer] = [b"header", reply[start : start + 5]]
        assert service.put(0, frames) is not None
        assert client.look() == 0
        assert _read(client, 0) == [b"header", b"right"]
        reply[128 : 128 + 5] = b"wrong"
