"""Peers of stream sockets: what they write, byte by byte, and how slowly they read."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import torch

from gpu_side.encoding import Form, encode_reply
from gpu_side.transport.listener import Incoming
from gpu_side.transport.stream_listener import StreamListener
from protocol.encoding import encode_request
from protocol.errors import ErrorCode
from protocol.liveness import PROBE
from protocol.messages import InitRequest, TensorReply
from protocol.stream_wire import to_pieces
from protocol.tensors import from_torch

LARGE = 2**20
REFUSED = encode_reply(Form.FRAMED, 1, "Init", ErrorCode.INTERNAL)


def raw_socket(endpoint: str) -> socket.socket:
    """Connect to a Unix socket; no read takes longer than ten seconds."""
    raw = socket.socket(socket.AF_UNIX)
    raw.settimeout(10)
    raw.connect(endpoint.removeprefix("unix://"))
    return raw


@contextmanager
def accepted(listening: socket.socket) -> Iterator[socket.socket]:
    """Let a `StreamChannel` in: its connection for signs of life, which stays silent, and ours."""
    probing, _ = listening.accept()
    with probing:
        assert probing.recv(10) == PROBE
        served, _ = listening.accept()
        with served:
            yield served


def request_bytes(request_id: int = 1) -> bytes:
    """Return an Init request as it is written to a stream."""
    return b"".join(to_pieces(encode_request(InitRequest(), request_id, 1000))[0])


def tensor_reply(request_id: int, value: torch.Tensor) -> list[bytes | bytearray | memoryview]:
    """Return the frames of a reply to LMHead."""
    reply = TensorReply(output=from_torch(value))
    return encode_reply(Form.FRAMED, request_id, "LMHead", reply)


def slow_reader(raw: socket.socket) -> tuple[threading.Thread, bytearray]:
    """Make a thread that reads a little every millisecond, as long as anything comes."""
    received, pace = bytearray(), threading.Event()

    def read() -> None:
        with suppress(OSError):
            while data := raw.recv(36_000):
                received.extend(data)
                pace.wait(0.001)

    return threading.Thread(target=read), received


def request_of(listener: StreamListener, raw: socket.socket) -> tuple[bytes, ...]:
    """Send a request, and return the route of its reply."""
    raw.sendall(request_bytes())
    assert listener.wait(timeout_ms=10_000)
    incoming = listener.receive()
    assert incoming is not None
    return incoming.route


def wait_and_take(listener: StreamListener) -> Incoming | None:
    """Return a message if one comes within a moment."""
    listener.wait(timeout_ms=10)
    return listener.receive()


def look_until_refused(listener: StreamListener, count: int = 1) -> None:
    """Let the listener look until it has turned away so many, and hand out nothing."""
    until = time.monotonic() + 30
    while listener.clients_refused < count:
        assert not listener.wait(timeout_ms=20)
        assert time.monotonic() < until
    assert listener.clients_refused == count


def is_dropped(listener: StreamListener, raw: socket.socket) -> bool:
    """Say whether the listener closes a connection, having turned one away."""
    look_until_refused(listener)
    try:
        return raw.recv(10, socket.MSG_DONTWAIT) == b""
    except ConnectionResetError:  # closed with bytes that it has not read
        return True
