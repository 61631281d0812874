"""Peers of shared memory: what they hand over, and write where."""

from __future__ import annotations

import fcntl
import os
import socket
import struct
from collections.abc import Sequence
from contextlib import suppress

from gpu_side.encoding import open_request
from protocol.shared_memory import ATTACH, Areas, Lane, adopt, create, frames_in
from protocol.stream_wire import to_pieces
from protocol.tensors import Buffer
from tests.kit.wire import raw_socket

PAGE = os.sysconf("SC_PAGESIZE")


def attach(endpoint: str, files: Sequence[int], said: bytes = ATTACH) -> socket.socket:
    """Connect to a service's shared memory with any files."""
    raw = raw_socket(endpoint.replace("shm://", "unix://"))
    socket.send_fds(raw, [said], files)
    return raw


class RawClient:
    """A client's end of a segment, without a channel. Use as a context manager."""

    def __init__(self, endpoint: str, area_bytes: int = 1000) -> None:
        self.lane, self.file = create(area_bytes, area_bytes)
        self.socket = attach(endpoint, [self.file])

    def __enter__(self) -> RawClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()
        os.close(self.file)

    def put(self, slot: int, frames: Sequence[Buffer]) -> None:
        """Put a request, and wake the service up whether it sleeps or not."""
        assert self.lane.put(slot, frames) is not None
        self.wake_up()

    def write_line(self, slot: int, number: int, size: int) -> None:
        write_line(self.lane, slot, number, size, of_client=True)

    def wake_up(self) -> None:
        """Let the service look; it may have dropped us by now."""
        with suppress(ConnectionError):
            self.socket.send(bytes(4))


def write_line(lane: Lane, slot: int, number: int, size: int, *, of_client: bool) -> None:
    """Write a line of either end, the size first."""
    line = 192 + 64 * (slot if of_client else lane.slots + slot)
    lane._memory[line + 8 : line + 16] = struct.pack("<Q", size)
    lane._memory[line : line + 4] = struct.pack("<I", number & 0xFFFFFFFF)


def memfd(
    areas: Areas, *, seals: int | None = None, size: int | None = None, head: bytes | None = None
) -> int:
    """Make a segment's file with what is wrong with it. `seals`: None for all."""
    file = os.memfd_create("test", os.MFD_ALLOW_SEALING | os.MFD_CLOEXEC)
    os.ftruncate(file, areas.total if size is None else size)
    os.pwrite(file, struct.pack("<8sIxxxxQQ", b"TSQPshm1", *areas) if head is None else head, 0)
    every = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
    fcntl.fcntl(file, fcntl.F_ADD_SEALS, every if seals is None else seals)
    return file


def message(frames: Sequence[Buffer]) -> bytes:
    """Return a message as it lies in a slot."""
    return b"".join(to_pieces(frames)[0])


class RawService:
    """A service's end of a segment, without a listener: it lets in one client after the other.

    Use as a context manager. `lane`, its `file` and `socket` are there after `accept`.
    """

    lane: Lane
    socket: socket.socket
    file: int = -1

    def __init__(self, endpoint: str) -> None:
        self._listening = socket.socket(socket.AF_UNIX)
        self._listening.bind(endpoint.removeprefix("shm://"))
        self._listening.listen(8)
        self._open = [self._listening]

    def __enter__(self) -> RawService:
        return self

    def __exit__(self, *_: object) -> None:
        for one in self._open:
            one.close()
        if self.file >= 0:
            os.close(self.file)
            self.file = -1

    def accept(self) -> None:
        """Let a `ShmChannel` in, which has sent something."""
        probing, _ = self._listening.accept()
        self.socket, _ = self._listening.accept()
        self._open += [probing, self.socket]
        said, files, _, _ = socket.recv_fds(self.socket, 4, 2)
        assert said == ATTACH
        if self.file >= 0:
            os.close(self.file)
        (self.file,) = files
        self.lane = adopt(self.file, os.getuid())

    def request(self) -> tuple[int, int]:
        """Return the slot of the next request, which has come, and its id."""
        slot = self.lane.look(10_000_000)
        assert slot >= 0
        frames = frames_in(self.lane.view(slot), "client", max_frames=4, max_message_bytes=2**30)
        return slot, open_request(list(map(bytes, frames)), 2**20).request_id

    def write_line(self, slot: int, number: int, size: int) -> None:
        write_line(self.lane, slot, number, size, of_client=False)
