"""The segment that both ends map: what a service takes for one, and how messages lie in it.

It is a memfd of the client's, or a device's memory, of which each end has a file.
"""

from __future__ import annotations

import fcntl
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from tempfile import mkdtemp
from unittest.mock import Mock

import pytest
import torch

from gpu_side.encoding import open_request
from gpu_side.transport.device_memory import DeviceMemory
from gpu_side.transport.stream_listener import StreamListener
from protocol import ivshmem, shared_memory
from protocol.encoding import encode_request
from protocol.errors import EndpointError, ErrorCode, ProtocolError
from protocol.ivshmem import IvshmemChannel
from protocol.messages import InitRequest, LMHeadRequest, TensorReply
from protocol.shared_memory import (
    ATTACH,
    LARGEST,
    MAX_AREA_BYTES,
    SLOTS,
    SMALLEST,
    Areas,
    Lane,
    adopt,
    areas_for,
    create,
    frames_in,
)
from protocol.shm import ShmChannel
from protocol.tensors import Buffer, from_torch, to_torch
from tests.kit.rows import each_row
from tests.kit.shm import PAGE, RawClient, RawService, attach, memfd, message, write_line
from tests.kit.wire import REFUSED, is_dropped, raw_socket, take, tensor_reply

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
    before = len(os.listdir("/proc/self/fd"))
    file = memfd(**{"areas": AREAS, **how})  # type: ignore[arg-type]
    with pytest.raises(ProtocolError, match=f"shared memory: .*{said}") as info:
        adopt(file, US)
    limit, code = "expected 32 to" in said, info.value.code
    assert code is (ErrorCode.LIMIT_EXCEEDED if limit else ErrorCode.MALFORMED_MESSAGE)
    del info  # its frames have the memory
    os.close(file)
    assert len(os.listdir("/proc/self/fd")) == before


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


ROUNDS = 500
TINY_S = 0.05
REQUEST = LMHeadRequest(hidden_states=from_torch(torch.ones(8)))


