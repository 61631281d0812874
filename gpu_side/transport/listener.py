"""The interface of a transport's service end, and the files of Unix sockets.

`gpu_side.service.open_listener` makes a listener. It belongs to one thread, as a channel does
(`protocol.channel`). A service replaces and removes the file of its own socket, and no live one's.
"""

from __future__ import annotations

import errno
import os
import select
import socket
import stat
import time
from abc import abstractmethod
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from math import inf
from typing import NamedTuple, Protocol

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

    def __init__(self, spin_us: float = 0.0) -> None:
        self._spin = AdaptiveSpin(spin_us)

    @abstractmethod
    def _has_come(self, patience_s: float) -> bool:
        """Say whether a message can be received, waiting for one so many seconds (at least 0)."""

    def wait(self, *, wakeup: socket.socket | None = None, timeout_ms: int | None = None) -> bool:
        """See `Listener.wait`. `wakeup` is looked at a few times a second, when nothing arrives.

        To sleep in the call that receives, and not in a poll of both sockets before it, is what a
        fifth of a small round trip went into.
        """
        # Only looking is no wait, and says nothing of how soon messages come.
        if timeout_ms == 0:
            return self._has_come(0.0)
        give_up = time.monotonic() + (inf if timeout_ms is None else timeout_ms / 1000)
        ask = partial(self._spin.wait, self._has_come) if self._spin.is_on else self._has_come
        while (left_s := give_up - time.monotonic()) > 0:
            if ask(min(left_s, _WAKEUP_INTERVAL_S)):
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


def refuse_live_socket(endpoint: Endpoint) -> None:
    """Raise EndpointError where a live service owns the Unix socket, or may own it.

    A file whose service is dead can be replaced; a live one's must not be taken over silently. What
    cannot be connected to, because it is no stream or not ours, is not for that reason dead.
    """
    address = endpoint.socket_path
    if address is None:
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        # A live service whose backlog is full does not answer, and is no less alive.
        probe.setblocking(False)
        try:
            probe.connect(address)
        except BlockingIOError:
            pass
        except OSError as error:
            # No process listens, or there is no file at all.
            if error.errno in (errno.ECONNREFUSED, errno.ENOENT, errno.ENOTDIR):
                return
            raise EndpointError(
                endpoint.text,
                got=f"a socket there that may be in use ({os.strerror(error.errno or 0)})",
                expected="an address to bind",
            ) from None
    raise EndpointError(endpoint.text, got="Address already in use", expected="an address to bind")


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
