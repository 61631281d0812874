"""The KV cache of one session, and attention over it.

The cache holds keys and values of a segment's layers, on the device.

It grows in place: a step writes its rows behind those that are there, and memory is asked for ahead
of them. Positions are absolute. Under a window of attention sinks (StreamingLLM, arXiv 2309.17453)
what no later token can attend to is dropped in blocks; that paper numbers positions anew within the
window, which this does not: a key keeps the rotation that it was written with.

Attention is causal and grouped-query, of a part's rows. Few rows are two plain products, which read
the cache once: torch's fused kernel takes longer for them. Many go through that kernel a block at a
time, each with the keys up to its end. Shape suffixes: R rows, K key/value heads, G query heads of
each, C head dim, S keys.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
from torch.nn.functional import scaled_dot_product_attention, softmax

from gpu_side.devices import multiplies_bfloat16

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


# Rows that go through the fused kernel at once, and that are plain products at most.
_BLOCK_ROWS = 512
_FEW_ROWS = 8


class Block(NamedTuple):
    """Some rows of a part, the keys that any of them attends to, and which each does: bool [R, S].

    `seen` None: all of them; `causal`: those up to itself.
    """

    rows: slice
    keys: slice
    seen: torch.Tensor | None
    causal: bool = False


class PartAttention:
    """Attention of the rows of one part: rows `rows` of the request, from position `start` on."""

    def __init__(self, cache: SessionCache, rows: slice, start: int, window: Window) -> None:
        self.rows = rows
        self._cache, self._start, self._window = cache, start, window
        self._count = rows.stop - rows.start
        # Where they are stored. Layers share what a window says.
        stored = start - cache.dropped
        self._stored = slice(stored, stored + self._count)
        self._blocks: dict[int | None, list[Block]] = {}

    def __call__(
        self,
        index: int,
        q_RKGC: torch.Tensor,
        k_RKC: torch.Tensor,
        v_RKC: torch.Tensor,
        sliding: int | None,
    ) -> torch.Tensor:
        """Store keys and values, and return [R, K * G * C].

        `index`: of the layer, in the segment; `sliding`: how many tokens back a token may look.
        """
        both_2KSC = self._cache.tensors[index]
        k_KSC, v_KSC = both_2KSC.unbind()
        k_KSC[:, self._stored] = k_RKC.transpose(0, 1)
        v_KSC[:, self._stored] = v_RKC.transpose(0, 1)
        if sliding not in self._blocks:
            self._blocks[sliding] = self._cut_into_blocks(sliding, q_RKGC.device)
        attend = _few if self._count <= _FEW_ROWS else _many
        outputs = [
            attend(q_RKGC[block.rows], k_KSC[:, block.keys], v_KSC[:, block.keys], block)
            for block in self._blocks[sliding]
        ]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    def _cut_into_blocks(self, sliding: int | None, device: torch.device) -> list[Block]:
        cache, blocks = self._cache, []
        for first in range(0, self._count, _BLOCK_ROWS):
            rows = slice(first, min(first + _BLOCK_ROWS, self._count))
            position = self._start + first
            # Of what is stored; what was dropped stands in no row's way, so this is never too late.
            low = 0 if sliding is None else max(0, position - sliding + 1 - cache.dropped)
            keys = slice(low, self._stored.start + rows.stop)
            plain = sliding is None and not self._window.recent
            if plain and self._count == 1:
                blocks.append(Block(rows, keys, None))
            elif plain and position == 0:
                blocks.append(Block(rows, keys, None, causal=True))
            else:
                seen = self._seen(rows, keys, sliding)
                blocks.append(Block(rows, keys, None if seen.all() else seen.to(device)))
        return blocks

    def _seen(self, rows: slice, keys: slice, sliding: int | None) -> torch.Tensor:
        """Say which keys each row attends to, bool [R, S]."""
        key_S = torch.arange(keys.start, keys.stop)
        key_S[key_S >= self._cache.sinks] += self._cache.dropped
        at_R1 = torch.arange(self._start + rows.start, self._start + rows.stop).unsqueeze(1)
        back_RS = at_R1 - key_S
        seen = back_RS >= 0
        if sliding is not None:
            seen &= back_RS < sliding
        if self._window.recent:
            seen &= (back_RS < self._window.recent) | (key_S < self._window.sinks)
        return seen


def _few(
    q_RKGC: torch.Tensor, k_KSC: torch.Tensor, v_KSC: torch.Tensor, block: Block
) -> torch.Tensor:
    # Where the processor does not, multiplying takes many times as long as to convert the keys.
    if q_RKGC.is_cpu and q_RKGC.dtype is not torch.float32 and not multiplies_bfloat16():
        found = _few(q_RKGC.float(), k_KSC.float(), v_KSC.float(), block)
        return found.to(q_RKGC.dtype)
    R, K, G, C = q_RKGC.shape
    q_KNC = (q_RKGC * C**-0.5).permute(1, 2, 0, 3).reshape(K, G * R, C)
    scores_KGRS = (q_KNC @ k_KSC.transpose(1, 2)).view(K, G, R, -1)
    seen = _lower(R, q_RKGC.device) if block.causal and R > 1 else block.seen
    if seen is not None:
        scores_KGRS = scores_KGRS.masked_fill_(~seen, float("-inf"))
    weights_KGRS = softmax(scores_KGRS, dim=-1, dtype=torch.float32).to(q_RKGC.dtype)
    out_KNC = weights_KGRS.view(K, G * R, -1) @ v_KSC
    return out_KNC.view(K, G, R, C).permute(2, 0, 1, 3).reshape(R, K * G * C)


@cache
def _lower(rows: int, device: torch.device) -> torch.Tensor:
    return torch.ones(rows, rows, dtype=torch.bool, device=device).tril()


def _many(
    q_RKGC: torch.Tensor, k_KSC: torch.Tensor, v_KSC: torch.Tensor, block: Block
) -> torch.Tensor:
    R, K, G, C = q_RKGC.shape
    k_KGSC, v_KGSC = (x.unsqueeze(1).expand(-1, G, -1, -1) for x in (k_KSC, v_KSC))
    out_KGRC = scaled_dot_product_attention(
        q_RKGC.permute(1, 2, 0, 3), k_KGSC, v_KGSC, block.seen, is_causal=block.causal
    )
    return out_KGRC.permute(2, 0, 1, 3).reshape(R, K * G * C)
