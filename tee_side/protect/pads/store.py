"""Hands out pads, each once, and takes in new ones.

A pad is r, uniform over Z_2^32, and u = r W mod 2^32, for one token index at every site of a
layout. Indices only grow, over the whole life of a store:

    consumed          handed out        reserved   available            being filled
    ------------------|-----------------|----------|--------------------|-----------
                      oldest in use     next       reserved             filled

Two equal pads give their plaintexts' difference away, so an index is handed out once, and each of
its sites is read once. What breaks these rules is a mistake of the caller, and a RuntimeError.

Threads: one thread may fill (`begin`, and the batch) while another takes; bookkeeping is under one
lock, and the long parts of filling (making, encrypting, writing and syncing data) are outside it.
So are those of reading many rows, which threads of a bank share.
Processes: a copy in a forked child would hand out what its parent does, and is refused.
"""

from __future__ import annotations

import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Self, TypeAlias

import numpy
import torch

from protocol import native
from protocol.errors import PadsExhaustedError
from protocol.keystream import Streams
from tee_side.protect.randomness import KEY_BYTES, Keystream
from tee_side.protect.sites import PadLayout, SiteShape

DEFAULT_BLOCK = 16

# What r is drawn from, and u; and what waits for them, where threads share the reading.
Words: TypeAlias = tuple[Streams, torch.Tensor]
Draw: TypeAlias = Callable[[], Words]


