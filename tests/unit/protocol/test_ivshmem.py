"""Memory of a VM's device, of which each end maps a file: what either takes for a segment."""

import os
import socket
import struct
from contextlib import closing
from pathlib import Path
from tempfile import mkdtemp
from unittest.mock import Mock

import pytest
import torch

from gpu_side.encoding import encode_reply, open_request
from gpu_side.transport.stream_client import DeviceMemory
from gpu_side.transport.stream_listener import StreamListener
from protocol import shm as ivshmem
from protocol.encoding import encode_request
from protocol.errors import EndpointError, ErrorCode, ProtocolError
from protocol.messages import InitRequest, LMHeadRequest, TensorReply, Timing
from protocol.prepared import PreparedRequest
from protocol.shared_memory import (
    ATTACH,
    LARGEST,
    MAX_AREA_BYTES,
    SLOTS,
    SMALLEST,
    Areas,
    areas_for,
)
from protocol.shm import IvshmemChannel
from protocol.tensors import from_torch, to_torch
from tests.kit.rows import each_row
from tests.kit.shm import PAGE, message
from tests.kit.wire import is_dropped, raw_socket, take, tensor_reply

REQUEST = LMHeadRequest(hidden_states=from_torch(torch.ones(8)))
INIT = message(list(encode_request(InitRequest(), 7, 1000)))
SIZE = 2**20


@pytest.fixture
def memory(tmp_path: Path) -> Path:
    path = tmp_path / "memory"
    path.write_bytes(bytes(SIZE))
    return path


@pytest.fixture
def endpoint(memory: Path, tmp_path: Path) -> str:
    return f"ivshmem://{memory},{tmp_path}/s"


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
            assert channel._lane.incoming == areas_for(2**30, 2**30, SIZE).reply_bytes
        request_id = channel.submit(REQUEST)
        file.seek(192 + 64 * (SLOTS + take(listener).route[1][0]))
        file.write(struct.pack("<IxxxxQ", 77, SIZE))
        file.flush()
        with pytest.raises(ProtocolError, match=f"got {SIZE} bytes"):
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
        patch.setattr(os, "posix_fallocate", Mock(side_effect=OSError(28, os.strerror(28))))
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
                assert (lane.slots, lane.incoming, lane._room) == areas
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
        gone.sendall(INIT * 70)
        assert listener.wait(timeout_ms=10_000)  # more than it reads before they were taken
    had = set(listener._sharing)
    with IvshmemChannel(endpoint, timeout_s=20) as channel:
        channel.submit(InitRequest())
        # Without taking a request, until another shares.
        while set(listener._sharing) == had and not listener.clients_refused:
            listener.wait(timeout_ms=10)
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


def test_replies_that_are_lent_are_copied_when_the_memory_is_left(
    listener: StreamListener, endpoint: str, memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next session lays out the same memory, and its service writes there."""
    monkeypatch.setattr(ivshmem, "_LENT_BYTES", 0)
    prepared = PreparedRequest(REQUEST, (1,), "float32")
    prepared.read_once = True
    with IvshmemChannel(endpoint, timeout_s=20) as channel:
        assert [_call(channel, listener) for _ in range(2)] == [False, True]
        ids = [channel.start(prepared, torch.ones(8)) for _ in range(2)]
        good = TensorReply(output=from_torch(torch.ones(1)))
        timing = Timing(queue_us=1, compute_us=1)
        for request_id in ids:
            reply = encode_reply("framed", request_id, "LMHead", good, timing)
            listener.send(take(listener).route, reply)
        taken = channel.wait(ids[0])
    memory.write_bytes(bytes(SIZE))
    for one in (taken, channel.wait(ids[1])):
        assert (one.lent, one.output) == (True, torch.ones(1))
