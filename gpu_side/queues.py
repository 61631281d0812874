"""What waits at the service: bounded in number and bytes, and served to its clients in turn.

A client is a connection or, with keys, all connections of one key. The requests of one are taken in
the order in which they came; between clients, each has one turn and goes to the end of the line, so
that a client with many requests delays another's by one of its own. What does not fit is handed
back to be refused. Where all clients together fill the queue, it is the one with the most that
loses its newest request: clients that flood do not shut a newcomer out. No client loses
a request to one that does not fit even then. No client loses its only request, with one exception:
a client that has nothing waiting finds room for its fair share of the bytes, which is all of them
divided by the clients that wait, itself included. For that, richer clients give up even their last.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from typing import NamedTuple

from gpu_side.defaults import ALL_CLIENTS, QUEUED_REQUESTS, QUEUED_TOTAL_REQUESTS
from gpu_side.transport.listener import Incoming
from protocol.encoding import DEFAULT_MAX_MESSAGE_BYTES


@dataclass(frozen=True, slots=True)
class QueueLimits:
    """How much may wait: of one client, and (`total_`) of all together."""

    requests: int = QUEUED_REQUESTS
    bytes: int = DEFAULT_MAX_MESSAGE_BYTES
    total_requests: int = QUEUED_TOTAL_REQUESTS
    total_bytes: int = ALL_CLIENTS * DEFAULT_MAX_MESSAGE_BYTES


class Rejected(NamedTuple):
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

    def put(self, incoming: Incoming) -> Sequence[Rejected]:
        """Let a message wait; return what does not: this one, or others in its place."""
        limits, size = self.limits, sum(map(len, incoming.frames))
        name = incoming.client
        client = self._clients.get(name)
        count, held = (0, 0) if client is None else (len(client.messages), client.bytes)
        if count >= limits.requests:
            return (Rejected(incoming, "requests", 1, 0),)
        if held + size > limits.bytes:
            return (Rejected(incoming, "bytes", size, limits.bytes - held),)
        refused: Sequence[Rejected] = ()
        if self.requests >= limits.total_requests or self.bytes + size > limits.total_bytes:
            victims = self._choose_victims(count + 1, held + size, size)
            if victims is None:
                return (self._too_much(incoming, size),)
            refused = [self._take_newest(*victim) for victim in victims]
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

    def note_served(self, incoming: Incoming) -> None:
        """Note that a message's client had its turn without waiting."""
        self._served = incoming.key or incoming.route[0]

    def drain(self) -> Iterator[Incoming]:
        """Take everything."""
        while self:
            yield self.take()

    def _too_much(self, incoming: Incoming, size: int) -> Rejected:
        limits = self.limits
        if self.requests >= limits.total_requests:
            return Rejected(incoming, "total_requests", 1, 0)
        return Rejected(incoming, "total_bytes", size, limits.total_bytes - self.bytes)

    def _choose_victims(self, count: int, held: int, size: int) -> list[tuple[_Client, str]] | None:
        """Return the clients that must give up their newest message, and for which limit.

        Those with more than the newcomer would have (`count`, `held`), the one with most first. A
        client's only message stays, as it might never be served otherwise, unless the newcomer has
        nothing waiting and needs no more than a fair share of the bytes: as the richest give first,
        it fits before a client within such a share must give. `size`: bytes that must fit. None
        where they do not fit even then, and no client gives up anything.
        """
        limits = self.limits
        victims: list[tuple[_Client, str]] = []
        to_free = self.bytes + size - limits.total_bytes
        is_modest = count == 1 and size <= limits.total_bytes // (len(self._turns) + 1)
        keeps = 0 if is_modest else 1
        # Most bytes first, then in the order of turns: what each has left, and what it gave up.
        richest = [
            (-client.bytes, turn, 0, client)
            for turn, client in enumerate(self._turns)
            if client.bytes > held and len(client.messages) > keeps
        ]
        heapify(richest)
        while to_free > 0:
            if not richest:
                return None
            negative, turn, given, client = heappop(richest)
            freed = client.messages[-1 - given][1]
            victims.append((client, "total_bytes"))
            to_free -= freed
            left, given = -negative - freed, given + 1
            if left > held and len(client.messages) - given > keeps:
                heappush(richest, (-left, turn, given, client))
        # A client that gave up bytes made room in number, too.
        if not victims and self.requests >= limits.total_requests:
            most = max(self._turns, key=lambda client: len(client.messages), default=None)
            if most is None or len(most.messages) <= count:
                return None
            victims.append((most, "total_requests"))
        return victims

    def _take_newest(self, client: _Client, limit: str) -> Rejected:
        incoming, freed = client.messages.pop()
        client.bytes -= freed
        self.requests -= 1
        self.bytes -= freed
        if not client.messages:
            self._turns.remove(client)
            del self._clients[client.name]
        return Rejected(incoming, limit, freed if limit == "total_bytes" else 1, 0)
