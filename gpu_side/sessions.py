"""The sessions of all clients: found by name, bounded in bytes and time, least recently used first.

A client names its own sessions alone: its connection, or with keys its key, is part of the name. A
client that needs room loses its own sessions first, down to its limit, then whichever of all was
used least recently goes. What the running request uses stays. A session that goes waits on disk
where there is a directory for it (`gpu_side.spill`), and is lost otherwise.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

from gpu_side.segment_parts import NO_SESSION, Part
from gpu_side.session_cache import GROWTH_TOKENS, CacheShape, SessionCache, Window
from gpu_side.session_settings import SessionSettings
from gpu_side.spill import MAX_FILES, SessionName, SpilledSession, SpillKey
from protocol.errors import ErrorCode, ProtocolError

log = logging.getLogger("gpu_service")


class SessionTotals(NamedTuple):
    """How many sessions there are in memory and on disk, and their bytes."""

    sessions: int = 0
    bytes: int = 0
    spilled: int = 0
    spilled_bytes: int = 0


@dataclass(slots=True)
class _Session:
    cache: SessionCache
    used_s: float
    key: SpillKey = field(default_factory=SpillKey)


class Sessions:
    """All sessions of a service. `free`: memory for them at the start, in bytes.

    `clock`: seconds. Time is looked at when a request names a session.
    """

    def __init__(
        self,
        settings: SessionSettings,
        free: int,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._most = free // 2 if settings.bytes is None else settings.bytes
        self._most_client = min(settings.client_bytes or self._most, self._most)
        self._spill = settings.spill
        self._most_spilled = settings.spill_bytes or self._most
        self._ttl_s, self._clock = settings.ttl_s, clock
        # The least recently used first.
        self._held: OrderedDict[SessionName, _Session] = OrderedDict()
        self._spilled: OrderedDict[SessionName, tuple[SpilledSession, float]] = OrderedDict()

    @property
    def totals(self) -> SessionTotals:
        """What there is now; from another thread as well."""
        held, spilled = list(self._held.values()), list(self._spilled.values())
        on_disk = sum(session.bytes for session, _ in spilled)
        in_memory = sum(session.cache.bytes for session in held)
        return SessionTotals(len(held), in_memory, len(spilled), on_disk)

    @contextmanager
    def running(
        self,
        client: bytes,
        layers: tuple[int, int],
        parts: Sequence[Part],
        shape: CacheShape,
        window: Window,
    ) -> Iterator[list[SessionCache]]:
        """Yield the caches of the parts that have rows, cut to where they begin, with room.

        Their rows count once the block has ended without an error. Parts without rows are
        forgotten. Raises ProtocolError: UNKNOWN_SESSION where one is not there any more, or not as
        far as is needed, LIMIT_EXCEEDED where all of the client's memory does not hold them.
        """
        self._expire()
        names = [SessionName(client, part.session, *layers) for part in parts]
        ends = {
            name: part.start + part.rows
            for name, part in zip(names, parts, strict=True)
            if part.rows
        }
        for name in ends:
            self._touch(name)
        caches: dict[SessionName, SessionCache] = {}
        try:
            for name, part in zip(names, parts, strict=True):
                if not part.rows:
                    self._forget(name)
                elif name not in caches:
                    caches[name] = self._begin(name, part, shape, window, set(ends))
                    self._grow(name, ends[name], set(ends))
            yield [caches[name] for name, part in zip(names, parts, strict=True) if part.rows]
        except BaseException:
            # What has not got as far as to take memory would count for nothing, and be kept.
            for name in [name for name in ends if name in self._held]:
                if not self._held[name].cache.capacity:
                    self._forget(name)
            raise
        for name, end in ends.items():
            caches[name].length = end

    def _begin(
        self,
        name: SessionName,
        part: Part,
        shape: CacheShape,
        window: Window,
        pinned: set[SessionName],
    ) -> SessionCache:
        """Return the cache of a session with `part.start` tokens."""
        found = self._present(name, pinned)
        if found is None or not found.has(part.start, window):
            parent = name._replace(session=part.parent)
            if part.start and (part.parent == NO_SESSION or parent == name):
                raise _unknown(part.start)
            self._forget(name)
            found = self._held.setdefault(name, _Session(SessionCache(shape), self._clock())).cache
            if part.start:
                self._fork(parent, name, part.start, window, pinned)
        found.cut(part.start, window)
        return found

    def _fork(
        self,
        parent: SessionName,
        name: SessionName,
        start: int,
        window: Window,
        pinned: set[SessionName],
    ) -> None:
        """Begin a session with the first tokens of its parent."""
        self._touch(parent)
        source = self._present(parent, pinned)
        if source is None or not source.has(start, window):
            raise _unknown(start)
        cache = self._held[name].cache
        kept = start if start <= source.sinks else start - source.dropped
        if not self._resize(cache, name, kept, pinned | {parent}):
            # Without its parent there may be room: the client sends all tokens once more.
            raise _unknown(start)
        cache.take_over(source, start)

    def _grow(self, name: SessionName, end: int, pinned: set[SessionName]) -> None:
        """Have room for tokens up to `end`. Raises ProtocolError."""
        cache = self._held[name].cache
        needed = end - cache.dropped
        if needed <= cache.capacity <= 4 * needed + 4 * GROWTH_TOKENS:
            return
        # A quarter more than there was: what is copied stays in proportion to what is added.
        ahead = min(needed, cache.capacity) // 4
        if not (
            self._resize(cache, name, needed + ahead, pinned)
            or self._resize(cache, name, needed, pinned)
        ):
            raise ProtocolError(
                "Segment.parts",
                got=f"sessions of {needed} tokens and others",
                expected=f"all of a request within {self._most_client} bytes",
                code=ErrorCode.LIMIT_EXCEEDED,
            )

    def _resize(
        self, cache: SessionCache, name: SessionName, tokens: int, pinned: set[SessionName]
    ) -> bool:
        """Give a cache room for so many tokens; False where what is pinned leaves none."""
        capacity = tokens + -tokens % GROWTH_TOKENS
        more = capacity * cache.shape.token_bytes - cache.bytes
        if not self._make_room(name.client, more, pinned):
            return False
        cache.resize(capacity)
        return True

    def _make_room(self, client: bytes, more: int, pinned: set[SessionName]) -> bool:
        """Evict until so many bytes more fit; False, and nothing is evicted, where they cannot."""
        held = self._held
        in_use = sum(held[name].cache.bytes for name in pinned if name in held)
        if in_use + more > self._most_client:
            return False
        for of_all, most in ((False, self._most_client), (True, self._most)):
            theirs = [name for name in held if of_all or name.client == client]
            over = sum(held[name].cache.bytes for name in theirs) + more - most
            for name in theirs:
                if over <= 0:
                    break
                if name not in pinned:
                    over -= held[name].cache.bytes
                    self._evict(name)
        return True

    def _evict(self, name: SessionName) -> None:
        session = self._held.pop(name)
        if self._spill is None or not (session.cache.tensors and session.cache.stored):
            return
        try:
            spilled = SpilledSession(self._spill, name, session.cache, session.key)
        except (OSError, OverflowError) as error:
            log.warning("not_spilled", extra={"fields": {"detail": type(error).__name__}})
            return
        self._spilled[name] = spilled, session.used_s
        total = sum(one.bytes for one, _ in self._spilled.values())
        while total > self._most_spilled or len(self._spilled) > MAX_FILES:
            _, (oldest, _) = self._spilled.popitem(last=False)
            total -= oldest.bytes
            oldest.close()

    def _present(self, name: SessionName, pinned: set[SessionName]) -> SessionCache | None:
        """Return a session's cache, from disk where it is there; None where it is lost."""
        if (session := self._held.get(name)) is not None:
            return session.cache
        if name not in self._spilled:
            return None
        spilled, _ = self._spilled.pop(name)
        cache = SessionCache(spilled.shape)
        try:
            if not self._resize(cache, name, spilled.tokens, pinned):
                return None
            if not spilled.read_into(cache):
                log.warning("spill_damaged", extra={"fields": {"bytes": spilled.bytes}})
                return None
        finally:
            spilled.close()
        self._held[name] = _Session(cache, self._clock(), spilled.key)
        return cache

    def _touch(self, name: SessionName) -> None:
        if (session := self._held.get(name)) is not None:
            session.used_s = self._clock()
            self._held.move_to_end(name)
        elif name in self._spilled:
            self._spilled.move_to_end(name)

    def _forget(self, name: SessionName) -> None:
        self._held.pop(name, None)
        if (spilled := self._spilled.pop(name, None)) is not None:
            spilled[0].close()

    def _expire(self) -> None:
        """Forget what was used too long ago."""
        before_s = self._clock() - self._ttl_s
        old = [name for name, session in self._held.items() if session.used_s < before_s]
        old += [name for name, (_, used_s) in self._spilled.items() if used_s < before_s]
        for name in old:
            self._forget(name)

    def close(self) -> None:
        """Forget all."""
        for name in [*self._held, *self._spilled]:
            self._forget(name)


def _unknown(start: int) -> ProtocolError:
    return ProtocolError(
        "Segment.parts",
        got=f"a session that begins behind {start} tokens",
        expected="one that the service has so many of",
        code=ErrorCode.UNKNOWN_SESSION,
    )
