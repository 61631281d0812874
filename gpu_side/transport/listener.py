"""The interface of a transport's service end; `gpu_side.transport.bind` makes one.

A listener belongs to one thread, as a channel does (`protocol.channel`).
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from protocol.errors import EndpointError
from protocol.shared_memory import SlotMemory
from protocol.tensors import Buffer


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
        ...

    def allow(self, allowed: frozenset[bytes]) -> None:
        """Let in these clients, by their public keys (Z85), and no others from now on.

        From another thread as well. Nothing is taken any more from other clients. Raises
        RuntimeError for a listener without keys.
        """
        ...

    def is_allowed(self, key: bytes) -> bool:
        """Say whether a client (`Incoming.key`) is still let in; without keys every client is."""
        ...

    def wait(self, *, wakeup: socket.socket | None = None, timeout_ms: int | None = None) -> bool:
        """Block until a message can be received; False on time-out or if `wakeup` is readable.

        Raises EndpointError, here and in `receive`, when no client can be let in any more: the
        service is of no use to a new client, and had better end.
        """
        ...

    def receive(self) -> Incoming | None:
        """Return the next message, or None when there is none. Never blocks."""
        ...

    def send(self, route: Sequence[bytes], frames: Sequence[Buffer]) -> bool:
        """Send a reply without waiting for its client; False if that has gone or does not read.

        The frames' memory must not be written to as long as the listener refers to it.
        """
        ...

    def close(self) -> None:
        """Stop listening; replies on their way get half a second."""
        ...


def admits_no_client(endpoint: str) -> EndpointError:
    """Return the error of a listener whose thread that lets clients in has failed."""
    return EndpointError(
        endpoint,
        got="no thread that lets clients in (the log says why)",
        expected="one for as long as the service runs",
    )
