"""The interface of a transport's service end, the files of Unix sockets, and how to let clients in.

`gpu_side.service.open_listener` makes a listener. It belongs to one thread, as a channel does
(`protocol.channel`). A service replaces and removes the file of its own socket, and no live one's.
"""

import errno
import os
import select
import socket
import stat
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from math import inf
from typing import NamedTuple, Protocol

from gpu_side.event_log import log
from protocol.endpoint import Endpoint
from protocol.errors import EndpointError
from protocol.liveness import AdaptiveSpin
from protocol.shared_memory import SlotMemory
from protocol.tensors import Buffer

# Connections that may wait to be accepted; seconds for replies on their way when a listener closes;
# how often a listener that waits looks whether it is to stop.
BACKLOG = 128
CLOSING_S = 0.5
_WAKEUP_INTERVAL_S = 0.1
# How long no client is let in where there are too few file descriptors.
_ACCEPT_AGAIN_S = 1.0
_EXHAUSTED = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS, errno.ENOSPC})


class Incoming(NamedTuple):
    """One received message: where the reply must go, and the frames of the message itself.

    `received_ns` is on the clock of `time.perf_counter_ns`. The first frame's memory is this
    message's own. That of the others is the client's where it shares memory with us: it may change
    at any time until the reply, and is another message's afterwards. `key`: the client's public key
    (Z85), empty without keys. `slot`: that of shared memory it came in, if it did.
    """

    route: tuple[bytes, ...]
    frames: list[memoryview]
    received_ns: int
    key: bytes = b""
    slot: SlotMemory | None = None

    @property
    def client(self) -> bytes:
        """The client: with keys all connections of one key are one client, else each is one."""
        return self.key or self.route[0]

    @property
    def peer(self) -> str:
        """A short name of the client for logs: no more of it than is no secret."""
        return self.route[0][-8:].hex()


class Listener(Protocol):
    """The service's end: hands out the messages of any number of clients, and takes replies."""

    endpoint: str

    @property
    def clients_refused(self) -> int:
        """How many connections were turned away or cut off so far."""

    def allow(self, allowed: frozenset[bytes]) -> None:
        """Let in these clients, by their public keys (Z85), and no others from now on.

        From another thread as well. Nothing is taken any more from other clients. Raises
        RuntimeError for a listener without keys.
        """
        raise RuntimeError("a list of clients for a listener without keys")

    def is_allowed(self, key: bytes) -> bool:
        """Say whether a client (`Incoming.key`) is still let in; without keys every client is."""
        return True

    def wait(self, *, wakeup: socket.socket | None = None, timeout_ms: int | None = None) -> bool:
        """Block until a message can be received; False on time-out or if `wakeup` is readable.

        Raises EndpointError, here and in `receive`, when no client can be let in any more: the
        service is of no use to a new client, and had better end.
        """

    def receive(self) -> Incoming | None:
        """Return the next message, or None when there is none. Never blocks."""

    def send(self, route: Sequence[bytes], frames: Sequence[Buffer]) -> bool:
        """Send a reply without waiting for its client; False if that has gone or does not read.

        The frames' memory must not be written to as long as the listener refers to it.
        """

    def close(self) -> None:
        """Stop listening; replies on their way get half a second."""


class WaitingListener(Listener):
    """A `Listener` that waits for messages alone, and looks for anything else now and then."""

    # Where a transport waits with this, what is to wake it up is in it too: it may sleep for long.
    _waits_with: select.epoll | None = None
    _wakeup: socket.socket | None = None
    _longest_s = _WAKEUP_INTERVAL_S

    def __init__(self, spin_us: float = 0.0) -> None:
        self._spin = AdaptiveSpin(spin_us)

    @abstractmethod
    def _has_come(self, patience_s: float) -> bool:
        """Say whether a message can be received, waiting for one so many seconds (at least 0)."""

    def wait(self, *, wakeup: socket.socket | None = None, timeout_ms: int | None = None) -> bool:
        """See `Listener.wait`. `wakeup` is seen at once over a stream, else a few times a second.

        To sleep in the call that receives, and not in a poll of both sockets before it, is what a
        fifth of a small round trip went into.
        """
        if self._waits_with is not None and wakeup is not None and wakeup is not self._wakeup:
            if self._wakeup is not None and self._wakeup.fileno() >= 0:
                self._waits_with.unregister(self._wakeup)
            self._wakeup = wakeup
            self._waits_with.register(wakeup, select.EPOLLIN)
        # Only looking is no wait, and says nothing of how soon messages come.
        if timeout_ms == 0:
            return self._has_come(0.0)
        give_up = time.monotonic() + (inf if timeout_ms is None else timeout_ms / 1000)
        ask = partial(self._spin.wait, self._has_come) if self._spin.is_on else self._has_come
        while (left_s := give_up - time.monotonic()) > 0:
            if ask(min(left_s, self._longest_s)):
                return True
            if wakeup is not None and select.select([wakeup], [], [], 0)[0]:
                break
        return False


def admits_no_client(endpoint: str) -> EndpointError:
    """Return the error of a listener whose thread that lets clients in has failed."""
    return EndpointError(
        endpoint,
        got="no thread that lets clients in (the log says why)",
        expected="one for as long as the service runs",
    )


def cannot_bind(endpoint: str, number: int | None) -> EndpointError:
    """Return the error of an address that is in use, or not ours to bind. `number`: an errno."""
    # A name that cannot be resolved has a number of another list, below 0.
    got = "an unknown host" if number is not None and number < 0 else os.strerror(number or 0)
    return EndpointError(endpoint, got=got, expected="an address to bind")


def socket_path(endpoint: Endpoint) -> str | None:
    """Return the path of the Unix socket's file; None where there is no file."""
    if endpoint.scheme == "ipc":
        return endpoint.text.partition("://")[2]
    return endpoint.address if isinstance(endpoint.address, str) else None


