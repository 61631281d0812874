"""The segment that both ends map: what a service takes for one, and how messages lie in it."""

from __future__ import annotations

import fcntl
import os
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest

from protocol import native, shared_memory
from protocol.errors import EndpointError, ErrorCode, ProtocolError
from protocol.shared_memory import MAX_AREA_BYTES, SLOTS, Areas, Lane, adopt, create, frames_in
from protocol.tensors import Buffer
from tests.kit.shm import PAGE, memfd, message, write_line

AREAS = Areas(2, PAGE, 2 * PAGE)
SHRINK, GROW, SEAL = fcntl.F_SEAL_SHRINK, fcntl.F_SEAL_GROW, fcntl.F_SEAL_SEAL
FRAMES = [b"header", bytes(range(200))]


@pytest.fixture
def ends() -> Iterator[tuple[Lane, Lane]]:
    """The client's and the service's end of one segment."""
    client, file = create(1000, 3000)
    yield client, adopt(file, os.getuid())
    os.close(file)


def _read(lane: Lane, slot: int) -> list[bytes]:
    frames = frames_in(lane.view(slot), "peer", max_frames=4, max_message_bytes=10_000)
    return list(map(bytes, frames))


# ------------------------------------------------------------------------------- what is adopted


def test_a_segment_is_adopted_as_it_was_made() -> None:
    client, file = create(1000, 3 * MAX_AREA_BYTES)
    service = adopt(file, os.getuid())
    assert client.slots == service.slots == SLOTS
    assert client._room == service._incoming == 2 * PAGE
    assert client._incoming == service._room == MAX_AREA_BYTES
    assert os.fstat(file).st_size == Areas(SLOTS, 2 * PAGE, MAX_AREA_BYTES).total
    assert os.fstat(file).st_blocks * 512 <= PAGE  # memory is taken as slots are used
    os.close(file)


