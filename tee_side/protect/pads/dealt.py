"""Pads that dealers multiply: the seeds of those that are made ahead, and of those that are not.

A dealer is a service of another owner. It makes rows r of a seed (`protocol.messages.expand`), and
returns u = r W. The seeds of several dealers make parts of r, which is their sum.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, reduce

import numpy
import torch
from cryptography.hazmat.primitives.ciphers import CipherContext

from protocol.messages import FIRST_BLOCK, SEED_BYTES
from tee_side.protect.masks.mask import Dealt, Seed
from tee_side.protect.randomness import (
    BLOCK_BYTES,
    Keystream,
    Randomness,
    counting,
    derive_key,
)
from tee_side.protect.sites import PadLayout

# Of parts of pads, each for a group at a site.
_KEPT_CONTEXTS = 2048


class DealtKeystream(Keystream):
    """Numbers of pads that dealers multiply: for an index and a site the sum of a part of each.

    A dealer's part of a `group` of indices at a site is what `expand` makes of a seed
    (`protocol.messages`), which is all that the dealer is sent. Seeds are the `Keystream` under a
    key of the dealer's own, by HKDF of its name, at the group's first index: no two dealers,
    groups, sites or keys of a store ever have one, and no seed goes to two dealers.
    """

    def __init__(self, key: bytes, dealers: Sequence[str], group: int) -> None:
        super().__init__(key)
        self._group = group
        self._keys = [derive_key(key, b"tsqp dealer " + name.encode()) for name in dealers]
        # Those of the groups that are drawn from: making one takes as long as drawing a row.
        self._kept = lru_cache(_KEPT_CONTEXTS)(self._begin)

    def seed(self, dealer: int, first: int, site: int) -> bytes:
        """Return what a dealer is sent for the group of indices from `first` on."""
        # A context of its own: any number of threads may be in `fill`.
        context = counting(self._keys[dealer])
        context.reset_nonce((first << 64 | site << 32).to_bytes(BLOCK_BYTES, "big"))
        return context.update(bytes(SEED_BYTES))

    def sites(self, indices: range, sizes: Mapping[int, int]) -> dict[int, torch.Tensor]:
        """See `Keystream.sites`."""
        found = {}
        for site, features in sizes.items():
            words = numpy.empty((len(indices), features), numpy.int32)
            self._draw(indices, site, words, self._kept)
            found[site] = torch.from_numpy(words)
        return found

    def fill(self, indices: range, site: int, words_TI: torch.Tensor) -> None:
        """See `Keystream.fill`."""
        self._draw(indices, site, words_TI.numpy(), self._begin)

    def _begin(self, dealer: int, first: int, site: int) -> CipherContext:
        return counting(self.seed(dealer, first, site))

    def _draw(
        self,
        indices: range,
        site: int,
        words: numpy.ndarray,
        context_of: Callable[[int, int, int], CipherContext],
    ) -> None:
        features, group, zeros = words.shape[1], self._group, memoryview(bytes(words.nbytes))
        self._check(indices, {site: 4 * features * group})
        for first in range(indices.start - indices.start % group, indices.stop, group):
            start, stop = max(first, indices.start), min(first + group, indices.stop)
            drawn = words[start - indices.start : stop - indices.start]
            block, skipped = divmod(4 * features * (start - first), BLOCK_BYTES)
            for dealer in range(len(self._keys)):
                part = numpy.empty_like(drawn) if dealer else drawn
                context = context_of(dealer, first, site)
                context.reset_nonce((FIRST_BLOCK + block).to_bytes(BLOCK_BYTES, "big"))
                context.update(bytes(skipped))
                context.update_into(zeros[: part.nbytes], part.data.cast("B"))
                if dealer:
                    drawn += part


class FreshPads:
    """Draws pads whose u dealers multiply while the service works, under fresh seeds."""

    def __init__(self, layout: PadLayout, dealers: int, randomness: Randomness) -> None:
        self._sizes = {number: site.in_features for number, site in layout.by_number.items()}
        self._dealers, self._randomness = dealers, randomness

    def words(self, site: int, rows: int) -> tuple[torch.Tensor, None, tuple[Seed, ...]]:
        """See `PadLane.words`; without u, which dealers reply with."""
        r_TI, seeds = self.deal(site, rows)
        return r_TI, None, seeds

    def deal(self, site: int, rows: int) -> Dealt:
        """Return r for `rows` rows of a site (its number), and the seeds of its parts."""
        shape, draw = (rows, self._sizes[site]), self._randomness.bytes
        seeds = tuple(Seed(draw(SEED_BYTES), shape) for _ in range(self._dealers))
        return reduce(torch.add, (seed.elements() for seed in seeds)), seeds