def refuse_live_socket(endpoint: Endpoint) -> None:
    """Raise EndpointError where a live service owns the Unix socket, or may own it.

    A file whose service is dead can be replaced; a live one's must not be taken over silently. What
    cannot be connected to, because it is no stream or not ours, is not for that reason dead.
    """
    address = socket_path(endpoint)
    if address is None:
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        # A live service whose backlog is full does not answer (EAGAIN), and is no less alive.
        probe.setblocking(False)
        number = probe.connect_ex(address)
    # No process listens, or there is no file at all.
    if number in (errno.ECONNREFUSED, errno.ENOENT, errno.ENOTDIR):
        return
    got = f"a socket there that may be in use ({os.strerror(number)})"
    if number in (0, errno.EAGAIN):
        got = "Address already in use"
    raise EndpointError(endpoint.text, got=got, expected="an address to bind")


class FileSocket(socket.socket):
    """Listens at a path, in place of a dead service's socket. After `refuse_live_socket`.

    What is no socket stays, and cannot be bound. Raises OSError.
    """

    def __init__(self, path: str) -> None:
        with suppress(FileNotFoundError):
            if stat.S_ISSOCK(os.lstat(path).st_mode):
                os.unlink(path)
        bound = socket.create_server(path, family=socket.AF_UNIX, backlog=BACKLOG)
        super().__init__(fileno=bound.detach())
        self._path, self._status = path, os.lstat(path)

    def close(self) -> None:
        """Close it and remove the file, unless that is another's by now."""
        super().close()
        with suppress(OSError):
            if os.path.samestat(os.lstat(self._path), self._status):
                os.unlink(self._path)


def listen_at(host: str, port: str, *, dualstack_ipv6: bool = False) -> socket.socket:
    """Listen on the network; port `*` is any that is free. Raises OSError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server(
        (host, 0 if port == "*" else int(port)),
        family=family,
        backlog=BACKLOG,
        dualstack_ipv6=dualstack_ipv6,
    )


class AcceptingThread(ABC):
    """Accepts connections on a thread of its own, and pauses where descriptors or memory run out.

    It never computes: a client that comes while the loop does must be let in too.

    A subclass calls this constructor last, as the thread then starts. `failed`: an exception, which
    is in the log as `failure`, has ended the thread, and no client is let in any more. No more than
    `max_clients` are let in until one of them has left (`client_closed`).
    """

    def __init__(self, listening: socket.socket, failure: str, *, max_clients: float = inf) -> None:
        self._listening, self._failure = listening, failure
        self._file = listening.fileno()
        self._clients, self._max_clients = 0, max_clients
        # `client_closed` and `pause_accepting` may be called on another thread.
        self._lock = threading.Lock()
        # Whether there is room for another client.
        self.accepting = True
        self._stopping = self.failed = False
        # When to try again to accept (time.monotonic), where that failed; 0: it did not.
        self._accept_again = 0.0
        self._wakeup = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._epoll = select.epoll()
        self._epoll.register(self._file, select.EPOLLIN)
        self._epoll.register(self._wakeup, select.EPOLLIN)
        self._thread = threading.Thread(target=self._run, name=type(self).__name__, daemon=True)
        self._thread.start()

    def client_closed(self) -> None:
        """Take note that a client has left."""
        with self._lock:
            self._clients -= 1
            if not self.accepting:
                self._accept_more(True)

    def pause_accepting(self) -> None:
        """Let no client in for a while, or until another client leaves.

        For want of memory or file descriptors, which another process may hold.
        """
        with self._lock:
            log.warning("no_more_clients", clients=self._clients)
            self._accept_more(False)
            self._accept_again = time.monotonic() + _ACCEPT_AGAIN_S
        os.eventfd_write(self._wakeup, 1)

    def stop(self) -> None:
        """Let no client in any more."""
        self._stopping = True
        os.eventfd_write(self._wakeup, 1)

    # --------------------------------------------------------------------------- on the own thread

    def _run(self) -> None:
        try:
            self._attend_all()
        except Exception:
            self.failed = True
            log.exception(self._failure, lets_in="nobody")
        finally:
            self._ended()

    @abstractmethod
    def _attend_all(self) -> None:
        """Attend to connections until told to stop."""

    @abstractmethod
    def _ended(self) -> None:
        """Close what the thread has to close when it ends, also where it has failed."""

    def _left_s(self) -> float | None:
        """Return how long no client is let in; None where that is not a matter of time."""
        if not self._accept_again:  # a pause that begins now wakes this thread up
            return None
        now = time.monotonic()
        with self._lock:
            if 0 < self._accept_again <= now:
                self._accept_more(self._clients < self._max_clients)
            return self._accept_again - now if self._accept_again else None

    def _accept_more(self, accepting: bool) -> None:
        """Change what the thread waits for, whichever thread this is. With the lock."""
        self._accept_again = 0.0
        self.accepting = accepting
        if not self._stopping:
            self._epoll.modify(self._file, select.EPOLLIN if accepting else 0)

    def _accept(self) -> None:
        """Let a client in, or pause."""
        try:
            self._let_in()
        except OSError as error:
            # Otherwise the client disconnected before accept(): ignore it.
            if error.errno in _EXHAUSTED:
                self.pause_accepting()

    @abstractmethod
    def _let_in(self) -> None:
        """Accept a client (`_accepted`). Raises OSError where there is none."""

    def _accepted(self) -> socket.socket:
        """Accept a connection and count its client. Raises OSError."""
        connection, _ = self._listening.accept()
        with self._lock:
            self._clients += 1
            if self._clients >= self._max_clients:
                self._accept_more(False)
        return connection