WRONG = {
    "no seals": ({"seals": 0}, "a file that may change its size"),
    "may shrink": ({"seals": GROW | SEAL}, "a file that may change its size"),
    "may grow": ({"seals": SHRINK | SEAL}, "a file that may change its size"),
    "may be sealed": ({"seals": SHRINK | GROW}, "a file that may change its size"),
    "empty": ({"size": 0, "head": b""}, "got 0 bytes, expected 32 to"),
    "half a head": ({"size": 31, "head": b""}, "got 31 bytes"),
    "truncated": ({"size": AREAS.total - PAGE}, "got another head"),
    "grown": ({"size": AREAS.total + PAGE}, "got another head"),
    "too large": ({"size": 2**40}, f"got {2**40} bytes"),
    "read only": ({"seals": SHRINK | GROW | SEAL | fcntl.F_SEAL_WRITE}, "cannot be mapped"),
    "no head": ({"head": bytes(32)}, "got another head"),
    "magic": ({"head": struct.pack("<8sIxxxxQQ", b"TSQPshm2", *AREAS)}, "got another head"),
}
HEADS = {
    "no slots": Areas(0, PAGE, PAGE),
    "too many slots": Areas(SLOTS + 1, PAGE, PAGE),
    "no request": Areas(2, 0, 3 * PAGE),
    "no reply": Areas(2, 3 * PAGE, 0),
    "not whole pages": Areas(2, PAGE + 8, 2 * PAGE - 8),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_file_that_is_no_segment_is_refused(wrong: str) -> None:
    how, said = WRONG[wrong]
    file = memfd(AREAS, **how)  # type: ignore[arg-type]
    with pytest.raises(ProtocolError, match=f"shared memory: .*{said}") as info:
        adopt(file, os.getuid())
    large = wrong in ("empty", "half a head", "too large")
    assert info.value.code is (ErrorCode.LIMIT_EXCEEDED if large else ErrorCode.MALFORMED_MESSAGE)
    os.close(file)


@pytest.mark.parametrize("wrong", HEADS)
def test_a_head_that_lies_is_refused(wrong: str) -> None:
    file = memfd(HEADS[wrong])
    with pytest.raises(ProtocolError, match="got another head"):
        adopt(file, os.getuid())
    os.close(file)


def test_sizes_that_add_up_only_modulo_a_word_are_refused() -> None:
    head = struct.pack("<8sIxxxxQQ", b"TSQPshm1", 2, 2**64 - PAGE, AREAS.request_bytes)
    file = memfd(AREAS, head=head)
    with pytest.raises(ProtocolError, match="got another head"):
        adopt(file, os.getuid())
    os.close(file)


def test_no_memfd_is_refused(tmp_path: Path) -> None:
    (tmp_path / "plain").write_bytes(bytes(AREAS.total))
    for path in (str(tmp_path / "plain"), "/dev/zero", str(tmp_path)):
        file = os.open(path, os.O_RDONLY)
        with pytest.raises(ProtocolError, match="expected a memfd"):
            adopt(file, os.getuid())
        os.close(file)


def test_a_file_of_another_user_is_refused() -> None:
    file = memfd(AREAS)
    with pytest.raises(ProtocolError, match="got a file of another user"):
        adopt(file, os.getuid() + 1)
    os.close(file)


def test_huge_pages_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """There may be none left when one is touched."""
    file = memfd(AREAS)
    real = os.fstatvfs(file)
    huge = os.statvfs_result((2**21, *tuple(real)[1:]))
    monkeypatch.setattr(shared_memory.os, "fstatvfs", lambda file: huge)
    with pytest.raises(ProtocolError, match="got pages of 2097152 bytes"):
        adopt(file, os.getuid())
    os.close(file)


def test_transparent_huge_pages_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    file = memfd(AREAS)
    real = os.fstat(file)
    fields = (*tuple(real)[:10], *(None,) * 9)
    extra = {"st_blksize": 2**21}
    monkeypatch.setattr(shared_memory.os, "fstat", lambda _: os.stat_result(fields, extra))
    adopt(file, os.getuid())
    os.close(file)


def test_nothing_is_left_open_by_what_is_refused_or_forgotten() -> None:
    def opened() -> int:
        return len(os.listdir("/proc/self/fd"))

    before = opened()
    for how, _ in WRONG.values():
        file = memfd(AREAS, **how)  # type: ignore[arg-type]
        with pytest.raises(ProtocolError):
            adopt(file, os.getuid())
        os.close(file)
    client, file = create(1000, 1000)
    service = adopt(file, os.getuid())
    os.close(file)
    del client, service
    assert opened() == before


def test_without_compiled_kernels_there_is_no_shared_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(native, "library", None)
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(EndpointError, match="got no compiled kernels"):
        create(1000, 1000)
    assert len(os.listdir("/proc/self/fd")) == before


# ------------------------------------------------------------------------------------- messages


def test_what_is_put_is_seen_once(ends: tuple[Lane, Lane]) -> None:
    for us, peer in (ends, ends[::-1]):
        assert peer.look() == -1
        assert us.put(3, FRAMES) is False
        assert peer.look() == 3
        assert _read(peer, 3) == FRAMES
        assert peer.look() == peer.look(100) == -1


def test_an_end_that_sleeps_is_to_be_woken_up(ends: tuple[Lane, Lane]) -> None:
    for us, peer in (ends, ends[::-1]):
        peer.sleeps(True)
        assert us.put(0, FRAMES) is True
        peer.sleeps(False)
        assert us.put(1, FRAMES) is False


def test_a_message_larger_than_its_area_is_not_put(ends: tuple[Lane, Lane]) -> None:
    client, service = ends
    largest = 2 * PAGE - 64
    assert client.put(0, [bytes(largest)]) is False
    assert client.put(1, [bytes(largest + 1)]) is None
    assert (service.look(), service.look()) == (0, -1)


def test_no_message_gives_the_slot_back(ends: tuple[Lane, Lane]) -> None:
    client, service = ends
    service.put(5, ())
    assert client.look() == 5
    assert not client.view(5)


def test_messages_in_several_slots_say_their_order(ends: tuple[Lane, Lane]) -> None:
    client, service = ends
    client._put = 2**32 - 2  # also when the numbers begin anew
    for slot in (4, 1, 6):
        client.put(slot, FRAMES)
    seen = [service.look() for _ in range(3)]
    assert seen == [1, 4, 6]
    assert [service.number(slot) for slot in (4, 1, 6)] == [2**32 - 1, 1, 2]


@pytest.mark.parametrize("size", [2 * PAGE + 1, 2**63, 2**64 - 1])
def test_a_size_beyond_the_area_is_refused(ends: tuple[Lane, Lane], size: int) -> None:
    client, service = ends
    write_line(client, 7, 1, size, of_client=True)
    assert service.look() == 7
    with pytest.raises(ProtocolError, match=f"got a message of {size} bytes") as info:
        service.view(7)
    assert info.value.code is ErrorCode.LIMIT_EXCEEDED


def test_a_size_that_changes_after_it_was_seen_changes_nothing(ends: tuple[Lane, Lane]) -> None:
    client, service = ends
    client.put(0, FRAMES)
    assert service.look() == 0
    write_line(client, 0, 1, 2**64 - 1, of_client=True)
    assert _read(service, 0) == FRAMES


NO_MESSAGES = {
    "nothing": b"",
    "half a count": b"\1\0",
    "no frames": message([b"x"])[:64].replace(b"\1", b"\0", 1),
    "too many frames": struct.pack("<I5Q", 5, *(0,) * 5) + bytes(20),
    "count without sizes": struct.pack("<I", 2) + bytes(8),
    "shorter than it says": message(FRAMES)[:-1],
    "longer than it says": message(FRAMES) + b"\0",
    "a frame beyond": struct.pack("<IQ", 1, 9000) + bytes(100),
}


@pytest.mark.parametrize("name", NO_MESSAGES)
def test_what_is_no_message_is_refused(name: str) -> None:
    view = memoryview(bytearray(NO_MESSAGES[name]))
    with pytest.raises(ProtocolError, match=r"message from peer: got \d+ frames in") as info:
        frames_in(view, "peer", max_frames=4, max_message_bytes=10_000)
    assert info.value.code is ErrorCode.MALFORMED_MESSAGE


def test_frames_larger_than_the_limit_are_refused() -> None:
    # Each is small enough, and their sum is no number of 64 bits.
    for sizes in ((600, 600), (2**64 - 1, 2)):
        view = memoryview(bytearray(struct.pack("<I2Q", 2, *sizes) + bytes(2000)))
        with pytest.raises(ProtocolError, match="expected at most 1000") as info:
            frames_in(view, "peer", max_frames=4, max_message_bytes=1000)
        assert info.value.code is ErrorCode.LIMIT_EXCEEDED


def test_frames_are_views_that_end_where_the_first_reading_said() -> None:
    memory = bytearray(message(FRAMES))
    frames = frames_in(memoryview(memory), "peer", max_frames=4, max_message_bytes=10_000)
    memory[4:20] = b"\xff" * 16
    assert [len(frame) for frame in frames] == [6, 200]
    assert bytes(frames[1]) == FRAMES[1]


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
