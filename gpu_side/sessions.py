"""The sessions of all clients: found by name, bounded in bytes and time, least recently used first.

A client names its own sessions alone: its connection, or with keys its key, is part of the name. A
client that needs room loses its own sessions first, down to its limit, then whichever of all was
used least recently goes. What the running request uses stays. A session that goes waits on disk
where there is a directory for it (`gpu_side.session_cache`), and is lost otherwise.

Writing holds up all clients, so one request has a limited number of bytes written; a session
beyond them is lost, and its client sends the tokens once more. Where there is no room on disk, a
client that has more than half of it loses its own sessions first, then the least recently used of
all go.
"""

import time
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch

from gpu_side.defaults import SESSION_TTL_S
from gpu_side.event_log import log
from gpu_side.session_cache import (
    GROWTH_TOKENS,
    CacheShape,
    Ledger,
    SessionCache,
    SessionName,
    SpilledSession,
    Window,
)
from protocol.errors import ErrorCode, ProtocolError, SettingsError

_MEMINFO = Path("/proc/meminfo")

# What a processor encrypts and writes in about a second.
REQUEST_BYTES = 2**28

# Each has a file descriptor, and so has each connection.
MAX_FILES = 512

NO_SESSION = bytes(16)


class SegmentPart(NamedTuple):
    """`rows` of one session, the first of which has the position `start`.

    `session`, `parent`: 128 bits. `length`: of the sequence once all that is pending has run.
    `rows` 0: the session is to be forgotten.
    """

    session: bytes
    start: int
    rows: int
    length: int
    parent: bytes = NO_SESSION


@dataclass(frozen=True, slots=True)
class SessionSettings:
    """Limits of sessions. `bytes`: of all clients, None: half of the memory that is free now.

    `client_bytes`: of one client, None: half of `bytes`. `ttl_s`: how long after its last use a
    session is kept. `spill`: a directory where sessions that must make room wait, encrypted
    (`gpu_side.session_cache`); None: they are dropped. `spill_bytes`: how much of them, None: as
    `bytes`.
    """

    bytes: int | None = None
    client_bytes: int | None = None
    ttl_s: float = SESSION_TTL_S
    spill: Path | None = None
    spill_bytes: int | None = None

    def check(self) -> None:
        """Raise SettingsError for such as can never be reached, or cannot be used."""
        of_one, most = self.client_bytes or 0, self.bytes
        SettingsError.unless(
            most is None or of_one <= most,
            "--session-client-mib",
            f"{of_one / 2**20:.9g}",
            f"at most {(most or 0) / 2**20:.9g}, which is --sessions-mib",
        )
        SettingsError.unless(
            self.spill is not None or self.spill_bytes is None,
            "--session-spill-mib",
            "no directory",
            "one to fill",
        )
        SettingsError.unless(
            self.spill is None or self.spill.is_dir(),
            f"--session-spill {self.spill}",
            "no directory",
            "one that can be written to",
        )


def free_bytes(device: torch.device | None) -> int:
    """Return how much memory is free on a device, in bytes; None: a null one."""
    if device is None:
        # It keeps as many sessions as fit into so much, and takes no memory for them.
        return 2**36
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    lines = dict(line.split(":", 1) for line in _MEMINFO.read_text().splitlines())
    return int(lines["MemAvailable"].split()[0]) * 1024


class SessionTotals(NamedTuple):
    """How many sessions there are in memory and on disk, and their bytes."""

    sessions: int = 0
    bytes: int = 0
    spilled: int = 0
    spilled_bytes: int = 0


