"""What a step works on: the KV caches of several sequences, and a flat batch of their next tokens.

A batch has prefill chunks and decode tokens side by side, one row a token.

A cache has keys and values of one sequence in one piece of memory, as long as the sequence may
become. The kernel gives that memory page by page as it is written (where it overcommits, as Linux
does unless told otherwise), and takes it back when the cache is let go: what a cache may have is
counted beforehand, by `tee_side.engine.engine`. On the heap, caches that come and go leave holes
between what lives longer.

Shape suffixes as in `protocol.model.forward`: K key/value heads, S context length, C head dim. A
layer's keys are [K, S, C], so that the part in use is a view that a batched product reads in place.
"""

from __future__ import annotations

import math
import mmap
import os
import re
import secrets
from array import array
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import torch

from protocol.errors import LimitError
from protocol.messages import SESSION_BYTES
from protocol.model.config import ModelConfig

# What is left of the memory at start for everything but KV caches.
_SHARE_OF_MEMORY = 0.8
_MEMORY = Path("/proc/meminfo")


def kv_bytes(
    config: ModelConfig, capacity: int, dtype: torch.dtype, layers: int | None = None
) -> int:
    """Return how many bytes the KV cache of a sequence of `capacity` tokens has.

    `layers`: whose keys and values are here, None: all.
    """
    kept = config.num_hidden_layers if layers is None else layers
    row = kept * config.num_key_value_heads * config.head_dim
    return 2 * row * capacity * dtype.itemsize


def available_kv_bytes() -> int:
    """Return 80 % of the memory that is available now; of all of it where Linux does not say."""
    return int(_available_bytes() * _SHARE_OF_MEMORY)


def _available_bytes() -> int:
    with suppress(OSError):  # no Linux, or no /proc
        if found := re.search(
            r"^MemAvailable: +(\d+) kB$", _MEMORY.read_text("ascii"), re.MULTILINE
        ):
            return int(found[1]) * 1024
    return _machine_bytes()


def _machine_bytes() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def mib(size: int) -> str:
    """Say a number of bytes."""
    return f"{size / 2**20:.1f} MiB"


def kv_refused(where: str, size: int, capacity: int, expected: str, *, most: int) -> LimitError:
    """Return the error for a KV cache of `size` bytes; a retry may help up to `most` bytes."""
    got = f"a request that needs {mib(size)} for {capacity} tokens"
    error = LimitError(where, got=got, expected=expected)
    error.retryable = size <= most
    return error


