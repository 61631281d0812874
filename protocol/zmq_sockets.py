"""What both ends of a ZeroMQ connection have in common: options, messages, and its own events.

Heartbeats: each side asks the other four times in a time-out whether it is there, and ends a
connection on which nothing has come for that long. ZeroMQ's own thread asks and answers, whatever
Python is busy with. What counts is a complete frame: one that takes longer than the time-out to
arrive ends its connection, so over slow links the time-out must be longer than the largest frame
takes.
`ZMQ_HEARTBEAT_TTL` stays 0, which leaves to each side how patient it is.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Sequence
from math import ceil
from typing import Protocol

import zmq

from protocol.endpoint import Endpoint
from protocol.errors import EndpointError
from protocol.tensors import Buffer

# A peer that is stopped accepts connections, which its kernel does, and goes no further.
HANDSHAKE_TIMEOUT_MS = 2000
# How long ZeroMQ waits for TCP to connect before it tries again.
CONNECT_TIMEOUT_MS = 2000
# Per connection and direction; a message can be as large as the message limit. Where as many wait
# ZeroMQ stops reading, heartbeats as well, and the connection ends: so it is more than an honest
# peer has under way (64, one for each micro-batch) while the other side is busy with one of them.
QUEUED_MESSAGES = 128
# Below this ZeroMQ copies the bytes, which is faster than tracking the buffer's lifetime.
COPY_THRESHOLD_BYTES = 64 * 1024

# Where `tcpi_bytes_received` is in `struct tcp_info` (linux/tcp.h, since Linux 4.1).
_RECEIVED_AT = 128

# Plain numbers: an operation on pyzmq's enumerations takes longer than a look at the socket.
_POLLIN = int(zmq.POLLIN)
DONTWAIT = int(zmq.NOBLOCK)
_DONTWAIT_MORE = int(zmq.NOBLOCK | zmq.SNDMORE)


class Tracker(Protocol):
    """What of `zmq.MessageTracker` we need."""

    @property
    def done(self) -> bool:
        """Whether ZeroMQ has let go of the frame: it has been sent, or its peer is gone."""


def set_options(
    zmq_socket: zmq.Socket[bytes],
    endpoint: str,
    *,
    max_message_bytes: int,
    heartbeat_timeout_s: float,
) -> None:
    """Set what holds for both ends. `heartbeat_timeout_s`: 0 is without heartbeats."""
    options = {
        zmq.MAXMSGSIZE: max_message_bytes,
        zmq.RCVHWM: QUEUED_MESSAGES,
        zmq.SNDHWM: QUEUED_MESSAGES,
        zmq.IPV6: "[" in endpoint,
        zmq.HANDSHAKE_IVL: HANDSHAKE_TIMEOUT_MS,
        zmq.CONNECT_TIMEOUT: CONNECT_TIMEOUT_MS,
    }
    if heartbeat_timeout_s > 0:
        timeout_ms = max(2, ceil(heartbeat_timeout_s * 1000))
        options |= {zmq.HEARTBEAT_IVL: max(1, timeout_ms // 4), zmq.HEARTBEAT_TIMEOUT: timeout_ms}
    for option, value in options.items():
        zmq_socket.setsockopt(option, value)


def receive_frames(
    zmq_socket: zmq.Socket[bytes], flags: int = DONTWAIT, *, max_frames: int
) -> tuple[list[memoryview], zmq.Frame]:
    """Receive one multipart message; each frame's memory is viewed, not copied.

    Returns the frames' memory, and the last frame, which knows who sent it. As `recv_multipart`
    does it, which asks the socket after each frame whether another follows. Of a message of more
    than `max_frames` the others are still in the socket, and the last frame's `more` says so: each
    takes a few bytes on the wire, and hundreds here.
    """
    frame = zmq_socket.recv(flags, copy=False)
    frames = [frame.buffer]
    while frame.more and len(frames) < max_frames:
        frame = zmq_socket.recv(flags, copy=False)
        frames.append(frame.buffer)
    return frames, frame


def send_frames(
    zmq_socket: zmq.Socket[bytes],
    frames: Sequence[Buffer],
    large: list[tuple[Tracker, int]] | None = None,
) -> None:
    """Send one multipart message, or raise zmq.Again where the queue is full.

    `large`: gets what tells of each frame that is not copied when ZeroMQ is done with it, and how
    many bytes it is.
    """
    last = len(frames) - 1
    for index, frame in enumerate(frames):
        flags = DONTWAIT if index == last else _DONTWAIT_MORE
        size = frame.nbytes if isinstance(frame, memoryview) else len(frame)
        if size < COPY_THRESHOLD_BYTES:
            zmq_socket.send(frame, flags)
        elif large is None:
            zmq_socket.send(frame, flags, copy=False)
        else:
            large.append((zmq_socket.send(frame, flags, copy=False, track=True), size))


def is_readable(zmq_socket: zmq.Socket[bytes]) -> bool:
    """Ask the socket's own flag: a fifth of what polling takes, or failing to receive."""
    return bool(int(zmq_socket.get(zmq.EVENTS)) & _POLLIN)


def watch(
    context: zmq.Context[zmq.Socket[bytes]], watched: zmq.Socket[bytes], events: int
) -> zmq.Socket[bytes]:
    """Return a socket that tells the events of another one.

    ZeroMQ's own thread writes them, and would wait for ever at a queue that is full: this one has
    no limit.
    """
    address = f"inproc://events-of-{int(watched.getsockopt(zmq.FD))}"
    watched.monitor(address, events)
    events_socket = context.socket(zmq.PAIR)
    events_socket.setsockopt(zmq.RCVHWM, 0)
    events_socket.setsockopt(zmq.LINGER, 0)
    events_socket.connect(address)
    return events_socket


def bytes_received(descriptor: int) -> int | None:
    """Return how many bytes have come over a TCP connection of ZeroMQ's, None where unknown.

    ZeroMQ hands out whole messages only, limits a frame and not their number, and so would gather
    one that never ends until memory does. The kernel counts what it has given to ZeroMQ.
    """
    try:
        duplicate = os.dup(descriptor)
    except OSError:
        return None
    try:
        with socket.socket(fileno=duplicate) as connection:
            info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _RECEIVED_AT + 8)
    except OSError:
        return None
    if len(info) < _RECEIVED_AT + 8:
        return None
    return int.from_bytes(info[_RECEIVED_AT:], sys.byteorder)


def require_zmq(endpoint: Endpoint) -> None:
    """Raise EndpointError for a stream's endpoint."""
    EndpointError.unless(
        endpoint.is_zmq, endpoint.text, "a stream", "tcp://HOST:PORT or ipc://PATH"
    )
