"""Frames over plain ZeroMQ, sockets and shared memory, with nothing of ours above: their costs.

An address is an endpoint of ours: `tcp://` and `ipc://` are ZeroMQ (zero-copy receive); `unix://`
and `socket://HOST:PORT` are plain stream sockets; `shm://` has one slot of a segment, with the
socket to wake up by. A stream carries frames one behind the other, and both ends know how long a
message is.
"""

from __future__ import annotations

import gc
import os
import socket
import time
from collections.abc import Callable, Sequence
from typing import TypeAlias, TypeVar

import zmq

from protocol.shared_memory import ATTACH, WAKE_UP, Lane, adopt, create
from protocol.stream_wire import frames_in
from tsqp.lab.measure import tell

TCP_SOCKET = "socket://"
SHARED_MEMORY = "shm://"
_UNIX = ("unix://", SHARED_MEMORY)
R = TypeVar("R")


def serve(address: str, request_bytes: int, reply_sizes: Sequence[int], spin_us: float) -> None:
    """Tell the address, and answer each request of one client until it has gone."""
    reply = [bytes(size) for size in reply_sizes]
    gc.collect()
    gc.freeze()  # as gpu-service does
    end = open_end(address, (request_bytes, sum(reply_sizes)), spin_us, tell)
    while end.receive() is not None:
        end.send(reply)
    end.close()


def open_end(
    address: str,
    sizes: tuple[int, int],
    spin_us: float,
    listening: Callable[[str], None] | None = None,
) -> Raw:
    """Return the client's end, or that of a server, which tells `listening` where it listens.

    `sizes`: of a request and a reply in bytes.
    """
    if not address.startswith((*_UNIX, TCP_SOCKET)):
        return _Zmq(address, spin_us, listening)
    stream, place = _stream_socket(address)
    if listening is None:
        stream.connect(place)
    else:
        with stream as listener:
            listener.bind(place)
            listener.listen(1)
            if address.startswith(TCP_SOCKET):
                address = f"{TCP_SOCKET}127.0.0.1:{listener.getsockname()[1]}"
            listening(address)
            stream, _ = listener.accept()
    if not address.startswith(SHARED_MEMORY):
        return _Stream(stream, sizes[1 if listening is None else 0], spin_us)
    if listening is not None:
        _, (file,), _, _ = socket.recv_fds(stream, len(ATTACH), 1)
        return _Shm(stream, adopt(file, os.getuid()), spin_us)
    lane, file = create(*sizes)
    socket.send_fds(stream, [ATTACH], [file])
    os.close(file)
    return _Shm(stream, lane, spin_us)


class _Zmq:
    """A DEALER socket, whose peer is another. An empty message says that the peer has gone."""

    def __init__(
        self, address: str, spin_us: float, listening: Callable[[str], None] | None
    ) -> None:
        self._spin_us, self._is_client = spin_us, listening is None
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
        if listening is None:
            self._socket.connect(address)
        else:
            self._socket.bind(address)
            listening(self._socket.getsockopt_string(zmq.LAST_ENDPOINT))

    def send(self, frames: Sequence[bytes]) -> None:
        self._socket.send_multipart(frames, copy=False)

    def receive(self) -> Sequence[object] | None:
        def look(flags: int) -> list[zmq.Frame]:
            return self._socket.recv_multipart(flags, copy=False)

        frames = _spinning(look, zmq.NOBLOCK, self._spin_us)
        return frames if len(frames[0]) else None

    def close(self) -> None:
        if self._is_client:
            self._socket.send(b"")
        self._socket.close(linger=1000)


class _Stream:
    def __init__(self, stream: socket.socket, receives: int, spin_us: float) -> None:
        self._socket, self._spin_us = stream, spin_us
        self._buffer = memoryview(bytearray(receives))
        if stream.family == socket.AF_INET:
            stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def send(self, frames: Sequence[bytes]) -> None:
        """Send frames one behind the other, in one system call where they fit."""
        sent = self._socket.sendmsg(frames)
        for frame in frames:
            if sent < len(frame):
                self._socket.sendall(memoryview(frame)[sent:])
            sent = max(0, sent - len(frame))

    def receive(self) -> Sequence[object] | None:
        got = 0

        def look(flags: int) -> int:
            return self._socket.recv_into(self._buffer[got:], 0, flags)

        while got < len(self._buffer):
            count = _spinning(look, socket.MSG_DONTWAIT, self._spin_us)
            if count == 0:
                return None
            got += count
        return [self._buffer]

    def close(self) -> None:
        self._socket.close()


class _Shm:
    """One slot of shared memory, and nothing else."""

    def __init__(self, stream: socket.socket, lane: Lane, spin_us: float) -> None:
        self._socket, self._lane, self._spin_us = stream, lane, int(spin_us)

    def send(self, frames: Sequence[bytes]) -> None:
        if self._lane.put(0, frames):
            self._socket.send(WAKE_UP)

    def receive(self) -> Sequence[object] | None:
        lane = self._lane
        while lane.look(self._spin_us) < 0:
            lane.sleeps(True)
            try:
                if lane.look() >= 0:
                    break
                if not self._socket.recv(1024):
                    return None
            finally:
                lane.sleeps(False)
        return frames_in(lane.view(0), "peer", max_frames=8, max_message_bytes=2**30)

    def close(self) -> None:
        self._socket.close()


def _spinning(look: Callable[[int], R], at_once: int, spin_us: float) -> R:
    """Look for so long with the flag that does not wait, then without it."""
    until_ns = time.perf_counter_ns() + int(spin_us * 1000)
    while spin_us and time.perf_counter_ns() < until_ns:
        try:
            return look(at_once)
        except (zmq.Again, BlockingIOError):
            os.sched_yield()  # as ours does: other threads may need this core
    return look(0)


def _stream_socket(address: str) -> tuple[socket.socket, str | tuple[str, int]]:
    """Return a new socket, and the address that it is to bind or connect to."""
    if address.startswith(_UNIX):
        return socket.socket(socket.AF_UNIX, socket.SOCK_STREAM), address.partition("://")[2]
    host, _, port = address.removeprefix(TCP_SOCKET).rpartition(":")
    return socket.socket(socket.AF_INET, socket.SOCK_STREAM), (host, int(port))


# One end of a transport. `receive` returns None once the peer has gone.
Raw: TypeAlias = _Zmq | _Stream | _Shm
