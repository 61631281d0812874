"""Lets ZeroMQ clients in by their keys, and gives every connection its routing id.

A ROUTER takes as a connection's id what the client says in its handshake. Where the client says
nothing it draws one from a counter, and ends the process where a client has taken that id before.
A reply goes to the id, whichever connection has it by then. So each connection gets an id from the
service, which no other connection ever has, and no client chooses, guesses or learns the id of
another: over CURVE in the ZAP reply, without keys in the client's own READY
(`gpu_side.transport.zmq_doorway`).

`ZapHandler` answers ZeroMQ's authentication requests (ZAP, RFC 27) on a thread. ZeroMQ asks at
inproc://zeromq.zap.01 of the service's context, once in the handshake of every connection. Without
an answer no client gets in: the service's socket has `ZMQ_ZAP_ENFORCE_DOMAIN` set, and a handshake
without an answer ends at its time limit. The answer also names the connection: of two routing ids
ZeroMQ takes the one that it reads last, and it asks us just before it reads the client's own.
"""

from __future__ import annotations

import os
import threading
from contextlib import suppress
from itertools import count
from typing import Any

import zmq
from zmq.utils import z85
from zmq.utils.monitor import parse_monitor_message

from gpu_side.event_log import log
from protocol.zmq_sockets import watch

_SECRET_BYTES = 16

# What logs may say of a connection's id.
NUMBER_BYTES = 8

# The property of a handshake (ZMTP 3, RFC 23) that says the peer's routing id, in any case.
ROUTING_ID = b"Identity"


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


DOMAIN = b"tsqp"

# By its number, as older versions of pyzmq have no name for it.
ZAP_ENFORCE_DOMAIN = 93

_KEY_BYTES = 32


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
        self._allowed = allowed
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
        self._allowed = allowed
        # A copy, made in one step that no other thread can come between.
        revoked = set(self._authenticated) - allowed
        self._authenticated -= revoked
        return bool(revoked)

    def is_allowed(self, key: bytes) -> bool:
        """Say whether a client (`sender_of`) is on the list as it stands. For any thread."""
        return key in self._allowed

    def _serve(self) -> None:
        with (
            self._requests,
            self._failures,
            self._out,
            self._back,
            suppress(zmq.ContextTerminated),
        ):
            self._answer_all()

    def _answer_all(self) -> None:
        poller = zmq.Poller()
        poller.register(self._requests, zmq.POLLIN)
        poller.register(self._failures, zmq.POLLIN)
        try:
            while True:
                ready = {found for found, _ in poller.poll()}
                if self._requests in ready:
                    self._requests.send_multipart(self._answer(self._requests.recv_multipart()))
                if self._failures in ready:
                    self._note_failure(self._failures.recv_multipart())
        except zmq.ContextTerminated:
            raise
        except Exception:
            # The listener ends the service: one that admits no client is of no use, and looks well.
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
            if key in self._allowed:
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
        if len(request) != 7:
            raise ValueError("malformed_request")
        version, _, domain, _, _, mechanism, key = request
        if version != b"1.0" or domain != DOMAIN or len(key) != _KEY_BYTES:
            raise ValueError("malformed_request")
        if mechanism != b"CURVE":
            raise ValueError("no_key")
        return bytes(z85.encode(key))

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