class SessionStore:
    """All sessions of a service. `free`: memory for them at the start, in bytes.

    `clock`: seconds. Time is looked at when a request names a session, and by `expire`.
    """

    def __init__(
        self,
        settings: SessionSettings,
        free: int,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._most = free // 2 if settings.bytes is None else settings.bytes
        self._most_client = min(settings.client_bytes or self._most // 2, self._most)
        self._ttl_s, self._clock = settings.ttl_s, clock
        self._held: dict[SessionName, SessionCache] = {}
        self._ledger = Ledger()
        self._directory, self._most_spilled = settings.spill, settings.spill_bytes or self._most
        self._files: dict[SessionName, SpilledSession] = {}
        self._on_disk = Ledger()
        # Bytes that this request may still have written.
        self._spill_left = REQUEST_BYTES
        # No session ends before.
        self.look_at_s = float("inf")

    @property
    def totals(self) -> SessionTotals:
        """What there is now; from another thread as well."""
        held, on_disk = self._ledger.all.bytes, self._on_disk.all.bytes
        return SessionTotals(len(self._held), held, len(self._files), on_disk)

    @contextmanager
    def running(
        self,
        client: bytes,
        layers: tuple[int, int],
        parts: Sequence[SegmentPart],
        shape: CacheShape,
        window: Window,
    ) -> Iterator[list[SessionCache]]:
        """Yield the caches of the parts that have rows, cut to where they begin, with room.

        Their rows count once the block has ended without an error. Parts without rows are
        forgotten. Raises ProtocolError: UNKNOWN_SESSION where one is not there any more, or not as
        far as is needed, SESSIONS_FULL where all of the client's memory does not hold them.
        """
        self.expire()
        self._spill_left = REQUEST_BYTES
        names = [SessionName(client, part.session, *layers) for part in parts]
        ends = {
            name: part.start + part.rows
            for name, part in zip(names, parts, strict=True)
            if part.rows
        }
        for name in ends:
            self._ledger.use(name)
            if name in self._files:
                # The last of them to go.
                self._on_disk.use(name)
                self._on_disk.rest(name)
        caches: dict[SessionName, SessionCache] = {}
        try:
            for name, part in zip(names, parts, strict=True):
                if not part.rows:
                    self._forget(name)
                elif name not in caches:
                    caches[name] = self._begin(name, part, shape, window, ends)
                    self._grow(name, ends[name])
            yield [caches[name] for name, part in zip(names, parts, strict=True) if part.rows]
            for name, end in ends.items():
                caches[name].length = end
        finally:
            for name in ends:
                self._rest(name)

    def _begin(
        self,
        name: SessionName,
        part: SegmentPart,
        shape: CacheShape,
        window: Window,
        needed: Container[SessionName],
    ) -> SessionCache:
        """Return the cache of a session with `part.start` tokens, perhaps its parent's first.

        `needed`: all of the request.
        """
        found = self._present(name)
        if found is None or not found.has(part.start, window):
            parent = name._replace(session=part.parent)
            if part.start and (part.parent == NO_SESSION or parent == name):
                raise _unknown(part.start)
            self._forget(name)
            found = self._held.setdefault(name, SessionCache(shape))
            if part.start:
                try:
                    # In use from now on.
                    source = self._present(parent)
                    if source is None or not source.has(part.start, window):
                        raise _unknown(part.start)
                    dropped = 0 if part.start <= source.sinks else source.dropped
                    if not self._resize(name, part.start - dropped):
                        # Without its parent there may be room: the client sends all tokens once
                        # more.
                        raise _unknown(part.start)
                    found.take_over(source, part.start)
                finally:
                    if parent not in needed:
                        self._rest(parent)
        found.cut(part.start, window)
        return found

    def _grow(self, name: SessionName, end: int) -> None:
        """Have room for tokens up to `end`. Raises ProtocolError."""
        cache = self._held[name]
        needed = end - cache.dropped
        if needed <= cache.capacity <= 4 * needed + 4 * GROWTH_TOKENS:
            return
        # A quarter more than there was: what is copied stays in proportion to what is added.
        ahead = min(needed, cache.capacity) // 4
        ProtocolError.unless(
            self._resize(name, needed + ahead) or self._resize(name, needed),
            "Segment.parts",
            f"sessions of {needed} tokens and others",
            f"all of a request within {self._most_client} bytes",
            code=ErrorCode.SESSIONS_FULL,
        )

    def _resize(self, name: SessionName, tokens: int) -> bool:
        """Give a session in use room for so many tokens; False where those in use leave none."""
        cache = self._held[name]
        capacity = tokens + -tokens % GROWTH_TOKENS
        if not self._make_room(name.client, capacity * cache.shape.token_bytes - cache.bytes):
            return False
        try:
            cache.resize(capacity)
        finally:
            self._ledger.resize(name, cache.bytes)
        return True

    def _make_room(self, client: bytes, more: int) -> bool:
        """Evict until so many bytes more fit; False, and nothing is evicted, where they cannot."""
        ledger = self._ledger
        account = ledger.of(client)
        if account.bytes - account.resting_bytes + more > self._most_client:
            return False
        while (account := ledger.of(client)).bytes + more > self._most_client:
            self._evict(account.oldest)
        while ledger.all.bytes + more > self._most:
            self._evict(ledger.all.oldest)
        return True

    def _evict(self, name: SessionName) -> None:
        cache = self._held[name]
        self._forget(name)
        self._spill(name, cache)

    def _spill(self, name: SessionName, cache: SessionCache) -> None:
        """Write a session to disk; it is lost where that cannot be."""
        size = cache.stored * cache.shape.token_bytes
        # To make a file takes its time, too: none more than there may be.
        cost = max(size, REQUEST_BYTES // MAX_FILES)
        if self._directory is None or not (cache.tensors and size) or cost > self._spill_left:
            return
        self._spill_left -= cost
        try:
            written = SpilledSession(self._directory, name, cache)
        except (OSError, OverflowError) as error:
            log.warning("not_spilled", detail=type(error).__name__)
            return
        disk, most = self._on_disk, self._most_spilled
        self._files[name] = written
        disk.resize(name, written.bytes)
        disk.rest(name)
        while disk.all.bytes > most or len(self._files) > MAX_FILES:
            # First of a client that has more than half, where there is one.
            large = (
                account
                for account in disk.clients.values()
                if 2 * account.bytes > most or 2 * len(account.resting) > MAX_FILES
            )
            self._forget(next(large, disk.all).oldest)

    def _take_file(self, name: SessionName) -> SpilledSession | None:
        """Return a session from disk, which is the caller's to close; None if it is not there."""
        self._on_disk.remove(name)
        return self._files.pop(name, None)

    def _present(self, name: SessionName) -> SessionCache | None:
        """Return a session's cache for use, from disk where it is there; None where it is lost."""
        if (held := self._held.get(name)) is not None:
            self._ledger.use(name)
            return held
        if (file := self._take_file(name)) is None:
            return None
        cache = self._held[name] = SessionCache(file.shape, file.key)
        found = False
        try:
            if self._resize(name, file.tokens):
                found = file.read_into(cache)
                if not found:
                    log.warning("spill_damaged", bytes=file.bytes)
        finally:
            file.close()
            if not found:
                self._forget(name)
        return cache if found else None

    def _rest(self, name: SessionName) -> None:
        """Let a session wait for its next request; one without memory would count for nothing."""
        if (cache := self._held.get(name)) is None:
            return
        if not cache.capacity:
            self._forget(name)
            return
        cache.used_s = self._clock()
        self._ledger.rest(name)
        self.look_at_s = min(self.look_at_s, cache.used_s + self._ttl_s)

    def _forget(self, name: SessionName) -> None:
        self._held.pop(name, None)
        self._ledger.remove(name)
        if (file := self._take_file(name)) is not None:
            file.close()

    def forget_client(self, client: bytes) -> None:
        """Forget all sessions of a client; not while its request runs."""
        for name in [*self._ledger.of(client).resting, *self._on_disk.of(client).resting]:
            self._forget(name)

    def forget_revoked(self, is_allowed: Callable[[bytes], bool]) -> None:
        """Forget all sessions of clients that are not let in any more; not while a request runs."""
        for client in {name.client for name in (*self._held, *self._files)}:
            if not is_allowed(client):
                self.forget_client(client)

    def expire(self) -> float:
        """Forget what was used too long ago; return in how many seconds to look again.

        It is infinite where there is no session.
        """
        now_s = self._clock()
        if now_s >= self.look_at_s:
            until_s, resting = now_s - self._ttl_s, self._ledger.all.resting
            for name in [name for name, file in self._files.items() if file.used_s <= until_s]:
                self._forget(name)
            while resting and self._held[self._ledger.all.oldest].used_s <= until_s:
                self._forget(self._ledger.all.oldest)
            left = [file.used_s for file in self._files.values()]
            if resting:
                left.append(self._held[self._ledger.all.oldest].used_s)
            self.look_at_s = min(left, default=float("inf")) + self._ttl_s
        return self.look_at_s - now_s


def _unknown(start: int) -> ProtocolError:
    return ProtocolError(
        "Segment.parts",
        got=f"a session that begins behind {start} tokens",
        expected="one that the service has so many of",
        code=ErrorCode.UNKNOWN_SESSION,
    )