@pytest.fixture
def endpoint(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if "memory" in request.fixturenames:
        return f"ivshmem://{request.getfixturevalue('memory')},{tmp_path}/s"
    return f"shm://{tmp_path}/s"


@pytest.fixture
def service(endpoint: str) -> Iterator[RawService]:
    with RawService(endpoint) as made:
        yield made


@pytest.fixture
def channel(endpoint: str) -> Iterator[ShmChannel]:
    with ShmChannel(endpoint, timeout_s=20, max_message_bytes=2**16) as made:
        yield made


def _submit(channel: ShmChannel, service: RawService) -> tuple[int, int]:
    request_id = channel.submit(REQUEST)
    service.accept()
    slot, seen = service.request()
    assert seen == request_id
    return request_id, slot


def _good(request_id: int, value: float = 1.0) -> list[bytes]:
    return [bytes(frame) for frame in tensor_reply(request_id, torch.full((8,), value))]


def test_no_wake_up_is_lost(endpoint: str) -> None:
    """Both ends fall asleep all the time; one that nobody wakes up ends in a deadline."""
    listener = StreamListener(endpoint)

    def serve() -> None:
        for _ in range(ROUNDS):
            incoming = take(listener)
            opened = open_request(incoming.frames, 2**20)
            listener.send(incoming.route, tensor_reply(opened.request_id, torch.ones(1)))

    thread = threading.Thread(target=serve)
    thread.start()
    with ShmChannel(endpoint, timeout_s=20) as channel:
        for _ in range(ROUNDS):
            channel.call(REQUEST)
    thread.join()
    listener.close()


def test_a_service_that_raises_numbers_without_end_holds_no_caller(
    service: RawService, channel: ShmChannel, monkeypatch: pytest.MonkeyPatch
) -> None:
    request_id, slot = _submit(channel, service)
    looks: list[int] = []

    def look(_: Lane, spin_us: int = 0) -> int:
        looks.append(spin_us)
        assert len(looks) < 100, "it looks without end"
        return (slot + 1) % SLOTS

    monkeypatch.setattr(Lane, "look", look)
    assert not channel.arrived(request_id)
    assert 0 < len(looks) <= 2 * SLOTS


def test_a_line_without_its_message_is_refused(service: RawService, channel: ShmChannel) -> None:
    for size, said in ((2**64 - 1, "a message of 1"), (1, "got 0 frames")):
        request_id, slot = _submit(channel, service)
        write_line(service.lane, slot, 1, size, of_client=False)
        with pytest.raises(ProtocolError, match=said):
            channel.wait(request_id)
        with pytest.raises(KeyError):
            channel.wait(request_id)


def test_a_reply_is_read_once_and_answers_its_own_request_alone(
    service: RawService, channel: ShmChannel
) -> None:
    request_id, slot = _submit(channel, service)
    service.lane.put(slot, _good(request_id, 5.0))
    assert channel.arrived(request_id)
    start = service.lane._out[slot]
    service.lane._memory[start : start + 2**16] = b"\xff" * 2**16
    response = channel.wait(request_id).response
    assert isinstance(response, TensorReply)
    assert to_torch(response.output)[0].item() == 5.0
    again = channel.submit(REQUEST)
    assert service.request()[0] == slot
    service.lane.put(slot, _good(request_id, 9.0))  # of before
    assert not channel.arrived(again)
    service.lane.put(slot, _good(again, 2.0))
    # The slot was taken for free again: what comes there now is not looked at.
    assert not channel.arrived(again, time.monotonic() + TINY_S)


INIT = [bytes(frame) for frame in encode_request(InitRequest(), 7, 1000)]
TWO = [bytes(range(100)), b"tensor"]


@pytest.fixture
def client(listener: StreamListener, endpoint: str) -> Iterator[RawClient]:
    with RawClient(endpoint) as made:
        yield made


def _others_go_on(listener: StreamListener, endpoint: str) -> None:
    with RawClient(endpoint) as other:
        other.put(0, INIT)
        assert open_request(take(listener).frames, 1000).request_id == 7


SEGMENT = Areas(1, PAGE, PAGE)


@pytest.mark.parametrize(
    ("made", "count", "said"),
    [
        (lambda: memfd(SEGMENT), 0, ATTACH),
        (lambda: memfd(SEGMENT), 2, ATTACH),
        (lambda: memfd(SEGMENT), 1, b"\xff"),
        (lambda: memfd(SEGMENT), 1, message(INIT)),
        (lambda: memfd(SEGMENT, seals=0), 1, ATTACH),
        (lambda: memfd(SEGMENT, head=bytes(32)), 1, ATTACH),
        (lambda: os.open("/dev/null", os.O_RDWR), 1, ATTACH),
    ],
)
def test_what_hands_over_no_segment_is_refused(
    listener: StreamListener, endpoint: str, made: Callable[[], int], count: int, said: bytes
) -> None:
    file = made()
    before = len(os.listdir("/proc/self/fd"))
    with attach(endpoint, [file] * count, said) as raw:
        assert is_dropped(listener, raw)
    # Files that were handed over are closed.
    assert len(os.listdir("/proc/self/fd")) == before
    os.close(file)
    _others_go_on(listener, endpoint)


def test_a_header_that_changes_after_it_was_taken_changes_nothing(
    listener: StreamListener, client: RawClient
) -> None:
    client.put(0, TWO)
    incoming = take(listener)
    start = client.lane._out[0]
    client.lane._memory[start : start + 300] = b"\xff" * 300
    assert bytes(incoming.frames[0]) == TWO[0]
    assert len(incoming.frames[1]) == len(TWO[1])  # its bytes are the client's own business


def test_a_reply_that_does_not_fit_gives_the_slot_back_and_goes_over_the_socket(
    listener: StreamListener, client: RawClient
) -> None:
    client.put(2, INIT)
    incoming = take(listener)
    large = [bytes(10 * PAGE)]
    assert listener.send(incoming.route, large)
    assert client.lane.look() == 2
    assert len(client.lane.view(2)) == 0
    assert client.socket.recv(2**20) == message(large)
    client.put(2, INIT)
    assert take(listener).route == incoming.route


def test_a_client_that_has_gone_gets_no_reply_and_its_requests_are_dropped(
    listener: StreamListener, endpoint: str
) -> None:
    """Its successor has the same slots, and its own name."""
    with RawClient(endpoint) as gone:
        gone.put(0, TWO)
        gone.put(1, INIT)
        incoming = take(listener)
    assert not listener.wait(timeout_ms=100)
    assert listener.receive() is None
    assert not listener._sharing
    with RawClient(endpoint) as successor:
        successor.put(0, INIT)
        assert take(listener).route != incoming.route
        assert not listener.send(incoming.route, REFUSED)
        assert successor.lane.look() == -1
    assert bytes(incoming.frames[1]) == TWO[1]  # as long as it is viewed


def test_a_request_before_the_last_reply_drops_the_client(
    listener: StreamListener, client: RawClient, endpoint: str
) -> None:
    client.put(3, INIT)
    take(listener)
    client.put(3, INIT)
    assert is_dropped(listener, client.socket)
    # It would wake the service up now, and so finds its connection closed.
    assert client.lane.put(0, INIT)
    _others_go_on(listener, endpoint)


def test_a_client_that_writes_over_flags_and_numbers_hurts_itself_alone(
    listener: StreamListener, client: RawClient, endpoint: str
) -> None:
    for value in (b"\1", b"\0", b"\xff"):
        client.lane._memory[64:192] = value * 128
        listener.wait(timeout_ms=10)
        with ShmChannel(endpoint) as other:
            request_id = other.submit(InitRequest())
            assert open_request(take(listener).frames, 1000).request_id == request_id
    for number in range(1, 20):
        for slot in range(client.lane.slots):
            write_line(client.lane, slot, number, 100, of_client=True)
        client.wake_up()
        listener.wait(timeout_ms=1)
    assert listener.clients_refused == 1
    _others_go_on(listener, endpoint)


# The memory of a device, where it differs.
SIZE = 2**20


@pytest.fixture
def memory(tmp_path: Path) -> Path:
    path = tmp_path / "memory"
    path.write_bytes(bytes(SIZE))
    return path


def _call(channel: IvshmemChannel, listener: StreamListener, value: float = 1.0) -> bool:
    """Have a request answered; say whether it came in a slot."""
    request_id = channel.submit(REQUEST)
    incoming = take(listener)
    assert open_request(incoming.frames, 2**20).request_id == request_id
    assert listener.send(incoming.route, tensor_reply(request_id, torch.full((1,), value)))
    response = channel.wait(request_id).response
    assert isinstance(response, TensorReply)
    assert to_torch(response.output).item() == value
    return incoming.slot is not None


@each_row("size", [SMALLEST, SMALLEST + PAGE, SIZE - 1, SIZE + 17 * PAGE, LARGEST, 2**33])
def test_areas_fill_what_there_is_and_no_more(size: int) -> None:
    areas = areas_for(2**40, 2**40, size)
    assert areas.slots == SLOTS
    assert areas.request_bytes == areas.reply_bytes <= MAX_AREA_BYTES
    assert areas.request_bytes % PAGE == 0 < areas.request_bytes
    assert areas.total <= size
    assert size - areas.total < 2 * SLOTS * PAGE or size > LARGEST


def test_slots_are_used_once_the_service_has_them(
    listener: StreamListener, endpoint: str, memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[int] = []
    monkeypatch.setattr(ivshmem.os, "urandom", lambda size: drawn.append(size) or b"1234")
    with IvshmemChannel(endpoint, timeout_s=20) as channel:
        ids = [channel.submit(REQUEST) for _ in range(2)]
        for request_id in ids:
            incoming = take(listener)
            assert incoming.slot is None
            listener.send(incoming.route, tensor_reply(request_id, torch.ones(1)))
        for request_id in ids:
            channel.wait(request_id)
        assert all(_call(channel, listener) for _ in range(2 * SLOTS))
        head = memory.read_bytes()[:44]
    magic, slots, session, *sizes = struct.unpack_from("<8sI4sQQ", head)
    # Every session has a number of chance: what an earlier client has left there says nothing.
    assert (magic, session, head[40:], drawn) == (b"TSQPshm1", b"1234", b"1234", [4])
    assert Areas(slots, *sizes) == areas_for(2**30, 2**30, SIZE)


def test_a_second_client_does_not_touch_the_memory_of_the_first(
    listener: StreamListener, endpoint: str, memory: Path
) -> None:
    with IvshmemChannel(endpoint, timeout_s=20) as first:
        assert [_call(first, listener) for _ in range(2)] == [False, True]
        had = memory.read_bytes()[:40]
        with (
            IvshmemChannel(endpoint, timeout_s=3600) as second,
            pytest.raises(EndpointError, match=f"{memory}: got another client, expected one at a"),
        ):
            second.submit(REQUEST)
        assert memory.read_bytes()[:40] == had
        assert _call(first, listener)
        kept = first._lane  # as an error may keep the segment, by its frames
    with IvshmemChannel(endpoint, timeout_s=20) as successor:
        assert [_call(successor, listener) for _ in range(2)] == [False, True]
    assert kept is not None


def test_a_head_that_changes_while_connected_changes_nothing(
    listener: StreamListener, endpoint: str, memory: Path
) -> None:
    """Each end goes by the sizes that it knew from the start."""
    with IvshmemChannel(endpoint, timeout_s=20) as channel, memory.open("r+b") as file:
        _call(channel, listener)
        for head in (struct.pack("<8sI4sQQ", b"TSQPshm1", 8, b"", 2**40, 2**40), b"\xff" * 40):
            file.seek(0)
            file.write(head)
            file.flush()
            assert all(_call(channel, listener) for _ in range(SLOTS))
            assert channel._lane is not None
            assert channel._lane._incoming == areas_for(2**30, 2**30, SIZE).reply_bytes
        request_id = channel.submit(REQUEST)
        file.seek(192 + 64 * (SLOTS + take(listener).route[1][0]))
        file.write(struct.pack("<IxxxxQ", 77, SIZE))
        file.flush()
        with pytest.raises(ProtocolError, match=f"got a message of {SIZE} bytes"):
            channel.wait(request_id)


SESSION = b"0123"


def _lay_out(memory: Path, areas: Areas, magic: bytes = b"TSQPshm1") -> None:
    with memory.open("r+b") as file:
        file.write(struct.pack("<8sI4sQQ", magic, areas.slots, SESSION, *areas[1:]))


def _attach(endpoint: str, said: bytes = ATTACH + SESSION) -> socket.socket:
    raw = raw_socket(endpoint.rpartition(",")[2])
    raw.sendall(said)
    return raw


def _until_taken(listener: StreamListener, memory: Path) -> None:
    for _ in range(1000):
        assert not listener.wait(timeout_ms=10)
        if memory.read_bytes()[40:44] == SESSION:
            return
    raise AssertionError("no client was let in")


TOO_SMALL = f"got {SMALLEST - 1} bytes, expected {SMALLEST} or more"


@each_row(
    ("content", "to_client", "to_service"),
    [
        (
            "none",
            "got No such file or directory, expected a file to map",
            "got No such file or dir",
        ),
        ("folder", "got Is a directory", "got Is a directory"),
        ("pipe", "", "got no regular file, expected one"),
        (b"", "got 0 bytes", "got 0 bytes"),
        (bytes(SMALLEST - 1), TOO_SMALL, TOO_SMALL),
        (bytes(SMALLEST), "", "got a file that all users may write, expected mode 0660"),
        (b"#!/bin/sh\n" + bytes(SIZE), "got something else in it, expected zeros", ""),
        (b"TSQPshm2" + bytes(SIZE), "got something else in it", ""),
    ],
)
def test_another_file_is_refused_and_left_alone(
    tmp_path: Path, content: str | bytes, to_client: str, to_service: str
) -> None:
    folder = Path(mkdtemp(dir=tmp_path))
    memory, socket_path = folder / "other", folder / "s"
    if content == "folder":
        memory.mkdir()
    elif content == "pipe":
        os.mkfifo(memory)
    elif isinstance(content, bytes):
        memory.write_bytes(content)
        memory.chmod(0o600 if to_client else 0o602)
    if to_service:
        before = len(os.listdir("/proc/self/fd"))
        with pytest.raises(EndpointError, match=f"^{memory}: {to_service}"):
            StreamListener(f"ivshmem://{memory},{socket_path}")
        assert len(os.listdir("/proc/self/fd")) == before
        assert not socket_path.exists()
    if to_client:
        with (
            closing(StreamListener(f"unix://{socket_path}")),
            IvshmemChannel(f"ivshmem://{memory},{socket_path}", timeout_s=3600) as channel,
            pytest.raises(EndpointError, match=f"^{memory}: {to_client}"),
        ):
            channel.submit(REQUEST)
    assert isinstance(content, str) or memory.read_bytes() == content


def test_the_room_is_taken_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system that is full says so when the service starts, and not in its midst."""
    path = tmp_path / "memory"
    path.touch()
    os.truncate(path, SIZE)
    DeviceMemory(str(path))
    assert path.stat().st_blocks * 512 >= SIZE

    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", Mock(side_effect=OSError(28, "no room")))
        with pytest.raises(EndpointError, match="got No space left on device"):
            DeviceMemory(str(path))


WITHIN = Areas(1, PAGE, 254 * PAGE)
HEAD = "got another head"


@each_row(
    ("areas", "said", "refused"),
    [
        (Areas(1, PAGE, PAGE), ATTACH + SESSION, None),
        (Areas(SLOTS, PAGE, 2 * PAGE), ATTACH + SESSION, None),
        (WITHIN, ATTACH + SESSION, None),
        (Areas(1, PAGE, 255 * PAGE), ATTACH + SESSION, HEAD),
        (Areas(0, PAGE, PAGE), ATTACH + SESSION, HEAD),
        # Sizes that add up modulo a word.
        (Areas(2, 2**64 - PAGE, 2 * PAGE), ATTACH + SESSION, HEAD),
        # The segment of another client, as where it maps another file than the service does.
        (WITHIN, ATTACH + b"4567", HEAD),
        *(
            (WITHIN, said, rf"got {len(said)} other bytes first, expected 0xffffffff, and 4")
            for said in (ATTACH, ATTACH + b"012", b"\1\0\0\0" + SESSION, b"\xff\xff")
        ),
    ],
)
def test_only_a_segment_of_this_client_within_the_memory_is_taken(
    memory: Path, areas: Areas, said: bytes, refused: str | None
) -> None:
    memory.write_bytes(bytes(SIZE))
    assert WITHIN.total == SIZE
    for magic in (b"TSQPshm2", b"TSQPshm1"):
        _lay_out(memory, areas, magic)
        expected = HEAD if magic != b"TSQPshm1" and refused is None else refused
        ours, theirs = socket.socketpair()
        with ours, theirs:
            theirs.send(said)
            if expected is None:
                # A reply to an earlier client is none to this one.
                replied = 192 + 64 * areas.slots
                with memory.open("r+b") as file:
                    file.seek(replied)
                    file.write(b"\1")
                lane = DeviceMemory(str(memory)).attach(ours, in_use=False)
                assert (lane.slots, lane._incoming, lane._room) == areas
                content = memory.read_bytes()
                assert (content[40:44], content[replied]) == (SESSION, 0)
                continue
            with pytest.raises(ProtocolError, match=f"shared memory: {expected}") as info:
                DeviceMemory(str(memory)).attach(ours, in_use=False)
        assert info.value.code is ErrorCode.MALFORMED_MESSAGE
        assert memory.read_bytes()[40:44] == bytes(4)


def test_a_second_client_is_refused_as_long_as_the_first_is_there(
    listener: StreamListener, endpoint: str, memory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """One that does not heed the lock, as in another machine."""
    _lay_out(memory, Areas(1, PAGE, PAGE))
    with _attach(endpoint) as first:
        _until_taken(listener, memory)
        with _attach(endpoint) as second:
            assert is_dropped(listener, second)
        (record,) = caplog.records
        assert "got a second client, expected one" in vars(record)["fields"]["detail"]
        first.setblocking(False)
        with pytest.raises(BlockingIOError):
            first.recv(1)


def test_a_client_that_has_gone_with_requests_unread_keeps_no_other_out(
    listener: StreamListener, endpoint: str, memory: Path
) -> None:
    _lay_out(memory, Areas(1, PAGE, PAGE))
    with _attach(endpoint) as gone:
        gone.sendall(message(INIT) * 70)
        assert listener.wait(timeout_ms=10_000)  # more than it reads before they were taken
    had = set(listener._sharing)
    with IvshmemChannel(endpoint, timeout_s=20) as channel:
        channel.submit(InitRequest())
        # Without taking a request, until another shares.
        for _ in range(1000):
            listener.wait(timeout_ms=10)
            if set(listener._sharing) != had or listener.clients_refused:
                break
        assert len(listener._sharing) == 1
    assert listener.clients_refused == 0


def test_a_virtual_machine_that_writes_over_all_is_dropped_and_comes_back(
    listener: StreamListener, endpoint: str, memory: Path
) -> None:
    _lay_out(memory, Areas(SLOTS, PAGE, PAGE))
    with _attach(endpoint) as raw:
        _until_taken(listener, memory)
        with memory.open("r+b") as file:
            file.write(b"\xff" * SIZE)
        raw.send(bytes(4))
        assert is_dropped(listener, raw)
    memory.write_bytes(bytes(SIZE))
    with IvshmemChannel(endpoint, timeout_s=20) as channel:
        assert not _call(channel, listener)
