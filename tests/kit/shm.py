"""Peers of shared memory: what they hand over, and write where."""

import fcntl
import os
import socket
import struct
from collections.abc import Sequence
from contextlib import ExitStack, suppress

from gpu_side.encoding import open_request
from gpu_side.transport.stream_client import adopt
from protocol.shared_memory import ATTACH, Areas, Lane, create
from protocol.stream_wire import frames_in, to_pieces
from protocol.tensors import Buffer
from tests.kit.wire import raw_socket

PAGE = os.sysconf("SC_PAGESIZE")


def attach(endpoint: str, files: Sequence[int], said: bytes = ATTACH) -> socket.socket:
    """Connect to a service's shared memory with any files."""
    raw = raw_socket(endpoint.replace("shm://", "unix://"))
    socket.send_fds(raw, [said], files)
    return raw


class RawClient(ExitStack):
    """A client's end of a segment, without a channel. Use as a context manager."""

    def __init__(self, endpoint: str, area_bytes: int = 1000) -> None:
        super().__init__()
        self.lane, self.file = create(area_bytes, area_bytes)
        self.callback(os.close, self.file)
        self.socket = self.enter_context(attach(endpoint, [self.file]))

    def put(self, slot: int, frames: Sequence[Buffer]) -> None:
        """Put a request, and wake the service up whether it sleeps or not."""
        assert self.lane.put(slot, frames) is not None
        self.wake_up()

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


class RawService(ExitStack):
    """A service's end of a segment, without a listener. Use as a context manager.

    `lane` and `socket` are there after `accept`.
    """

    lane: Lane
    socket: socket.socket

    def __init__(self, endpoint: str) -> None:
        super().__init__()
        self._listening = self.enter_context(socket.socket(socket.AF_UNIX))
        self._listening.bind(endpoint.removeprefix("shm://"))
        self._listening.listen(8)

    def accept(self) -> None:
        """Let a `ShmChannel` in, which has sent something."""
        self.enter_context(self._listening.accept()[0])
        self.socket = self.enter_context(self._listening.accept()[0])
        said, (file,), _, _ = socket.recv_fds(self.socket, 4, 2)
        self.callback(os.close, file)
        assert said == ATTACH
        self.lane = adopt(file, os.getuid())

    def request(self) -> tuple[int, int]:
        """Return the slot of the next request, which has come, and its id."""
        slot = self.lane.look(10_000_000)
        assert slot >= 0
        frames = frames_in(self.lane.view(slot), "client", max_frames=4, max_message_bytes=2**30)
        return slot, open_request(list(map(bytes, frames)), 2**20).request_id
