"""Pads that dealers multiply: the seeds of those that are made ahead, and of those that are not.

A dealer is a service of another owner. It makes rows r of a seed (`protocol.keystream`), and
returns u = r W. The seeds of several dealers make parts of r, which is their sum.
"""

from collections.abc import Mapping, Sequence
from functools import lru_cache

import numpy
import torch

from protocol.keystream import FIRST_BLOCK, Streams, seeded
from protocol.messages import SEED_BYTES, SEED_SHAPE
from protocol.native import STREAM
from tee_side.protect.masks.mask import Dealt, Seed
from tee_side.protect.randomness import Keystream, Randomness, derive_key
from tee_side.protect.sites import PadLayout

# Groups whose seeds are kept, 2 KB each: more than a prompt's, whose rows are drawn site by site.
_KEPT_GROUPS = 1024


class DealtKeystream(Keystream):
    """Numbers of pads that dealers multiply: for an index and a site the sum of a part of each.

    A dealer's part of a `group` of indices at a site is what a seed stands for
    (`protocol.keystream`), which is all that the dealer is sent. Seeds are the `Keystream` under a
    key of the dealer's own, by HKDF of its name, at the group's first index: no two dealers,
    groups, sites or keys of a store ever have one, and no seed goes to two dealers.
    """

    def __init__(self, key: bytes, dealers: Sequence[str], group: int, layout: PadLayout) -> None:
        super().__init__(key)
        self._group = group
        self._words = dict.fromkeys(range(layout.sites[-1].number + 1), *SEED_SHAPE)
        self._of_dealers = [
            Keystream(derive_key(key, b"tsqp dealer " + name.encode())) for name in dealers
        ]
        self._seeds = lru_cache(_KEPT_GROUPS)(self._draw_seeds)

    def seed(self, dealer: int, first: int, site: int) -> bytes:
        """Return what a dealer is sent for the group of indices from `first` on."""
        return bytes(self._seeds(first)[site, dealer])

    def _streams(self, indices: range, sizes: Mapping[int, int]) -> numpy.ndarray:
        """See `Keystream._streams`."""
        streams = numpy.zeros((len(sizes), len(indices), len(self._of_dealers)), STREAM)
        streams["low"] = FIRST_BLOCK
        place = (numpy.arange(len(indices)) + indices.start % self._group) % self._group
        streams["element"] = numpy.array([*sizes.values()])[:, None, None] * place[:, None]
        for start in range(-(indices.start % self._group), len(indices), self._group):
            of_group = self._seeds(indices.start + start)[[*sizes]]
            streams["key"][:, max(0, start) : start + self._group] = of_group[:, None]
        return streams

    def _draw_seeds(self, first: int) -> numpy.ndarray:
        """Return the seeds of a group, by sites' numbers: keys of `STREAM` [sites, dealers]."""
        indices, of_dealers = range(first, first + 1), []
        for keystream in self._of_dealers:
            streams = keystream._streams(indices, self._words)[:, 0].view(numpy.uint8)
            drawn = Streams(torch.from_numpy(streams), 1, *SEED_SHAPE).elements()
            of_dealers.append(drawn.numpy().view(STREAM["key"]))
        return numpy.concatenate(of_dealers, 1)


class FreshPads:
    """Draws pads whose u dealers multiply while the service works, under fresh seeds."""

    def __init__(self, layout: PadLayout, dealers: int, randomness: Randomness) -> None:
        self._sizes = {number: site.in_features for number, site in layout.by_number.items()}
        self._dealers, self._randomness = dealers, randomness

    def words(self, site: int, rows: int) -> tuple[Streams, None, tuple[Seed, ...]]:
        """See `PadLane.words`; without u, which dealers reply with."""
        shape = rows, self._sizes[site]
        keys = [self._randomness.bytes(SEED_BYTES) for _ in range(self._dealers)]
        return seeded(keys, *shape), None, tuple(Seed(key, shape) for key in keys)

    def deal(self, site: int, rows: int) -> Dealt:
        """Return r for `rows` rows of a site (its number), and the seeds of its parts."""
        streams, _, seeds = self.words(site, rows)
        return streams.elements(), seeds
