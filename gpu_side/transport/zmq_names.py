"""Routing ids that the service gives: no client chooses, guesses or learns the one of any other.

A ROUTER takes as a connection's id what the client says in its handshake. Where the client says
nothing it draws one from a counter, and ends the process where a client has taken that id before.
A reply goes to the id, whichever connection has it by then. So each connection gets an id from us,
which no other connection ever has: over CURVE in the ZAP reply (`gpu_side.transport.zap`), without
keys in the client's own READY (`gpu_side.transport.zmq_doorway`).
"""

from __future__ import annotations

import os
from itertools import count

import zmq

_SECRET_BYTES = 16
# What logs may say of a connection's id.
NUMBER_BYTES = 8
_PROPERTY = b"Identity"
# So many may come while ZeroMQ's thread is busy; the kernel may allow fewer.
_BACKLOG = 1024


class Names:
    """Names of connections: a secret of this listener, and a number that is used once."""

    def __init__(self) -> None:
        # ZeroMQ's own begin with a zero.
        self._secret = b"\x01" + os.urandom(_SECRET_BYTES - 1)
        self._numbers = count(1)

    def draw(self) -> bytes:
        """Return a new name. For any thread."""
        return self._secret + next(self._numbers).to_bytes(NUMBER_BYTES)

    def has_drawn(self, name: bytes) -> bool:
        """Say whether a name is one of ours."""
        return len(name) == _SECRET_BYTES + NUMBER_BYTES and name.startswith(self._secret)


def is_property(name: bytes) -> bool:
    """Say whether a property of a handshake (ZMTP 3, RFC 23) is the peer's routing id."""
    return name.lower() == _PROPERTY.lower()


def as_property(name: bytes) -> bytes:
    """Return the property of a handshake that says a routing id."""
    return bytes([len(_PROPERTY)]) + _PROPERTY + len(name).to_bytes(4) + name


def bind_within_process(zmq_socket: zmq.Socket[bytes]) -> str:
    """Bind a socket for connections from this process alone; return the endpoint.

    An abstract Unix socket: it needs no file, and ZeroMQ asks the kernel for the peer's process.
    """
    endpoint = f"ipc://@tsqp-{os.urandom(16).hex()}"
    zmq_socket.setsockopt(zmq.IPC_FILTER_PID, os.getpid())
    zmq_socket.setsockopt(zmq.BACKLOG, _BACKLOG)
    zmq_socket.bind(endpoint)
    return endpoint
