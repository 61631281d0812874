"""Lets ZeroMQ's clients in, and gives every connection its routing id: with keys, and without.

A ROUTER takes as a connection's id what the client says in its handshake. Where the client says
nothing it draws one from a counter, and ends the process where a client has taken that id before.
A reply goes to the id, whichever connection has it by then. So each connection gets an id from the
service, which no other connection ever has, and no client chooses, guesses or learns the id of
another: over CURVE in the ZAP reply (`ZapHandler`), without keys in the client's own READY
(`Doorway`).

`ZapHandler` answers ZeroMQ's authentication requests (ZAP, RFC 27) on a thread. ZeroMQ asks at
inproc://zeromq.zap.01 of the service's context, once in the handshake of every connection. Without
an answer no client gets in: the service's socket has `ZMQ_ZAP_ENFORCE_DOMAIN` set, and a handshake
without an answer ends at its time limit. The answer also names the connection: of two routing ids
ZeroMQ takes the one that it reads last, and it asks us just before it reads the client's own.

Without keys ZeroMQ asks us nothing in a handshake, and the client has the last word on its routing
id. So the clients' connections end at the `Doorway`: each has one of its own to ZeroMQ, and what
comes on one is passed on over the other, from the client with a routing id of ours (`Handshake`).
What a client does not read stays in the kernel and with ZeroMQ, but for one buffer.

A client begins in ZMTP 3 with a greeting of 64 bytes, then a command READY with its properties
(RFC 23), where it may name itself. In versions 1 and 2 it names itself elsewhere: they are refused.
"""

import os
import select
import socket
import threading
import time
from contextlib import ExitStack, suppress
from itertools import count
from typing import Any

import zmq
from zmq.utils import z85
from zmq.utils.monitor import parse_monitor_message

from gpu_side.event_log import log
from gpu_side.transport.listener import (
    CLOSING_S,
    AcceptingThread,
    FileSocket,
    listen_at,
    socket_path,
)
from protocol.endpoint import Endpoint
from protocol.errors import ErrorCode, ProtocolError
from protocol.zmq_channel import watch

_SECRET_BYTES = 16
# What logs may say of a connection's id.
NUMBER_BYTES = 8
# The property of a handshake (ZMTP 3, RFC 23) that says the peer's routing id, in any case.
ROUTING_ID = b"Identity"
DOMAIN = b"tsqp"
# By its number, as older versions of pyzmq have no name for it.
ZAP_ENFORCE_DOMAIN = 93
_KEY_BYTES = 32
_GREETING_BYTES = 64
_READY = b"\x05READY"
# Of READY, whose properties an application may add to.
_READY_BYTES = 8192
# A command, with its size in one byte, or in eight.
_SHORT, _LONG = 4, 6
# What is read at a time, and what a Unix socket may hold: it takes all of the former at once.
_BUFFER_BYTES = 192 * 1024
_HELD_BYTES = 1024 * 1024


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


def as_property(name: bytes) -> bytes:
    """Return the property of a handshake that says a routing id."""
    return bytes([len(ROUTING_ID)]) + ROUTING_ID + len(name).to_bytes(4) + name


def bind_within_process(zmq_socket: zmq.Socket[bytes]) -> str:
    """Bind a socket for connections from this process alone; return the endpoint.

    An abstract Unix socket: it needs no file, and ZeroMQ asks the kernel for the peer's process.
    """
    endpoint = f"ipc://@tsqp-{os.urandom(16).hex()}"
    zmq_socket.setsockopt(zmq.IPC_FILTER_PID, os.getpid())
    # So many may come while ZeroMQ's thread is busy; the kernel may allow fewer.
    zmq_socket.setsockopt(zmq.BACKLOG, 1024)
    zmq_socket.bind(endpoint)
    return endpoint


