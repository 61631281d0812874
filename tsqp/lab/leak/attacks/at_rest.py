"""The cache at rest: sessions that a service has written to its disk, read by who finds that.

Shape suffixes: T tokens, V vocabulary, X features of all key/value heads, K key/value heads, C head
dim.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

import torch
from torch.nn.functional import normalize

from tsqp.lab.leak.attack import Attack, Reading, View, Work
from tsqp.lab.leak.matching import best


class CacheAtRest(Attack):
    """Compares the first layer's values in a session's file with those of every token.

    A value depends on its token alone, not on its position. The channels of a head are compared in
    ascending order, whatever order a mask gives them. The control is the same file without
    encryption. That encryption protects disks, not against the service, which sees each row in the
    request that the value is computed from: other attacks read those.
    """

    name: ClassVar[str] = "cache-at-rest"
    reads: ClassVar[str] = "values of the first layer, in files of sessions on the service's disk"
    source: ClassVar[str] = "first-layer values by token; control: the file without encryption"
    control: ClassVar[str] = "clear-segment"
    published: ClassVar[float] = 0.95

    def refuses(self, view: View) -> str | None:
        """Refuse services without sessions, caches without layer 0, and unknown weights."""
        if not view.disks:
            return "no cache is at the service"
        if view.policy.segments(view.public.config.num_hidden_layers)[0].first:
            return "layer 0 stays"
        return None if view.public.has_layers else "no public weights to compare with"

    def read(self, view: View, work: Work) -> Iterator[Reading]:
        """Look every value up."""
        public = view.public
        values_VX = public.linear(0, "qkv_proj")(public.dictionary_VD)
        table_VX = _directions(values_VX[:, -_values(view) :], view)
        ids_V = torch.arange(len(table_VX))
        for session, disk in enumerate(view.disks):
            work.tick()
            rows_TX = _directions(_first_values(view, session, disk), view)
            cosines_TV = rows_TX @ table_VX.t()
            work.compared += cosines_TV.numel()
            guesses = {token: best(1 - own_V, ids_V) for token, own_V in enumerate(cosines_TV)}
            yield Reading("cache on disk", session, range(len(rows_TX)), guesses)


def _values(view: View) -> int:
    """Return how many numbers a token's value has in a layer: X."""
    _, K, C = view.public.config.heads
    return K * C


def _first_values(view: View, session: int, disk: bytes) -> torch.Tensor:
    """Take a file for plain numbers, keys of layer 0 first; return its values: [T, X]."""
    _, K, C = view.public.config.heads
    first = view.policy.segments(view.public.config.num_hidden_layers)[0]
    dtype = view.traces[session].calls[-1].rows.dtype
    layers = first.last + 1 - first.first
    tokens = len(disk) // (2 * layers * K * C * dtype.itemsize)
    numbers = torch.frombuffer(bytearray(disk), dtype=dtype, count=2 * K * tokens * C)
    return numbers.view(2, K, tokens, C)[1].transpose(0, 1).reshape(tokens, K * C)


def _directions(values_TX: torch.Tensor, view: View) -> torch.Tensor:
    """Return values with each head's channels in ascending order, of length 1: float64.

    What is no number, as some bytes of a cipher, counts as 0.
    """
    _, K, C = view.public.config.heads
    numbers = values_TX.double().nan_to_num(0, 0, 0)
    return normalize(numbers.view(-1, K, C).sort(dim=-1).values.flatten(1), dim=-1)