def reading_threads() -> int:
    """Return how many threads of a bank decrypt many rows, beside the one that asks for them.

    A fourth of the step's: they work beside it, and are done long before it.
    """
    return max(1, native.threads() // 4)


class PadStore(ABC):
    """What a step draws its pads from, and what the maker fills.

    The bookkeeping is here; a subclass says how u and the two bounds are kept. `layout`: the sites
    of every token; `capacity`: how many tokens there is space for; `group`: how many are filled,
    and their space given back, together: it divides `capacity`; `dealers`: names of those that
    multiply u, none where the TEE does. None of them changes.

    Reservation goes in blocks, because the subclass may have to reach the disk for it: `take`
    hands out of what is already reserved, and reserves more when that is used up. The block is as
    large as all that was handed out before, up to `block`: a short run loses no more pads than it
    used, a long one at most `block` - 1.
    """

    # Read for all sites at once: in one go they take half the time, between operators the processor
    # has forgotten how. More rows would take more memory.
    rows_at_once = 8

    def __init__(
        self,
        layout: PadLayout,
        capacity: int,
        key: bytes,
        *,
        first: int = 0,
        filled: int = 0,
        block: int = 1,
        group: int = 1,
        dealers: Sequence[str] = (),
    ) -> None:
        if capacity < 1 or block < 1:
            raise ValueError(f"pads: got capacity {capacity}, block {block}, expected at least 1")
        self.layout = layout
        self.capacity = capacity
        self.group = group
        self._sites = layout.by_number
        self._sizes = {number: site.in_features for number, site in self._sites.items()}
        self._block = block
        self._first = self._next = self._reserved = first
        self._filled = self._filled_before = filled
        # Index -> sites not yet read; in the order of the indices, complete ones removed.
        self._in_use: dict[int, int] = {}
        # One bit for each site's number: sets of sites are integers.
        self._all_sites = sum(1 << site.number for site in layout.sites)
        self.dealers = tuple(dealers)
        self._key = key
        self._keystream = self._new_keystream()
        self._batch: MadePads | None = None
        self._lock = threading.RLock()
        self.process = os.getpid()
        self.closed = False

    @property
    def available(self) -> int:
        """How many tokens could be taken now."""
        with self._lock:
            return self._filled - self._next

    @property
    def made(self) -> int:
        """For how many tokens this store was filled since it was opened."""
        return self._filled - self._filled_before

    @property
    def used(self) -> int:
        """How many tokens were taken since it was opened."""
        return self._next - self._first

    @property
    def left(self) -> int:
        """How many tokens a later process could take: of a block that is begun, none."""
        with self._lock:
            return self._filled - self._reserved

    @property
    def room(self) -> int:
        """How many tokens could be filled now, whole groups: free space.

        Not what is still in use, nor what a batch is filling.
        """
        with self._lock:
            oldest = next(iter(self._in_use), self._next)
            end = self._filled if self._batch is None else self._batch.indices.stop
            return oldest // self.group * self.group + self.capacity - end

    def take(self, count: int) -> range:
        """Hand out `count` >= 1 consecutive indices, each for the first and last time.

        Raises PadsExhaustedError if fewer are available; nothing is handed out then.
        """
        if count < 1:
            raise ValueError(f"pads: got {count} to take, expected at least 1")
        with self._lock:
            self.check_usable()
            end = self._next + count
            if end > self._filled:
                raise PadsExhaustedError("pads", f"{self._filled - self._next} pads", f"{count}")
            if end > self._reserved:
                block = min(self._block, max(1, self._next - self._first))
                reserved = min(self._filled, max(end, self._reserved + block))
                self._persist(reserved, self._filled)
                self._reserved = reserved
            taken = range(self._next, end)
            self._next = end
            for index in taken:
                self._in_use[index] = self._all_sites
            return taken

    def start(self, indices: range, site: int) -> Draw:
        """Begin to read the pads of indices just taken, by threads where that takes long.

        They are used up at once. What is returned waits, and returns what r [T, in_features] is
        drawn from, and u int32 [T, out_features], which may be where the store keeps it: it holds
        until `release`.

        GPU sees: x + r, for which the caller is answerable; neither r nor u.

        Raises RuntimeError if one of the indices was not taken here, was released, or was already
        asked for at this site; KeyError for a site that the layout has not. Then or now,
        PadBankError if the record was damaged.
        """
        shape = self._sites[site]
        with self._lock:
            self._use_up(indices, 1 << site, shape)
            pad = self._keystream.rows(indices, {site: self._sizes[site]})[site]
            read = self._start_reading(indices, shape)
        return lambda: (pad, read())

    def all_factors(self, indices: range) -> dict[int, Words]:
        """Return what `start` gives of every site, by its number, of indices just taken.

        In one go: that takes a third of the time of one site after another. Raises as `start`.
        """
        with self._lock:
            self._use_up(indices, self._all_sites, "all sites")
            pads, u = self._keystream.rows(indices, self._sizes), self._read_all(indices)
            pairs = zip(pads.values(), map(u.__getitem__, pads), strict=True)
            return dict(zip(pads, pairs, strict=True))

    def release(self, indices: range) -> None:
        """Give up these indices, whatever was read of them, after a step.

        Their space can be filled again, and what was read of it may change.
        """
        with self._lock:
            for index in indices:
                self._in_use.pop(index, None)

    def begin(self, count: int) -> MadePads:
        """Start filling the next `count` indices, whole groups up to `room`; one batch at a time.

        Raises PadBankError for a bank that has to end, or a disk that cannot be written.
        """
        with self._lock:
            self.check_usable()
            if self._batch is not None:
                raise RuntimeError("pads: got a second batch, expected the first one to end")
            if count % self.group or not 1 <= count <= self.room:
                expected = f"{self.group} .. {self.room}, by {self.group}"
                raise ValueError(f"pads: got {count} to fill, expected {expected}")
            indices = range(self._filled, self._filled + count)
            self._starting(indices)
            self._batch = MadePads(self, indices)
            return self._batch

    def check_usable(self) -> None:
        """Raise RuntimeError in a store that was closed, or copied by fork.

        For callers that keep factors they have read: those are as good as the store itself.
        """
        if self.closed:
            raise RuntimeError("pads: got a closed store, expected an open one")
        if os.getpid() != self.process:
            raise RuntimeError(
                "pads: got a store copied by fork, expected one opened in this process"
            )

    def close(self) -> None:
        """Let go of files and locks; nothing can be taken or filled afterwards.

        Nothing is written. The rest of the reserved block is lost, as after a crash: to give it
        back, the stored bound would have to move backwards, and a bound that never does is what
        makes "never handed out twice" easy to see, and possible to tie to a monotonic counter.
        While another thread fills a batch, files stay open until that has ended.
        """
        with self._lock:
            self.closed = True
            if self._batch is None:
                self._let_go()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # What a subclass says. `persist` under the lock, before any index below `reserved` is handed
    # out; `starting` under the lock, before a batch; `buffer`, `write` and `sync` by threads that
    # fill, without the lock; `start_reading` and `read_all` under it.

    @abstractmethod
    def _persist(self, reserved: int, filled: int) -> None:
        """Make both bounds outlive a crash, or raise."""

    def _starting(self, indices: range) -> None:  # noqa: B027 - not every store counts
        """Note that these indices are about to be written, or raise."""

    def _buffer(self, indices: range, site: SiteShape) -> torch.Tensor:
        """Return memory to write u to, which `_write` then gets."""
        return torch.empty(len(indices), site.out_features, dtype=torch.int32)

    @abstractmethod
    def _write(self, indices: range, site: SiteShape, u_NO: torch.Tensor) -> None:
        """Write u to the slots of these indices."""

    @abstractmethod
    def _sync(self) -> None:
        """Make everything written outlive a crash, or raise."""

    @abstractmethod
    def _start_reading(self, indices: range, site: SiteShape) -> Callable[[], torch.Tensor]:
        """Begin to read u, and return what waits for it: int32 [T, out_features]."""

    @abstractmethod
    def _read_all(self, indices: range) -> dict[int, torch.Tensor]:
        """Return u int32 [T, out_features] of every site, by its number; under the lock."""

    def _let_go(self) -> None:  # noqa: B027 - not every store has files
        """End threads, close files and drop locks; may be called twice."""

    def _new_keystream(self) -> Keystream:
        if self.dealers:
            from tee_side.protect.pads.dealt import DealtKeystream

            return DealtKeystream(self._key, self.dealers, self.group, self.layout)
        return Keystream(self._key)

    def _use_up(self, indices: range, sites: int, where: object) -> None:
        """Mark the pairs as read, all or none, before anything of them is.

        `sites`: a bit for each; `where`: what an error says of them.
        """
        self.check_usable()
        in_use = self._in_use
        for index in indices:
            if in_use.get(index, 0) & sites != sites:
                raise RuntimeError(
                    f"pads: {where}: got index {index}, expected one that was taken here and"
                    f" neither released nor used there before"
                )
        for index in indices:
            in_use[index] ^= sites


class MadePads:
    """Consecutive indices that are being filled. Used as a context: leaving it uncommitted ends it.

    `indices`: N token indices; `groups`: the first one of each group, which has `group` of them;
    `layout`: the sites; `dealers`: those of the store. What was put without a commit is made again
    later, for the same indices and the same r: none of them was handed out, so work is lost and
    nothing else. The keystream is the batch's own, for the filling thread.
    """

    def __init__(self, store: PadStore, indices: range) -> None:
        self.indices, self.groups = indices, indices[:: store.group]
        self.layout, self.group, self.dealers = store.layout, store.group, store.dealers
        self._store = store
        # A `DealtKeystream` where dealers multiply.
        self._keystream: Any = store._new_keystream()
        self._missing = store._all_sites

    def r(self, site: int) -> torch.Tensor:
        """Return int32 [N, in_features], uniform over Z_2^32."""
        rows: Streams = self._keystream.rows(self.indices, {site: self._store._sizes[site]})[site]
        return rows.elements()

    def seeds(self, dealer: int, site: int) -> list[bytes]:
        """Return what a dealer is sent for each group; only where dealers multiply."""
        return [self._keystream.seed(dealer, first, site) for first in self.groups]

    def buffer(self, site: int) -> torch.Tensor:
        """Return int32 [N, out_features] for u of a site, to be `put`: its place, if it can be."""
        self._check_open()
        return self._store._buffer(self.indices, self._store._sites[site])

    def put(self, site: int, u_NO: torch.Tensor) -> None:
        """Keep r W mod 2^32 of one site, int32 [N, out_features]; every site once."""
        shape = self._store._sites[site]
        self._check_open()
        expected = (len(self.indices), shape.out_features)
        if tuple(u_NO.shape) != expected or u_NO.dtype != torch.int32:
            raise ValueError(
                f"pads: {shape}: got {u_NO.dtype} {list(u_NO.shape)},"
                f" expected torch.int32 {list(expected)}"
            )
        bit = 1 << site
        if not self._missing & bit:
            raise RuntimeError(f"pads: {shape}: got it put twice, expected once")
        self._store._write(self.indices, shape, u_NO.contiguous())
        self._missing ^= bit

    def commit(self) -> None:
        """Make the indices available, once every site has been put.

        If it raises, the batch is over and its work is lost.
        """
        self._check_open()
        if self._missing:
            raise RuntimeError(
                f"pads: got a batch with {self._missing.bit_count()} sites not put, expected none"
            )
        store = self._store
        try:
            # After a sync that failed, the kernel may have dropped what it could not write, and
            # the next sync would succeed: so the batch ends here either way.
            store._sync()
            with store._lock:
                self._check_open()
                store._persist(store._reserved, self.indices.stop)
                store._filled = self.indices.stop
        finally:
            self.abandon()

    def abandon(self) -> None:
        """End the batch; the indices are the next to be filled again. No effect after a commit."""
        with self._store._lock:
            if self._store._batch is self:
                self._store._batch = None
                if self._store.closed:
                    self._store._let_go()

    def __enter__(self) -> MadePads:
        return self

    def __exit__(self, *_: object) -> None:
        self.abandon()

    def _check_open(self) -> None:
        self._store.check_usable()
        if self._store._batch is not self:
            raise RuntimeError("pads: got a batch that has ended, expected an open one")


class MemoryStore(PadStore):
    """Pads in memory, under a key of its own that dies with it: nothing to persist, or to repeat.

    Memory: `layout.token_bytes` * `capacity`. Raises ValueError for a capacity below 1.
    """

    rows_at_once = 2**31  # they stay where they are

    def __init__(
        self, layout: PadLayout, capacity: int, *, group: int = 1, dealers: Sequence[str] = ()
    ) -> None:
        super().__init__(layout, capacity, os.urandom(KEY_BYTES), group=group, dealers=dealers)
        # numpy asks the kernel for huge pages.
        self._u = {
            site.number: torch.from_numpy(numpy.empty((capacity, site.out_features), numpy.int32))
            for site in layout.sites
        }

    def _persist(self, reserved: int, filled: int) -> None:
        """Nothing outlives this process, and a later one has another key."""

    def _buffer(self, indices: range, site: SiteShape) -> torch.Tensor:
        # Around the end a copy, which is written back.
        return self._u[site.number][self._slots(indices)]

    def _write(self, indices: range, site: SiteShape, u_NO: torch.Tensor) -> None:
        if self._buffer(indices, site).data_ptr() != u_NO.data_ptr():
            self._u[site.number].numpy()[self._slots(indices)] = u_NO.numpy()

    def _sync(self) -> None:
        """Nothing is on a disk."""

    def _start_reading(self, indices: range, site: SiteShape) -> Callable[[], torch.Tensor]:
        u_TO = self._u[site.number][self._slots(indices)]
        return lambda: u_TO

    def _read_all(self, indices: range) -> dict[int, torch.Tensor]:
        slots = self._slots(indices)
        return {number: u[slots] for number, u in self._u.items()}

    def _slots(self, indices: range) -> slice | numpy.ndarray:
        """Return where indices are: in one piece, which is read in place, or around the end."""
        first = indices.start % self.capacity
        if first + len(indices) <= self.capacity:
            return slice(first, first + len(indices))
        return numpy.arange(first, first + len(indices)) % self.capacity