class KVCache:
    """KV cache of one sequence.

    `length` tokens are valid in every layer. A step writes behind them, layer by layer, and only
    `commit` makes them count: a step that fails half-way leaves nothing to undo, and can be run
    again. Raises LimitError if the machine does not give as much memory; retrying helps where it
    has as much at all.

    Keys and values of the layers `elsewhere` are kept by services, under the name `session`, which
    no other client can guess; they begin with the first tokens of `parent`, as many as it says.
    `rope_span`: up to how many tokens keys do not depend on the sequence's length.
    """

    def __init__(
        self,
        config: ModelConfig,
        capacity: int,
        dtype: torch.dtype,
        elsewhere: Collection[int] = (),
    ) -> None:
        layers = config.num_hidden_layers
        here = [layer for layer in range(layers) if layer not in elsewhere]
        shape = (len(here), config.num_key_value_heads, capacity, config.head_dim)
        self.length = 0
        self.capacity = capacity
        self.nbytes = kv_bytes(config, capacity, dtype, len(here))
        # Called once each when the session ends, for what is kept under its name.
        self.at_end: list[Callable[[], object]] = []
        # Of the sequence, whatever services lose.
        self.identity = self.session = secrets.token_bytes(SESSION_BYTES)
        self.parent: tuple[KVCache, int] | None = None
        # How often services have lost what they keep since the sequence's last token, and whether
        # they did when another cache was to begin with it.
        self.losses, self.stale = 0.0, False
        self.rope_span, self._anew, self._tokens = config.rope_span, config.table.rope_anew, 0
        # Rows behind `length` that each layer has written in this step, here or at a service.
        self.written = [0] * layers
        # Of the layers that are here their place in `memory`: keys and values, [L, K, S, C] each.
        self.places: dict[int, int] = {}
        self.memory: tuple[torch.Tensor, ...] = ()
        if not here:
            return
        try:
            self.memory = _untouched(shape, dtype), _untouched(shape, dtype)
        except (OSError, OverflowError):
            most = _machine_bytes()
            where = f"KV memory, which the machine refuses, of {mib(most)} that it has"
            expected = f"less: {mib(_available_bytes())} are available (lower --max-new-tokens)"
            raise kv_refused(where, self.nbytes, capacity, expected, most=most) from None
        self.places = {layer: place for place, layer in enumerate(here)}

    def release(self) -> None:
        """Give the memory back: the sequence has ended, and is asked for its length at most."""
        self.places, self.memory = {}, ()
        self.nbytes = 0
        self._end_session()

    def grow_to(self, tokens: int) -> None:
        """Be told how long the sequence is by now: with some models it begins anew."""
        before, self._tokens = self._tokens, tokens
        span = self.rope_span
        if self._anew and self.length and span is not None and before <= span < tokens:
            self.lose()
            self.losses -= 1  # no service's

    def drafts_alike(self, most: int) -> int:
        """Return how many drafts may stand behind its tokens, and RoPE is as without them."""
        span = self.rope_span
        if span is None or (self._anew and self._tokens > span):
            return most
        return min(most, max(0, span - self._tokens))

    def lose(self) -> None:
        """Begin anew: a service has lost keys and values, and all tokens are computed again."""
        if self.parent is not None:
            self.parent[0].stale = True
        self._end_session()
        self.length, self.parent, self.losses = 0, None, self.losses + 1
        self.session = secrets.token_bytes(SESSION_BYTES)

    def _end_session(self) -> None:
        for ended in self.at_end:
            ended()
        self.at_end.clear()

    def end(self) -> None:
        """Count what was written alone: the kernel has given no more, and nothing will be added."""
        self.nbytes = self.nbytes * self.length // self.capacity
        self.capacity = self.length

    def begin_step(self) -> None:
        """Forget what has been written behind `length`, by a step that failed."""
        self.written = [0] * len(self.written)

    def reserve(self, layer: int, tokens: int, behind: int = 0) -> None:
        """Count rows of one layer as written: the caller writes them before anything else.

        `behind`: how many rows of the same step stand between `length` and these. IndexError if
        they have not been written yet, or if there is no room: both are mistakes of the caller.
        """
        end = self.length + behind + tokens
        if end > self.capacity:
            raise IndexError(f"KV cache: got {end} tokens, expected at most {self.capacity}")
        if behind > self.written[layer]:
            raise IndexError(
                f"KV cache: got rows behind {behind} others, expected at most"
                f" {self.written[layer]}, which are there"
            )
        if layer not in self.places:
            raise IndexError(f"KV cache: got layer {layer}, expected one that is here")
        self.written[layer] = behind + tokens

    def up_to(self, layer: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return one layer's keys and values up to a position, [K, end, C], as views."""
        keys, values = (x_LKSC[self.places[layer]].narrow(1, 0, end) for x_LKSC in self.memory)
        return keys, values

    def commit(self, tokens: int) -> None:
        """Count the first rows that every layer has written; the others are forgotten."""
        self.length += tokens
        self.parent = None  # its tokens have been taken over
        self.begin_step()

    def copy_from(self, other: KVCache, tokens: int) -> None:
        """Begin with the first tokens of another cache."""
        for mine, theirs in zip(self.memory, other.memory, strict=False):  # none: it has ended
            mine.narrow(2, 0, tokens).copy_(theirs.narrow(2, 0, tokens))
        self.length, self.parent = tokens, (other, tokens)


def _untouched(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Return zeros in pages of their own, which live as long as a view of them. Raises OSError."""
    size = math.prod(shape) * dtype.itemsize
    pages = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(pages, dtype=dtype).view(shape)


@dataclass(frozen=True, slots=True)
class Chunk:
    """The rows of one sequence in a step: the next tokens behind what its cache holds.

    `known_length`: the sequence's length once all of its pending ids have run: RoPE may depend on
    it, and must not depend on how the engine cuts a prompt. `behind`: rows of the same sequence
    that are in earlier micro-batches of the same step.
    """

    cache: KVCache
    rows: slice
    known_length: int
    behind: int = 0

    @property
    def tokens(self) -> int:
        """Number of rows."""
        return int(self.rows.stop - self.rows.start)

    def follows(self, layer: int) -> bool:
        """Say whether the rows before these have been written, so that they can be looked at."""
        return self.cache.written[layer] >= self.behind

    @property
    def start(self) -> int:
        """Position of the first row in its sequence."""
        return self.cache.length + self.behind


class Take(NamedTuple):
    """What a step takes of one sequence.

    `ids`: its next token ids; `left`: how many pending ones are left for later. With none left the
    logits behind the last one are wanted, and those behind each of the `drafts` last, which are
    guesses: every one is a row that sees what decoding it alone would see. `read`: rows whose
    hidden states are wanted, counted from the first.
    """

    cache: KVCache
    ids: Sequence[int]
    left: int
    drafts: int = 0
    read: range = range(0)
    logits: bool = True


@dataclass(frozen=True)
class Batch:
    """`token_ids_T`: int64 [T]; `output_rows`: rows whose logits are wanted, in order.

    `read_rows`: rows whose hidden states are. It is of one step: what its sequences had before it
    is asked once.
    """

    token_ids_T: torch.Tensor
    chunks: tuple[Chunk, ...]
    output_rows: tuple[int, ...]
    read_rows: tuple[int, ...] = ()

    @staticmethod
    def of(parts: Sequence[tuple[KVCache, Sequence[int], int] | Take]) -> Batch:
        """Lay what is taken of each sequence side by side."""
        token_ids: list[int] = []
        chunks: list[Chunk] = []
        output_rows: list[int] = []
        read_rows: list[int] = []
        for cache, ids, left, drafts, read, logits in (Take(*part) for part in parts):
            start = len(token_ids)
            token_ids.extend(ids)
            known, end = len(ids) - drafts, len(token_ids)
            chunks.append(Chunk(cache, slice(start, start + known), cache.length + known + left))
            for behind in range(known, len(ids)):
                row = start + behind
                chunks.append(Chunk(cache, slice(row, row + 1), cache.length + behind + 1, behind))
            if left == 0 and logits:
                output_rows += range(end - 1 - drafts, end)
            read_rows += (start + row for row in read)
        ids_T = torch.tensor(token_ids, dtype=torch.int64)
        return Batch(ids_T, tuple(chunks), tuple(output_rows), tuple(read_rows))

    @cached_property
    def _sequences(self) -> tuple[array[int], list[tuple[torch.Tensor, ...]]]:
        # With what keeps the memory: a sequence may end while a kernel reads it.
        found, kept = array("q"), [one.cache.memory for one in self.chunks]
        for one, (keys, values) in zip(self.chunks, kept, strict=True):
            found.extend((one.rows.start, one.tokens, keys.data_ptr(), values.data_ptr()))
            found.extend((keys.shape[2], one.start + one.tokens))
        return found, kept

    def layout(self, layer: int) -> tuple[int, ...]:
        """Return what kernels know of a layer's keys and values.

        How many heads they have, the address of a `Sequence` of protocol/native/kernels.h for each
        chunk, how many these are, and which of the layers in the caches' memory it is.
        """
        cache = self.chunks[0].cache  # alike in all of them
        address, _ = self._sequences[0].buffer_info()
        return cache.memory[0].shape[1], address, len(self.chunks), cache.places[layer]

    def attended(self, layer: int) -> list[tuple[slice, torch.Tensor, torch.Tensor]]:
        """Return of each chunk its rows, and the keys and values [K, S, C] up to the last one."""
        return [(one.rows, *one.cache.up_to(layer, one.start + one.tokens)) for one in self.chunks]

    @property
    def wanted_rows(self) -> list[int]:
        """The rows whose logits are wanted, then those whose hidden states are."""
        return [*self.output_rows, *self.read_rows]

    def split(self, parts: int) -> list[Batch]:
        """Cut into consecutive micro-batches of about equal sizes; fewer if there are few rows.

        A sequence that is cut must run in order: the later part looks at the keys of the earlier.
        """
        rows = len(self.token_ids_T)
        parts = min(parts, rows)
        bounds = [rows * part // parts for part in range(parts + 1)]
        return [self._between(*ends) for ends in pairwise(bounds)]

    def _between(self, first: int, last: int) -> Batch:
        chunks = []
        for chunk in self.chunks:
            start, stop = max(first, chunk.rows.start), min(last, chunk.rows.stop)
            if start < stop:
                rows, behind = slice(start - first, stop - first), start - chunk.rows.start
                chunks.append(Chunk(chunk.cache, rows, chunk.known_length, chunk.behind + behind))
        output_rows, read_rows = (
            tuple(row - first for row in rows if first <= row < last)
            for rows in (self.output_rows, self.read_rows)
        )
        return Batch(self.token_ids_T[first:last], tuple(chunks), output_rows, read_rows)
