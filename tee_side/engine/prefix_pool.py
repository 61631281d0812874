"""Keys and values of sequences that have ended, for a later prompt that begins as they did.

Reuse shows in the time to the first token: whoever shares an entry can test what others have said.
So entries are of one owner and salt, and never found by another.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from tee_side.model.batch import KVCache

# Fewer are computed in one step anyway.
MIN_TOKENS = 16
# Of caches that services keep, memory here is no bound.
_MOST_ENTRIES = 1024


@dataclass(frozen=True, slots=True, eq=False)
class _Entry:
    whose: tuple[str, str]
    ids: tuple[int, ...]
    cache: KVCache

    def shared(self, ids: Sequence[int]) -> int:
        """Return how many tokens at their beginnings are the same."""
        most = min(len(ids), len(self.ids))
        if tuple(ids[:most]) == self.ids[:most]:
            return most
        return next(at for at in range(most) if ids[at] != self.ids[at])


class PrefixPool:
    """The caches that are kept, least recently used first."""

    def __init__(self) -> None:
        self._entries: list[_Entry] = []

    @property
    def nbytes(self) -> int:
        """Memory that the caches have. Any thread may ask."""
        return sum(entry.cache.nbytes for entry in tuple(self._entries))

    def keep(self, whose: tuple[str, str], ids: Sequence[int], cache: KVCache) -> None:
        """Keep the cache of a sequence that has ended, instead of those that it goes on from."""
        entry = _Entry(whose, tuple(ids[: cache.length]), cache)
        if len(entry.ids) < MIN_TOKENS:
            cache.release()
            return
        cache.end()
        for old in tuple(self._entries):
            if old.whose == whose and old.shared(entry.ids) == len(old.ids):
                self._drop(old)
        self._entries.append(entry)
        if len(self._entries) > _MOST_ENTRIES:
            self._drop(self._entries[0])

    def fill(self, whose: tuple[str, str], prompt_ids: Sequence[int], cache: KVCache) -> int:
        """Copy what an entry has of a prompt into its cache; return how many tokens that are.

        At least one token is left: its logits are wanted.
        """
        for entry in [entry for entry in self._entries if entry.cache.stale]:
            self._drop(entry)
        span = cache.rope_span  # behind which keys of the same tokens may be others
        found = [
            (min(entry.shared(prompt_ids), len(prompt_ids) - 1), at)
            for at, entry in enumerate(self._entries)
            if entry.whose == whose
            and (span is None or max(len(entry.ids), len(prompt_ids)) <= span)
        ]
        best, at = max(found, default=(0, -1))
        if best < MIN_TOKENS:
            return 0
        self._entries.append(self._entries.pop(at))
        cache.copy_from(self._entries[-1].cache, best)
        return best

    def make_room(self, needed: int) -> None:
        """Let the least recently used go until they have given `needed` bytes back."""
        while needed > 0 and self._entries:
            needed -= self._entries[0].cache.nbytes
            self._drop(self._entries[0])

    def _drop(self, entry: _Entry) -> None:
        self._entries.remove(entry)
        entry.cache.release()
