"""Echo over plain ZeroMQ, sockets and shared memory, with nothing of ours above: their costs.

    python -m tsqp.lab.bench.raw_echo ADDRESS REQUEST_SIZES REPLY_SIZES [--spin-us N]

Serves one client until it is terminated; prints `ready ADDRESS`. An address is an endpoint of ours:
`tcp://` and `ipc://` are ZeroMQ (ROUTER, zero-copy receive); `unix://` and `socket://HOST:PORT`
are plain stream sockets; `shm://` has one slot of a segment, with the socket to wake up by. Sizes
are those of the frames, with commas; a stream carries them one behind the other, and both ends know
how long a message is.
"""

from __future__ import annotations

import argparse
import os
import socket
import time
from collections.abc import Sequence

import zmq

from protocol.shared_memory import ATTACH, WAKE_UP, Lane, adopt, create, frames_in

TCP_SOCKET = "socket://"
UNIX_SOCKET = "unix://"
SHARED_MEMORY = "shm://"
_STREAMS = (TCP_SOCKET, UNIX_SOCKET)


def is_stream(address: str) -> bool:
    """Say whether an address is a plain stream socket's."""
    return address.startswith(_STREAMS)


class ZmqPing:
    """The client's end over ZeroMQ: a DEALER socket."""

    def __init__(self, address: str, frames: Sequence[bytes], *, spin_us: float = 0.0) -> None:
        self._frames = list(frames)
        self._spin_ns = int(spin_us * 1000)
        self._context = zmq.Context()
        self._socket: zmq.Socket[bytes] = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.connect(address)

    def round_trip(self) -> list[memoryview]:
        """Send the frames and return those that come back, viewed in place."""
        self._socket.send_multipart(self._frames, copy=False)
        return [frame.buffer for frame in receive_message(self._socket, self._spin_ns)]

    def close(self) -> None:
        """Close the socket."""
        self._socket.close()
        self._context.term()


class StreamPing:
    """The client's end over a plain socket."""

    def __init__(
        self, address: str, frames: Sequence[bytes], reply_bytes: int, *, spin_us: float = 0.0
    ) -> None:
        self._frames = list(frames)
        self._spin_ns = int(spin_us * 1000)
        self._reply = memoryview(bytearray(reply_bytes))
        self._socket = _stream_socket(address)
        self._socket.connect(_stream_address(address))

    def round_trip(self) -> list[memoryview]:
        """Send the frames and return what comes back, in memory that the next reply overwrites."""
        send_frames(self._socket, self._frames)
        if not receive_exactly(self._socket, self._reply, self._spin_ns):
            raise ConnectionError("the echo server has gone")
        return [self._reply]

    def close(self) -> None:
        """Close the socket."""
        self._socket.close()


class ShmPing:
    """The client's end of shared memory: one slot, and nothing else."""

    def __init__(
        self, address: str, frames: Sequence[bytes], reply_bytes: int, *, spin_us: float = 0.0
    ) -> None:
        self._frames = list(frames)
        self._spin_us = int(spin_us)
        self._socket = _stream_socket(address)
        self._socket.connect(_stream_address(address))
        self._lane, file = create(sum(map(len, frames)), reply_bytes)
        socket.send_fds(self._socket, [ATTACH], [file])
        os.close(file)

    def round_trip(self) -> list[memoryview]:
        """Send the frames and return what comes back, viewed in place."""
        _put(self._lane, self._socket, self._frames)
        if (received := _in_slot(self._lane, self._socket, self._spin_us)) is None:
            raise ConnectionError("the echo server has gone")
        return received

    def close(self) -> None:
        """Close the socket."""
        self._socket.close()


def _put(lane: Lane, stream: socket.socket, frames: Sequence[bytes | memoryview]) -> None:
    if lane.put(0, frames):
        stream.send(WAKE_UP)


def _in_slot(lane: Lane, stream: socket.socket, spin_us: int) -> list[memoryview] | None:
    """Wait for a message, at first without sleeping; None if the peer has gone."""
    while lane.look(spin_us) < 0:
        lane.sleeps(True)
        try:
            if lane.look() >= 0:
                break
            if not stream.recv(1024):
                return None
        finally:
            lane.sleeps(False)
    return frames_in(lane.view(0), "peer", max_frames=8, max_message_bytes=2**30)


