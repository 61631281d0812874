"""What waits at the service: bounded in number and bytes, and served to its clients in turn.

A client is a connection. The requests of one are taken in the order in which they came; between
clients, each has one turn and goes to the end of the line, so that a client with many requests
delays another's by one of its own. What does not fit is handed back to be refused. Where all
clients together fill the queue, it is the one with the most that loses its newest request: a
newcomer is not shut out by those who flood.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from protocol.channel import Incoming
from protocol.encoding import DEFAULT_MAX_MESSAGE_BYTES
from protocol.pending import frame_bytes

# How many times what one client may have waiting, all of them together may.
ALL_CLIENTS = 4


@dataclass(frozen=True, slots=True)
class QueueLimits:
    """How much may wait: of one client, and (`total_`) of all together."""

    requests: int = 64
    bytes: int = DEFAULT_MAX_MESSAGE_BYTES
    total_requests: int = 1024
    total_bytes: int = ALL_CLIENTS * DEFAULT_MAX_MESSAGE_BYTES


class Refused(NamedTuple):
    """A message that does not wait.

    `limit`: which field of the limits it hit; `requested`: what the message needs of it (requests
    or bytes); `available`: what is left of it.
    """

    incoming: Incoming
    limit: str
    requested: int
    available: int


class _Client:
    """What waits of one client."""

    __slots__ = ("bytes", "messages", "name")

    def __init__(self, name: bytes) -> None:
        self.name = name
        self.messages: deque[tuple[Incoming, int]] = deque()
        self.bytes = 0


class FairQueue:
    """Received messages, by client. Empty means false."""

    def __init__(self, limits: QueueLimits) -> None:
        self.limits = limits
        # Of all clients.
        self.requests = 0
        self.bytes = 0
        # Those with something waiting, and the same in the order of their turns.
        self._clients: dict[bytes, _Client] = {}
        self._turns: deque[_Client] = deque()
        self._served = b""

    def __bool__(self) -> bool:
        return self.requests > 0

    def put(self, incoming: Incoming) -> Sequence[Refused]:
        """Let a message wait; return what does not: this one, or others in its place."""
        limits, size = self.limits, frame_bytes(incoming.frames)
        name = incoming.route[0]
        client = self._clients.get(name)
        count, held = (0, 0) if client is None else (len(client.messages), client.bytes)
        if count >= limits.requests:
            return (Refused(incoming, "requests", 1, 0),)
        if held + size > limits.bytes:
            return (Refused(incoming, "bytes", size, limits.bytes - held),)
        refused: Sequence[Refused] = ()
        if self.requests >= limits.total_requests or self.bytes + size > limits.total_bytes:
            refused = self._make_room(count + 1, held + size, size)
            if (too_much := self._too_much(incoming, size)) is not None:
                return (*refused, too_much)
        if client is None:
            self._clients[name] = client = _Client(name)
            self._turns.append(client)
        client.messages.append((incoming, size))
        client.bytes += size
        self.requests += 1
        self.bytes += size
        return refused

    def take(self) -> Incoming:
        """Return the message whose turn it is. Raises IndexError where nothing waits."""
        turns = self._turns
        if turns[0].name == self._served and len(turns) > 1:
            turns.rotate(-1)
        client = turns.popleft()
        incoming, size = client.messages.popleft()
        client.bytes -= size
        self.requests -= 1
        self.bytes -= size
        if client.messages:
            turns.append(client)
        else:
            del self._clients[client.name]
        self._served = client.name
        return incoming

    def pass_by(self, client: bytes) -> None:
        """Note that a client (the first part of its route) had its turn without waiting."""
        self._served = client

    def drain(self) -> Iterator[Incoming]:
        """Take everything."""
        while self:
            yield self.take()

    def _too_much(self, incoming: Incoming, size: int) -> Refused | None:
        limits = self.limits
        if self.requests >= limits.total_requests:
            return Refused(incoming, "total_requests", 1, 0)
        if self.bytes + size > limits.total_bytes:
            return Refused(incoming, "total_bytes", size, limits.total_bytes - self.bytes)
        return None

    def _make_room(self, count: int, held: int, size: int) -> list[Refused]:
        """Take the newest messages from clients with more than who comes would have.

        `count`, `held`: what that would be; `size`: bytes that must fit. A client's only message
        stays: it would never be served otherwise.
        """
        refused: list[Refused] = []
        while (too_many := self.requests >= self.limits.total_requests) or (
            self.bytes + size > self.limits.total_bytes
        ):
            richest = max(
                (client for client in self._turns if len(client.messages) > 1),
                key=lambda client: len(client.messages) if too_many else client.bytes,
                default=None,
            )
            if richest is None or (
                len(richest.messages) <= count if too_many else richest.bytes <= held
            ):
                break
            incoming, freed = richest.messages.pop()
            richest.bytes -= freed
            self.requests -= 1
            self.bytes -= freed
            limit = "total_requests" if too_many else "total_bytes"
            refused.append(Refused(incoming, limit, 1 if too_many else freed, 0))
        return refused
