"""Bytes of the sessions in memory, or of those on disk, and which of those at rest goes first.

Each question takes the same time however many sessions there are: one request may name thousands.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

from gpu_side.spill import SessionName


@dataclass(slots=True)
class _Client:
    bytes: int = 0
    resting_bytes: int = 0
    # The least recently used first.
    resting: OrderedDict[SessionName, None] = field(default_factory=OrderedDict)


class Ledger:
    """Sizes of sessions. One is in use by the running request from the beginning, or at rest.

    `bytes`: of all.
    """

    def __init__(self) -> None:
        self.bytes = 0
        self._sizes: dict[SessionName, int] = {}
        self._resting: OrderedDict[SessionName, None] = OrderedDict()
        self._clients: dict[bytes, _Client] = {}

    def of(self, client: bytes) -> int:
        """Return the bytes of a client's sessions."""
        return self._of(client).bytes

    def in_use(self, client: bytes) -> int:
        """Return the bytes of those of them that are in use."""
        known = self._of(client)
        return known.bytes - known.resting_bytes

    def sessions_of(self, client: bytes) -> list[SessionName]:
        """Return the sessions of a client that are at rest."""
        return list(self._of(client).resting)

    def count(self, client: bytes) -> int:
        """Return how many sessions of a client are at rest."""
        return len(self._of(client).resting)

    def oldest(self, client: bytes | None = None) -> SessionName | None:
        """Return the session at rest that was used least recently; `client`: among its own."""
        return next(iter(self._resting if client is None else self._of(client).resting), None)

    def resize(self, name: SessionName, size: int) -> None:
        """Take note of how many bytes a session in use has."""
        more = size - self._sizes.get(name, 0)
        self._sizes[name] = size
        self.bytes += more
        self._clients.setdefault(name.client, _Client()).bytes += more

    def use(self, name: SessionName) -> None:
        """Take a session into use, if it is at rest."""
        if name in self._resting:
            client = self._clients[name.client]
            del self._resting[name], client.resting[name]
            client.resting_bytes -= self._sizes[name]

    def rest(self, name: SessionName) -> None:
        """Put a session that is in use, and has a size, to rest: behind all others."""
        client = self._clients[name.client]
        self._resting[name] = client.resting[name] = None
        client.resting_bytes += self._sizes[name]

    def remove(self, name: SessionName) -> None:
        """Forget a session, if it is known."""
        if name in self._sizes:
            self.use(name)
            self.resize(name, 0)
            del self._sizes[name]
            if not self._clients[name.client].bytes:
                del self._clients[name.client]

    def _of(self, client: bytes) -> _Client:
        return self._clients.get(client) or _Client()
