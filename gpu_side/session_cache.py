"""The KV cache of one session: keys and values of a segment's layers, on the device.

It grows in place: a step writes its rows behind those that are there, and memory is asked for ahead
of them. Positions are absolute. Under a window of attention sinks (StreamingLLM, arXiv 2309.17453)
what no later token can attend to is dropped in blocks; that paper numbers positions anew within the
window, which this does not: a key keeps the rotation that it was written with.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

# Tokens by which a cache grows, and that are dropped at once at least.
GROWTH_TOKENS = 64
_DROPPED_TOKENS = 256


class CacheShape(NamedTuple):
    """What a segment's cache holds of a token: two vectors a layer and key/value head.

    `device`: None where nothing is computed; then nothing is allocated either.
    """

    layers: int
    heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device | None

    @property
    def token_bytes(self) -> int:
        """Bytes of a token."""
        return 2 * self.layers * self.heads * self.head_dim * self.dtype.itemsize


class Window(NamedTuple):
    """A token attends to `sinks` tokens at the beginning and to `recent` that end with itself.

    `recent` 0: to all before it.
    """

    sinks: int = 0
    recent: int = 0


class SessionCache:
    """Keys and values of one session, by layer: [2, K, capacity, C] in `tensors`.

    `length`: tokens that the session has. Those from `sinks` on, `dropped` of them, are not kept;
    what comes behind them is stored so much further to the front.
    """

    def __init__(self, shape: CacheShape) -> None:
        self.shape = shape
        self.tensors: list[torch.Tensor] = []
        self.capacity = self.length = self.sinks = self.dropped = 0

    @property
    def bytes(self) -> int:
        """Size of the memory that it takes."""
        return self.capacity * self.shape.token_bytes

    @property
    def stored(self) -> int:
        """Tokens that are kept."""
        return self.length - self.dropped

    def has(self, start: int, window: Window) -> bool:
        """Say whether all is here that tokens from `start` on attend to."""
        if start > self.length:
            return False
        if not self.dropped or start <= self.sinks:
            return True
        first_recent = start - window.recent + 1
        dropped_end = self.sinks + self.dropped
        return window.sinks <= self.sinks and window.recent > 0 and first_recent >= dropped_end

    def cut(self, start: int, window: Window) -> None:
        """Forget the tokens from `start` on, and those before that no later one attends to.

        Only what `has` has found.
        """
        self.length = start
        if start <= self.sinks:
            self.dropped = 0
        if not window.recent:
            return
        if not self.dropped:
            self.sinks = window.sinks
        # As far as `start` needs it, not as far as its rows do: the request may come once more.
        many = start - window.recent + 1 - self.sinks - self.dropped
        if many < max(_DROPPED_TOKENS, window.recent // 4):
            return
        kept = slice(self.sinks + many, self.stored)
        for tensor in self.tensors:
            moved = tensor[:, :, kept].clone()
            tensor[:, :, self.sinks : self.sinks + moved.shape[2]] = moved
        self.dropped += many

    def resize(self, capacity: int) -> None:
        """Take memory for so many tokens in place of what there is; what is stored stays."""
        self.capacity = min(self.capacity, capacity)
        layers, heads, head_dim, dtype, device = self.shape
        if device is not None:
            # One layer after the other, so that little is there twice.
            for layer in range(layers):
                made = torch.empty(2, heads, capacity, head_dim, dtype=dtype, device=device)
                if layer < len(self.tensors):
                    made[:, :, : self.stored] = self.tensors[layer][:, :, : self.stored]
                    self.tensors[layer] = made
                else:
                    self.tensors.append(made)
        self.capacity = capacity

    def take_over(self, other: SessionCache, tokens: int) -> None:
        """Begin with the first tokens of another session, which has them (`has`).

        There is room for them (`resize`).
        """
        self.length, self.sinks = tokens, other.sinks
        self.dropped = 0 if tokens <= other.sinks else other.dropped
        for mine, theirs in zip(self.tensors, other.tensors, strict=True):
            mine[:, :, : self.stored] = theirs[:, :, : self.stored]
