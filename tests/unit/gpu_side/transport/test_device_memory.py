"""The service's end of a device's memory: which file it takes, and from whom."""

from __future__ import annotations

import os
import socket
import struct
from pathlib import Path

import pytest

from gpu_side.encoding import open_request
from gpu_side.transport.device_memory import DeviceMemory
from gpu_side.transport.stream_listener import StreamListener
from protocol.encoding import encode_request
from protocol.errors import EndpointError, ErrorCode, ProtocolError
from protocol.ivshmem import IvshmemChannel
from protocol.messages import InitRequest
from protocol.shared_memory import ATTACH, LARGEST, SLOTS, SMALLEST, Areas
from tests.kit.rows import each_row
from tests.kit.shm import PAGE, message
from tests.kit.wire import is_dropped, raw_socket

SIZE = 2**20
SESSION = b"0123"
REQUEST = message(list(encode_request(InitRequest(), 7, 1000)))


@pytest.fixture
def memory(tmp_path: Path) -> Path:
    path = tmp_path / "memory"
    path.write_bytes(bytes(SIZE))
    return path


@pytest.fixture
def endpoint(memory: Path, tmp_path: Path) -> str:
    return f"ivshmem://{memory},{tmp_path}/s"


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


def _is_served(listener: StreamListener, endpoint: str) -> None:
    with IvshmemChannel(endpoint, timeout_s=20) as channel:
        request_id = channel.submit(InitRequest())
        assert listener.wait(timeout_ms=10_000)
        incoming = listener.receive()
        assert incoming is not None
        assert open_request(incoming.frames, 1000).request_id == request_id


# ------------------------------------------------------------------------------- which file


@each_row(
    ("name", "said"),
    [
        ("none", "got No such file or directory, expected the file of a device's memory"),
        ("folder", "got Is a directory"),
        ("pipe", "got no regular file, expected one"),
        ("empty", f"got 0 bytes, expected {SMALLEST} or more"),
        ("small", f"got {SMALLEST - 1} bytes, expected {SMALLEST} or more"),
        ("open", "got a file that all users may write, expected mode 0660"),
    ],
)
def test_another_file_is_refused(tmp_path: Path, name: str, said: str) -> None:
    sizes = {"empty": 0, "small": SMALLEST - 1, "open": SMALLEST}
    path = tmp_path / name
    if name in sizes:
        path.write_bytes(bytes(sizes[name]))
        path.chmod(0o602 if name == "open" else 0o600)
    elif name == "folder":
        path.mkdir()
    elif name == "pipe":
        os.mkfifo(path)
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(EndpointError, match=f"^{path}: {said}"):
        StreamListener(f"ivshmem://{path},{tmp_path}/s")
    assert len(os.listdir("/proc/self/fd")) == before
    assert not (tmp_path / "s").exists()


def test_the_room_is_taken_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system that is full says so when the service starts, and not in its midst."""
    path = tmp_path / "memory"
    path.touch()
    os.truncate(path, SIZE)
    DeviceMemory(str(path))
    assert path.stat().st_blocks * 512 >= SIZE

    def full(file: int, offset: int, size: int) -> None:
        raise OSError(28, "no room")

    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", full)
        with pytest.raises(EndpointError, match="got No space left on device"):
            DeviceMemory(str(path))
    # Of a large file no more is mapped than a segment fills.
    asked: list[int] = []
    os.truncate(path, 2**40)
    monkeypatch.setattr(os, "posix_fallocate", lambda file, offset, size: asked.append(size))
    assert asked == [len(DeviceMemory(str(path))._mapped)] == [LARGEST]


# ------------------------------------------------------------------------------- which segment

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
        (Areas(SLOTS + 1, PAGE, PAGE), ATTACH + SESSION, HEAD),
        (Areas(2, 0, PAGE), ATTACH + SESSION, HEAD),
        (Areas(2, PAGE, 0), ATTACH + SESSION, HEAD),
        (Areas(2, PAGE + 8, PAGE), ATTACH + SESSION, HEAD),
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
                lane = DeviceMemory(str(memory)).attach(ours, in_use=False)
                assert (lane.slots, lane._incoming, lane._room) == areas
                assert memory.read_bytes()[40:44] == SESSION
                continue
            with pytest.raises(ProtocolError, match=f"shared memory: {expected}") as info:
                DeviceMemory(str(memory)).attach(ours, in_use=False)
        assert info.value.code is ErrorCode.MALFORMED_MESSAGE
        assert memory.read_bytes()[40:44] == bytes(4)


# -------------------------------------------------------------------------------- which client


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
    _is_served(listener, endpoint)


def test_a_client_that_has_gone_with_requests_unread_keeps_no_other_out(
    listener: StreamListener, endpoint: str, memory: Path
) -> None:
    _lay_out(memory, Areas(1, PAGE, PAGE))
    with _attach(endpoint) as gone:
        gone.sendall(REQUEST * 70)
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
    _is_served(listener, endpoint)