def receive_message(zmq_socket: zmq.Socket[bytes], spin_ns: int) -> list[zmq.Frame]:
    """Receive one message, at first without blocking for `spin_ns`."""
    until = time.perf_counter_ns() + spin_ns if spin_ns else 0
    while until and time.perf_counter_ns() < until:
        try:
            return zmq_socket.recv_multipart(zmq.NOBLOCK, copy=False)
        except zmq.Again:
            os.sched_yield()  # as ours does: ZeroMQ's own threads may need this core
    return zmq_socket.recv_multipart(copy=False)


def send_frames(stream: socket.socket, frames: Sequence[bytes | memoryview]) -> None:
    """Send frames one behind the other, in one system call where they fit."""
    sent = stream.sendmsg(frames)
    for frame in frames:
        if sent < len(frame):
            stream.sendall(memoryview(frame)[sent:])
        sent = max(0, sent - len(frame))


def receive_exactly(stream: socket.socket, into: memoryview, spin_ns: int) -> bool:
    """Fill a buffer, at first without blocking for `spin_ns`; False if the peer has gone."""
    got = 0
    until = time.perf_counter_ns() + spin_ns if spin_ns else 0
    while got < len(into):
        spinning = until and time.perf_counter_ns() < until
        try:
            count = stream.recv_into(into[got:], 0, socket.MSG_DONTWAIT if spinning else 0)
        except BlockingIOError:
            os.sched_yield()
            continue
        if count == 0:
            return False
        got += count
    return True


def _stream_socket(address: str) -> socket.socket:
    if address.startswith((UNIX_SOCKET, SHARED_MEMORY)):
        return socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    stream = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return stream


def _stream_address(address: str) -> str | tuple[str, int]:
    if address.startswith((UNIX_SOCKET, SHARED_MEMORY)):
        return address.partition("://")[2]
    host, _, port = address.removeprefix(TCP_SOCKET).rpartition(":")
    return host, int(port)


def _serve_stream(address: str, request_bytes: int, reply_bytes: int, spin_ns: int) -> None:
    with _stream_socket(address) as listening:
        listening.bind(_stream_address(address))
        listening.listen(1)
        if address.startswith(TCP_SOCKET):
            address = f"{TCP_SOCKET}127.0.0.1:{listening.getsockname()[1]}"
        print(f"ready {address}", flush=True)
        stream, _ = listening.accept()
    with stream:
        if address.startswith(TCP_SOCKET):
            stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        buffer = memoryview(bytearray(max(request_bytes, reply_bytes)))
        while receive_exactly(stream, buffer[:request_bytes], spin_ns):
            stream.sendall(buffer[:reply_bytes])


def _serve_shm(address: str, header_bytes: int, spin_us: int) -> None:
    with _stream_socket(address) as listening:
        listening.bind(_stream_address(address))
        listening.listen(1)
        print(f"ready {address}", flush=True)
        stream, _ = listening.accept()
    _, (file,), _, _ = socket.recv_fds(stream, len(ATTACH), 1)
    lane, header = adopt(file, os.getuid()), bytes(header_bytes)
    with stream:
        while (received := _in_slot(lane, stream, spin_us)) is not None:
            _put(lane, stream, [header, *received[1:]])


def _serve_zmq(address: str, header_bytes: int, spin_ns: int) -> None:
    router = zmq.Context().socket(zmq.ROUTER)
    router.bind(address)
    print(f"ready {router.getsockopt_string(zmq.LAST_ENDPOINT)}", flush=True)
    header = bytes(header_bytes)
    while True:
        client, _, *payload = receive_message(router, spin_ns)
        router.send_multipart([client, header, *payload], copy=False)


def main() -> None:
    """Serve."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("address")
    parser.add_argument("request_sizes")
    parser.add_argument("reply_sizes")
    parser.add_argument("--spin-us", type=float, default=0.0)
    options = parser.parse_args()
    request, reply = (
        [int(size) for size in sizes.split(",")]
        for sizes in (options.request_sizes, options.reply_sizes)
    )
    spin_ns = int(options.spin_us * 1000)
    if options.address.startswith(SHARED_MEMORY):
        _serve_shm(options.address, reply[0], int(options.spin_us))
    elif is_stream(options.address):
        _serve_stream(options.address, sum(request), sum(reply), spin_ns)
    else:
        _serve_zmq(options.address, reply[0], spin_ns)


if __name__ == "__main__":
    main()
