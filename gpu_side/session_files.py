"""Sessions that wait on disk: which, how many bytes of them, and since when.

Writing holds up all clients, so that one request has so many bytes written at most; what is beyond
them is lost, and its client sends the tokens once more. Where there is no room, a client that has
more than half of it loses its own first, then whichever of all was used least recently goes.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

from gpu_side.session_cache import SessionCache
from gpu_side.session_ledger import Ledger
from gpu_side.spill import MAX_FILES, SessionName, SpilledSession, SpillKey

log = logging.getLogger("gpu_service")

# What a processor encrypts and writes in about a second.
REQUEST_BYTES = 2**28


class SessionFiles:
    """Sessions on disk, by name. `directory`: None keeps none; `most`: bytes of all."""

    def __init__(self, directory: Path | None, most: int) -> None:
        self._directory, self._most = directory, most
        self._files: dict[SessionName, tuple[SpilledSession, float]] = {}
        self._ledger = Ledger()
        # All clients that have more than half, and perhaps others.
        self._large: set[bytes] = set()
        self._left = 0

    @property
    def total_bytes(self) -> int:
        """Of those that are there."""
        return self._ledger.bytes

    def __len__(self) -> int:
        return len(self._files)

    def __iter__(self) -> Iterator[SessionName]:
        return iter(self._files)

    def begin_request(self) -> None:
        """Allow as many bytes to be written as one request may have."""
        self._left = REQUEST_BYTES

    def put(self, name: SessionName, cache: SessionCache, key: SpillKey, used_s: float) -> None:
        """Write a session that was used at `used_s`; it is lost where that cannot be."""
        size = cache.stored * cache.shape.token_bytes
        # To make a file takes its time, too: none more than there may be.
        cost = max(size, REQUEST_BYTES // MAX_FILES)
        if self._directory is None or not (cache.tensors and size) or cost > self._left:
            return
        self._left -= cost
        try:
            written = SpilledSession(self._directory, name, cache, key)
        except (OSError, OverflowError) as error:
            log.warning("not_spilled", extra={"fields": {"detail": type(error).__name__}})
            return
        self._files[name] = written, used_s
        self._ledger.resize(name, written.bytes)
        self._ledger.rest(name)
        self._large.add(name.client)
        while (oldest := self._oldest()) is not None and (
            self.total_bytes > self._most or len(self._files) > MAX_FILES
        ):
            self.forget(oldest)

    def take(self, name: SessionName) -> SpilledSession | None:
        """Return a session that is there, and is the caller's to close; else None."""
        found, _ = self._files.pop(name, (None, 0.0))
        self._ledger.remove(name)
        return found

    def touch(self, name: SessionName) -> None:
        """Let a session, if it is there, be the last to go."""
        if name in self._files:
            self._ledger.use(name)
            self._ledger.rest(name)

    def forget(self, name: SessionName) -> None:
        """Forget a session, if it is there."""
        if (found := self.take(name)) is not None:
            found.close()

    def forget_client(self, client: bytes) -> None:
        """Forget all sessions of a client."""
        for name in self._ledger.sessions_of(client):
            self.forget(name)

    def expire(self, until_s: float) -> None:
        """Forget what was used last at `until_s` or before."""
        for name in [name for name, (_, used_s) in self._files.items() if used_s <= until_s]:
            self.forget(name)

    def oldest_s(self) -> float:
        """Return when the session was used that was used least recently; inf if there is none."""
        return min((used_s for _, used_s in self._files.values()), default=float("inf"))

    def close(self) -> None:
        """Forget all."""
        for name in list(self._files):
            self.forget(name)

    def _oldest(self) -> SessionName | None:
        """Return what goes first: of a client that has more than half, where there is one."""
        self._large = {client for client in self._large if self._is_large(client)}
        return self._ledger.oldest(next(iter(self._large), None))

    def _is_large(self, client: bytes) -> bool:
        ledger = self._ledger
        return 2 * ledger.of(client) > self._most or 2 * ledger.count(client) > MAX_FILES
