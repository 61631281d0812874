"""Stands before a ZeroMQ socket without keys, and names the connections that it lets in.

Without keys ZeroMQ asks us nothing in a handshake, and the client has the last word on its routing
id. So the clients' connections end here: each has one of its own to ZeroMQ, and what comes on one
is passed on over the other, from the client with a routing id of ours (`Handshake`). What a client
does not read stays in the kernel and with ZeroMQ, but for one buffer.

A client begins in ZMTP 3 with a greeting of 64 bytes, then a command READY with its properties
(RFC 23), where it may name itself. In versions 1 and 2 it names itself elsewhere: they are refused.
"""

from __future__ import annotations

import os
import select
import socket
import time
from contextlib import ExitStack, suppress

import zmq

from gpu_side.event_log import log
from gpu_side.transport.acceptor import AcceptingThread
from gpu_side.transport.listener import CLOSING_S, FileSocket, listen_at
from gpu_side.transport.zap import ROUTING_ID, Names, as_property
from protocol.endpoint import Endpoint
from protocol.errors import ErrorCode, ProtocolError

_GREETING_BYTES = 64

_READY = b"\x05READY"

# Of READY, whose properties an application may add to.
_READY_BYTES = 8192

# A command, with its size in one byte, or in eight.
_SHORT, _LONG = 4, 6


class Handshake:
    """Passes on what a client says first, with a routing id of ours in place of its own."""

    def __init__(self, name: bytes) -> None:
        self._name = name
        self._said = b""
        # How much of the greeting was passed on: the service's own depends on what it has read.
        self._passed = 0
        # Set once the client is named: what follows is passed on as it is.
        self.done = False

    def take(self, data: memoryview) -> bytes:
        """Take what has come, return what may be passed on. Raises ProtocolError."""
        self._said = said = self._said + data
        # Where ZeroMQ looks for the version: other bytes than these are one before 3.
        first, signed, version = said[:1], said[9:10], said[10:11]
        known = first == b"\xff" and signed in (b"", b"\x7f") and version in (b"", b"\3")
        _require(known, "no greeting of ZMTP 3")
        passed = said[self._passed : _GREETING_BYTES]
        self._passed += len(passed)
        kind = said[_GREETING_BYTES : _GREETING_BYTES + 1]
        _require(kind in (b"", bytes([_SHORT]), bytes([_LONG])), "a message before READY")
        size = 8 if kind == bytes([_LONG]) else 1
        begin = _GREETING_BYTES + 1 + size
        if len(said) < begin:
            return passed
        end = begin + int.from_bytes(said[begin - size : begin])
        _require(end - begin <= _READY_BYTES, f"a command of {end - begin} bytes")
        if len(said) < end:
            return passed
        ready = _named(said[begin:end], self._name)
        self.done = True
        return passed + bytes([_LONG]) + len(ready).to_bytes(8) + ready + said[end:]


def _named(ready: bytes, name: bytes) -> bytes:
    """Return READY with another routing id. Raises ProtocolError for what is no READY."""
    _require(ready.startswith(_READY), "a command before READY")
    kept, at = _READY, len(_READY)
    while at < len(ready):
        value = at + 1 + ready[at] + 4
        end = value + int.from_bytes(ready[value - 4 : value])
        _require(max(value, end) <= len(ready), "a property that does not end")
        if ready[at + 1 : value - 4].lower() != ROUTING_ID.lower():
            kept += ready[at:end]
        at = end
    return kept + as_property(name)


def _require(holds: bool, got: str) -> None:
    ProtocolError.unless(
        holds,
        "ZeroMQ's handshake",
        got,
        "that of ZMTP 3",
        code=ErrorCode.MALFORMED_MESSAGE,
    )


# What is read at a time, and what a Unix socket may hold: it takes all of the former at once.
_BUFFER_BYTES = 192 * 1024

_HELD_BYTES = 1024 * 1024


class _End:
    """One end of a connection, the client's or ZeroMQ's, and what was not sent to it yet.

    `handshake`: of a client's end, until it is over.
    """

    __slots__ = ("handshake", "other", "socket", "unsent", "watched")

    def __init__(self, connection: socket.socket, handshake: Handshake | None = None) -> None:
        connection.setblocking(False)
        self.socket = connection
        self.handshake = handshake
        self.other = self
        self.unsent = memoryview(b"")
        self.watched = 0