class ZapHandler:
    """Lets in the clients whose public keys are `allowed`, and logs those that it does not.

    Ready when made, before the service's socket is bound. Its thread ends with the context, which
    waits for it. `context`: with one I/O thread. `allowed`: public keys, Z85. `names`: of
    connections.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        service: zmq.Socket[bytes],
        allowed: frozenset[bytes],
        names: Names,
    ) -> None:
        # As it stands: for any thread.
        self.allowed = allowed
        self._names = names
        # Keys of clients that were let in. Noted before the list is looked at: the code that
        # replaces the list finds here every client that the one before let in.
        self._authenticated: set[bytes] = set()
        # How many connections were turned away.
        self.refused = 0
        # Set when the thread has failed, and lets in no client any more.
        self.failed = False
        self._requests = context.socket(zmq.REP)
        # What ends a handshake before the client's key is looked at.
        failures = zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
        self._failures = watch(context, service, failures)
        # Between these two a message goes through ZeroMQ's I/O thread.
        self._out, self._back = context.socket(zmq.PAIR), context.socket(zmq.PAIR)
        for one in (self._requests, self._out, self._back):
            one.setsockopt(zmq.LINGER, 0)
        self._requests.bind("inproc://zeromq.zap.01")
        self._back.connect(bind_within_process(self._out))
        self.thread = threading.Thread(target=self._serve, name="zap", daemon=True)
        self.thread.start()

    def replace_list(self, allowed: frozenset[bytes]) -> bool:
        """Let in these keys from now on; whether one was let in before that is not among them.

        For any thread.
        """
        self.allowed = allowed
        # A copy, made in one step that no other thread can come between.
        revoked = set(self._authenticated) - allowed
        self._authenticated -= revoked
        return bool(revoked)

    def _serve(self) -> None:
        with (
            self._requests,
            self._failures,
            self._out,
            self._back,
            suppress(zmq.ContextTerminated),
        ):
            poller = zmq.Poller()
            poller.register(self._requests, zmq.POLLIN)
            poller.register(self._failures, zmq.POLLIN)
            try:
                while True:
                    for found, _ in poller.poll():
                        if found is self._failures:
                            self._note_failure(found.recv_multipart())
                        else:
                            found.send_multipart(self._answer(found.recv_multipart()))
            except zmq.ContextTerminated:
                raise
            except Exception:
                # The listener ends the service: one that admits no client is of no use, and looks
                # well.
                self.failed = True
                log.exception("zap_handler_failed", lets_in="nobody")
                self._requests.close()
            # ZeroMQ's own thread would wait until they are read.
            while True:
                self._failures.recv_multipart()

    def _answer(self, request: list[bytes]) -> list[bytes]:
        """Return the reply to one request; it is a refusal unless everything is right."""
        version, request_id = (*request, b"", b"")[:2]
        try:
            key = self._key_of(request)
            self._authenticated.add(key)
            if key in self.allowed:
                self._let_handshake_be_read()
                name = as_property(self._names.draw())
                return [version, request_id, b"200", b"OK", key, name]
            self._authenticated.discard(key)
            self._refuse("unknown_key", key=key.decode("ascii"))
        except ValueError as error:
            self._refuse(str(error))
        return [version, request_id, b"400", b"refused", b"", b""]

    def _let_handshake_be_read(self) -> None:
        """Return once ZeroMQ has read the routing id in the client's own handshake.

        It reads that in the same step in which it asks us, and carries our message after it, on
        the same thread. Without this one in seven clients was quicker than our answer, and kept
        the routing id of its choice.
        """
        self._out.send(b"")
        self._back.recv()

    def _key_of(self, request: list[bytes]) -> bytes:
        """Return the client's key (Z85). Raises ValueError, which says in a word what is wrong."""
        match request:
            case [b"1.0", _, domain, _, _, how, key] if (domain, len(key)) == (DOMAIN, _KEY_BYTES):
                if how != b"CURVE":
                    raise ValueError("no_key")
                return bytes(z85.encode(key))
        raise ValueError("malformed_request")

    def _note_failure(self, event: list[bytes]) -> None:
        found = parse_monitor_message(event)
        if found["event"] == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL:
            wrong = found["value"] == zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH
            self._refuse("no_key" if wrong else "handshake_not_of_this_service")
        elif found["event"] == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL:
            self._refuse("handshake_not_finished")

    def _refuse(self, reason: str, **more: Any) -> None:
        """Count a connection that is refused, and log why."""
        self.refused += 1
        log.warning("connection_refused", reason=reason, **more)


def sender_of(frame: zmq.Frame) -> bytes:
    """Return by which key (Z85) the sender of a message was let in; empty where by none.

    ZeroMQ itself notes it with each message, so that no client can say that it is another.
    """
    try:
        return str(frame.get("User-Id")).encode("ascii")
    except zmq.ZMQError:
        return b""


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
        self._said = b""
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


class _End:
    """One end of a connection, the client's or ZeroMQ's, and what was not sent to it yet.

    `handshake`: of a client's end.
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

    def __init__(self, endpoint: Endpoint, inner: str, names: Names) -> None:
        self._inner = "\0" + inner.partition("@")[2]
        self._names = names
        path = socket_path(endpoint)
        if path is None:
            # Where ZeroMQ would.
            host, port = _address_of(endpoint), endpoint.text.rpartition(":")[2]
            listening = listen_at(host.strip("[]"), port, dualstack_ipv6="[" in host)
            self.endpoint = f"tcp://{host}:{listening.getsockname()[1]}"
        else:
            listening = FileSocket(path)
            self.endpoint = endpoint.text
        listening.setblocking(False)
        # How many clients were turned away, because they do not speak the protocol.
        self.refused = 0
        self._ends: dict[int, _End] = {}
        self._buffer = memoryview(bytearray(_BUFFER_BYTES))
        self._ends_at: float | None = None
        super().__init__(listening, "doorway_failed")

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
        if end.handshake is not None and not end.handshake.done:
            data = memoryview(end.handshake.take(data))
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
