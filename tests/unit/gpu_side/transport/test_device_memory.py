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
from protocol import native
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


def _until_another(listener: StreamListener) -> set[bytes]:
    """Let clients in, without taking a request, until others share; return their names."""
    had = set(listener._sharing)
    for _ in range(1000):
        listener.wait(timeout_ms=10)
        if set(listener._sharing) != had or listener.clients_refused:
            break
    return set(listener._sharing)


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
    for path, size in (("empty", 0), ("small", SMALLEST - 1), ("open", SMALLEST)):
        (tmp_path / path).write_bytes(bytes(size))
    (tmp_path / "open").chmod(0o602)
    (tmp_path / "folder").mkdir(exist_ok=True)
    if not (tmp_path / "pipe").exists():
        os.mkfifo(tmp_path / "pipe")
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(EndpointError, match=f"^{tmp_path}/{name}: {said}"):
        StreamListener(f"ivshmem://{tmp_path}/{name},{tmp_path}/s")
    assert len(os.listdir("/proc/self/fd")) == before
    assert not (tmp_path / "s").exists()


def test_the_room_is_taken_at_once(tmp_path: Path) -> None:
    """A file system that is full says so when the service starts, and not in its midst."""
    path = tmp_path / "memory"
    path.touch()
    os.truncate(path, SIZE)
    DeviceMemory(str(path))
    assert path.stat().st_blocks * 512 >= SIZE


def test_a_file_system_without_room_is_said(memory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(file: int, offset: int, size: int) -> None:
        raise OSError(28, "no room")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(EndpointError, match="got No space left on device"):
        DeviceMemory(str(memory))


def test_of_a_large_file_no_more_is_mapped_than_a_segment_fills(tmp_path: Path) -> None:
    asked: list[int] = []
    path = tmp_path / "memory"
    path.touch()
    os.truncate(path, 2**40)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "posix_fallocate", lambda file, offset, size: asked.append(size))
        made = DeviceMemory(str(path))
    assert asked == [len(made._mapped)] == [LARGEST]


def test_without_compiled_kernels_it_is_said(
    endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native, "library", None)
    with pytest.raises(EndpointError, match="got no compiled kernels"):
        StreamListener(endpoint)


# ------------------------------------------------------------------------------- which segment


@each_row("areas", [Areas(1, PAGE, PAGE), Areas(SLOTS, PAGE, 2 * PAGE), Areas(1, PAGE, 254 * PAGE)])
def test_a_segment_within_the_memory_is_taken(memory: Path, areas: Areas) -> None:
    _lay_out(memory, areas)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.send(ATTACH + SESSION)
        lane = DeviceMemory(str(memory)).attach(ours, in_use=False)
    assert (lane.slots, lane._incoming, lane._room) == areas
    assert memory.read_bytes()[40:44] == SESSION


HEADS = {
    "one page too many": Areas(1, PAGE, 255 * PAGE),
    "no slots": Areas(0, PAGE, PAGE),
    "too many slots": Areas(SLOTS + 1, PAGE, PAGE),
    "no request": Areas(2, 0, PAGE),
    "no reply": Areas(2, PAGE, 0),
    "not whole pages": Areas(2, PAGE + 8, PAGE),
    "sizes that add up modulo a word": Areas(2, 2**64 - PAGE, 2 * PAGE),
}


@each_row("name", HEADS)
def test_a_head_that_lies_is_refused(memory: Path, name: str) -> None:
    _lay_out(memory, HEADS[name])
    _is_refused(memory, ATTACH + SESSION, "got another head")


def test_another_magic_is_refused(memory: Path) -> None:
    _lay_out(memory, Areas(1, PAGE, PAGE), b"TSQPshm2")
    _is_refused(memory, ATTACH + SESSION, "got another head")


@each_row("areas", [Areas(1, PAGE, PAGE), Areas(1, PAGE, 254 * PAGE)])
def test_the_segment_of_another_client_is_refused(memory: Path, areas: Areas) -> None:
    """As where the client maps another file than the service does."""
    _lay_out(memory, areas)
    assert memory.stat().st_size == SIZE == Areas(1, PAGE, 254 * PAGE).total
    _is_refused(memory, ATTACH + b"4567", "got another head")


@each_row("said", [ATTACH, ATTACH + b"012", b"\1\0\0\0" + SESSION, b"\xff\xff"])
def test_what_says_no_session_is_refused(memory: Path, said: bytes) -> None:
    _lay_out(memory, Areas(1, PAGE, PAGE))
    _is_refused(memory, said, rf"got {len(said)} other bytes first, expected 0xffffffff, and 4")


def _is_refused(memory: Path, said: bytes, how: str) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.send(said)
        with pytest.raises(ProtocolError, match=f"shared memory: {how}") as info:
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
        assert record.fields == {  # type: ignore[attr-defined]
            "peer": f"{2:016x}",
            "code": "LIMIT_EXCEEDED",
            "detail": "shared memory: got a second client, expected one at a time",
        }
        first.setblocking(False)
        with pytest.raises(BlockingIOError):
            first.recv(1)
    _is_served(listener, endpoint)


def test_a_client_that_has_gone_with_requests_unread_keeps_nobody_out(
    listener: StreamListener, endpoint: str, memory: Path
) -> None:
    _lay_out(memory, Areas(1, PAGE, PAGE))
    request = message(list(encode_request(InitRequest(), 7, 1000)))
    with _attach(endpoint) as gone:
        gone.sendall(request * 70)
        assert listener.wait(timeout_ms=10_000)  # more than it reads before they were taken
    with IvshmemChannel(endpoint, timeout_s=20) as channel:
        channel.submit(InitRequest())
        (successor,) = _until_another(listener)
    assert successor not in (b"", bytes(7) + b"\1")
    assert listener.clients_refused == 0


def test_a_plain_client_is_refused(listener: StreamListener, endpoint: str) -> None:
    request = message(list(encode_request(InitRequest(), 7, 1000)))
    with _attach(endpoint, request) as raw:
        assert is_dropped(listener, raw)
    _is_served(listener, endpoint)


def test_a_file_that_a_client_hands_over_is_not_used(
    listener: StreamListener, endpoint: str, memory: Path
) -> None:
    _lay_out(memory, Areas(1, PAGE, PAGE))
    before = len(os.listdir("/proc/self/fd"))
    other = os.memfd_create("other")
    os.ftruncate(other, SIZE)
    with raw_socket(endpoint.rpartition(",")[2]) as raw:
        socket.send_fds(raw, [ATTACH + SESSION], [other])
        _until_taken(listener, memory)
        assert os.pread(other, 44, 0) == bytes(44)
        os.close(other)
        assert len(os.listdir("/proc/self/fd")) == before + 2  # both ends of the connection


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