class Doorway(AcceptingThread):
    """Lets clients in at an endpoint, and passes on to and from `inner`.

    `inner`: where ZeroMQ listens for us (`bind_within_process`). Raises OSError or zmq.ZMQError
    where the endpoint cannot be bound.
    """

    _failure = "doorway_failed"

    def __init__(self, endpoint: Endpoint, inner: str, names: Names) -> None:
        self._inner = "\0" + inner.partition("@")[2]
        self._names = names
        if endpoint.socket_path is None:
            # Where ZeroMQ would.
            host, port = _address_of(endpoint), endpoint.text.rpartition(":")[2]
            listening = listen_at(host.strip("[]"), port, dualstack_ipv6="[" in host)
            self.endpoint = f"tcp://{host}:{listening.getsockname()[1]}"
        else:
            listening = FileSocket(endpoint.socket_path)
            self.endpoint = endpoint.text
        listening.setblocking(False)
        # How many clients were turned away, because they do not speak the protocol.
        self.refused = 0
        self._ends: dict[int, _End] = {}
        self._buffer = memoryview(bytearray(_BUFFER_BYTES))
        self._ends_at: float | None = None
        super().__init__(listening)

    def close(self) -> None:
        """Pass on what ZeroMQ has still sent, for half a second, and end. After `stop`."""
        self._ends_at = time.monotonic() + CLOSING_S
        os.eventfd_write(self._wakeup, 1)
        self._thread.join()
        os.close(self._wakeup)

    # ------------------------------------------------------------------------- on the own thread

    def _attend_all(self) -> None:
        while self._ends or self._ends_at is None:
            left_s = self._left_s() if self._ends_at is None else self._ends_at - time.monotonic()
            if left_s is not None and left_s <= 0:
                break
            for file, events in self._epoll.poll(left_s):
                self._attend(file, events)

    def _ended(self) -> None:
        for end in self._ends.values():
            end.socket.close()
        self._listening.close()
        self._epoll.close()

    def _attend(self, file: int, events: int) -> None:
        if (end := self._ends.get(file)) is not None:
            self._serve(end, events)
        elif file == self._wakeup:
            os.eventfd_read(self._wakeup)
            if self._stopping:
                # Closing takes it out of the epoll set too.
                self._listening.close()
        elif file == self._file:
            self._accept()

    def _let_in(self) -> None:
        with ExitStack() as until_accepted:
            # First: a client for which there is no way on waits to be accepted.
            inner = until_accepted.enter_context(socket.socket(socket.AF_UNIX))
            inner.setblocking(False)
            inner.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _HELD_BYTES)
            inner.connect(self._inner)
            connection = self._accepted()
            until_accepted.pop_all()
        if connection.family != socket.AF_UNIX:
            with suppress(OSError):  # a client that has gone again
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        client, service = _End(connection, Handshake(self._names.draw())), _End(inner)
        client.other, service.other = service, client
        for end in (client, service):
            self._ends[end.socket.fileno()] = end
            self._watch(end)

    def _serve(self, end: _End, events: int) -> None:
        try:
            if end.unsent:
                self._send(end, end.unsent)
            if events & ~select.EPOLLOUT and not end.other.unsent:
                self._pass_on(end)
        except ProtocolError as error:
            self.refused += 1
            log.warning("connection_refused", reason="no_zmtp_3", detail=str(error))
            self._close(end)
        except OSError:
            self._close(end)

    def _pass_on(self, end: _End) -> None:
        try:
            size = end.socket.recv_into(self._buffer)
        except BlockingIOError:
            return
        if not size:
            self._close(end)
            return
        data = self._buffer[:size]
        if end.handshake is not None:
            data = memoryview(end.handshake.take(data))
            if end.handshake.done:
                end.handshake = None
        self._send(end.other, data)

    def _send(self, end: _End, data: memoryview) -> None:
        """Send what the kernel takes; the rest waits, and meanwhile the other end."""
        try:  # `suppress` would be two more calls for each message, in both directions
            sent = end.socket.send(data)
        except BlockingIOError:
            sent = 0
        had, end.unsent = end.unsent, data[sent:]
        if end.unsent and not had:
            # The buffer is the next one's.
            end.unsent = memoryview(bytes(end.unsent))
        if bool(had) != bool(end.unsent):
            self._watch(end)
            self._watch(end.other)

    def _watch(self, end: _End) -> None:
        reading = 0 if end.other.unsent else select.EPOLLIN
        wanted = reading | (select.EPOLLOUT if end.unsent else 0)
        if wanted == end.watched:
            return
        # Of what is in the set the kernel tells that it was closed, wanted or not.
        if not wanted:
            self._epoll.unregister(end.socket)
        elif end.watched:
            self._epoll.modify(end.socket, wanted)
        else:
            self._epoll.register(end.socket, wanted)
        end.watched = wanted

    def _close(self, end: _End) -> None:
        if self._ends.pop(end.socket.fileno(), None) is not None:
            del self._ends[end.other.socket.fileno()]
            end.socket.close()
            end.other.socket.close()
            self.client_closed()


def _address_of(endpoint: Endpoint) -> str:
    """Let ZeroMQ resolve a host, which may be an interface's name, by binding another port.

    Raises zmq.ZMQError.
    """
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    with context, context.socket(zmq.ROUTER) as scratch:
        scratch.setsockopt(zmq.IPV6, "[" in endpoint.text)
        scratch.bind(f"tcp://{endpoint.host}:*")
        bound = scratch.getsockopt_string(zmq.LAST_ENDPOINT)
    return bound.partition("://")[2].rpartition(":")[0]
