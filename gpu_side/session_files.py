"""Sessions that wait on disk: which, how many bytes of them, and since when.

Writing holds up all clients, so that one request has so many bytes written at most; what is beyond
them is lost, and its client sends the tokens once more.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from pathlib import Path

from gpu_side.session_cache import SessionCache
from gpu_side.spill import MAX_FILES, SessionName, SpilledSession, SpillKey

log = logging.getLogger("gpu_service")

# What a processor encrypts and writes in about a second.
REQUEST_BYTES = 2**28


class SessionFiles:
    """Sessions on disk, by name. `directory`: None keeps none; `most`: bytes of all.

    `bytes`: of those that are there.
    """

    def __init__(self, directory: Path | None, most: int) -> None:
        self._directory, self._most = directory, most
        # The first to go first.
        self._files: OrderedDict[SessionName, tuple[SpilledSession, float]] = OrderedDict()
        self.bytes = 0
        self._left = 0

    def __len__(self) -> int:
        return len(self._files)

    def __contains__(self, name: SessionName) -> bool:
        return name in self._files

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
        self.bytes += written.bytes
        while self.bytes > self._most or len(self._files) > MAX_FILES:
            self.forget(next(iter(self._files)))

    def take(self, name: SessionName) -> SpilledSession | None:
        """Return a session that is there, and is the caller's to close; else None."""
        found, _ = self._files.pop(name, (None, 0.0))
        if found is not None:
            self.bytes -= found.bytes
        return found

    def touch(self, name: SessionName) -> None:
        """Let a session, if it is there, be the last to go."""
        if name in self._files:
            self._files.move_to_end(name)

    def forget(self, name: SessionName) -> None:
        """Forget a session, if it is there."""
        if (found := self.take(name)) is not None:
            found.close()

    def forget_client(self, client: bytes) -> None:
        """Forget all sessions of a client."""
        for name in [name for name in self._files if name.client == client]:
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
