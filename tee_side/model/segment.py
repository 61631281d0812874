"""Whole layers that leave the TEE in one call; the service keeps their keys and values.

What a sequence has at a service is a *session*. The TEE knows how many tokens it has, and says so
in every call: a service that has fewer has lost the session, and the engine computes all of the
sequence's tokens once more. Nothing checks what comes back but its form.
"""

from __future__ import annotations

import struct
import time
import weakref
from collections import deque
from collections.abc import Iterator
from typing import cast

import torch

from protocol.channel import Channel
from protocol.errors import (
    ErrorCode,
    LimitError,
    ReplyError,
    ServiceError,
    SessionLostError,
    TsqpError,
)
from protocol.messages import SESSION_BYTES, SegmentRequest
from protocol.model.config import ModelConfig
from protocol.prepared import reply_tensor
from protocol.tensors import WireTensor, from_torch, raw_bytes
from tee_side.model.batch import Batch
from tee_side.model.kv_cache import KVCache
from tee_side.policy.placement import AttentionWindow, Segment
from tee_side.protect.masking import MaskRules
from tee_side.protect.masks.mask import KeyedSegment, Masked, as_it_is
from tee_side.protect.randomness import Randomness
from tee_side.remote.call import submit, time_left, turn
from tee_side.remote.linear import CallSettings, ChannelsAt
from tee_side.remote.services.replicas import Replicas

_NO_SESSION = bytes(SESSION_BYTES)
_PART_WORDS = 7
_PART_BYTES = 8 * _PART_WORDS
_MOST_ENDED = 64
# How often a service may lose a sequence before its next token, and be asked again.
_MOST_LOSSES = 3


class Sessions:
    """The sessions of one segment in a run, whatever micro-batches name them."""

    def __init__(self) -> None:
        self._ended: deque[bytes] = deque()
        self._noise = Randomness()
        self._named: weakref.WeakKeyDictionary[KVCache, bytes] = weakref.WeakKeyDictionary()

    def name(self, cache: KVCache) -> bytes:
        """Return the session of a cache, and forget it at the service when the cache ends."""
        if self._named.get(cache) != cache.session:
            self._named[cache] = cache.session
            cache.at_end.append(weakref.finalize(cache, self._ended.append, cache.session))
        return cache.session

    def noise(self, h_TD: torch.Tensor, batch: Batch) -> Iterator[Randomness]:
        """Yield for each row what its noise is drawn from: the same again for the same row.

        It depends on the row, its position and its sequence. A service that loses sessions gets no
        second noise of a row to average; a wrong guess has another one than what takes its place.
        """
        for chunk in batch.chunks:
            for position, row_D in enumerate(h_TD[chunk.rows], chunk.start):
                place = chunk.cache.identity + position.to_bytes(8)
                yield self._noise.derive(place + raw_bytes(row_D))

    def ended(self) -> Iterator[bytes]:
        """Yield sessions that nothing needs any more, each once."""
        for _ in range(min(_MOST_ENDED, len(self._ended))):
            yield self._ended.popleft()


def cut(segment: Segment, channels_at: ChannelsAt) -> list[Segment]:
    """Cut a segment where another service has the next layer."""
    starts = [
        layer
        for layer in range(segment.first, segment.last + 1)
        if layer == segment.first or channels_at(layer)[0] is not channels_at(layer - 1)[0]
    ]
    ends = [*(start - 1 for start in starts[1:]), segment.last]
    return [
        segment._replace(first=first, last=last, head=segment.head and last == segment.last)
        for first, last in zip(starts, ends, strict=True)
    ]


class SegmentCall:
    """The call for a segment's layers, all at one service.

    GPU sees: the rows, as the mask leaves them, and what they are of: which session, from which
    token on. It computes and keeps keys and values from them. Raises SessionLostError, after which
    the sequences of the batch begin anew; LimitError where the service has no memory for them;
    ReplyError where no other service is left; MaskError, and the channel's errors.
    """

    def __init__(
        self,
        segment: Segment,
        config: ModelConfig,
        settings: CallSettings,
        sessions: Sessions,
        keyed: KeyedSegment | None,
    ) -> None:
        self._segment, self._settings, self._sessions = segment, settings, sessions
        self._keyed = keyed
        self._rules = MaskRules(segment.placed.mask)
        self._channel: Channel = settings.channels_at(segment.first)[0]
        self._clock = settings.clock("segment", segment.first)
        self._window = segment.placed.window or AttentionWindow.model_construct(recent=0)
        # Behind the last layer nobody looks at the other rows.
        self._ends = segment.last == config.num_hidden_layers - 1
        self._columns = config.vocab_size if segment.head else config.hidden_size

    async def __call__(self, h_TD: torch.Tensor, batch: Batch) -> torch.Tensor:
        """Return the rows [T, D]; behind the last layer those wanted alone, or their logits."""
        clock, keyed = self._clock, self._keyed
        first, last = self._segment.first, self._segment.last
        for chunk in {chunk.cache: chunk for chunk in reversed(batch.chunks)}.values():
            # The service needs the rows of one sequence in order: those of this request are.
            while not chunk.follows(first):
                await turn()
        clock.called()
        clock.mark("mask")
        masked = Masked((h_TD,), as_it_is)
        if keyed is not None:
            masked = keyed.mask(h_TD, self._sessions.noise(h_TD, batch))
        self._rules.check_sent("segment", h_TD, len(h_TD), masked)
        wanted = batch.wanted_rows if self._ends else list(range(len(h_TD)))
        # Each once, and at least one.
        rows = sorted({*wanted}) or [len(h_TD) - 1]
        request = self._request(masked, batch, rows)
        clock.mark(None)
        y = await self._ask(request, batch)
        clock.mark("unmask")
        unmask = keyed.unmask_logits if keyed and self._segment.head else masked.unmask
        output = unmask(y)
        self._rules.check_unmasked("segment", output, tuple(y.shape), h_TD.dtype)
        clock.mark(None)
        for chunk in batch.chunks:
            chunk.cache.note_written(range(first, last + 1), chunk.behind + chunk.tokens)
        return output if rows == wanted else output[[rows.index(row) for row in wanted]]

    def _request(self, masked: Masked, batch: Batch, outputs: list[int]) -> SegmentRequest:
        parts = b"".join(
            _part(
                self._sessions.name(chunk.cache),
                (chunk.start, chunk.tokens, chunk.known_length),
                chunk.cache.parent,
            )
            for chunk in batch.chunks
        )
        parts += b"".join(_part(ended, (0, 0, 0), None) for ended in self._sessions.ended())
        sent = cast("torch.Tensor", masked.sent[0])  # seeds are refused here
        return SegmentRequest(
            first_layer=self._segment.first,
            last_layer=self._segment.last,
            hidden_states=from_torch(sent),
            parts=WireTensor("int64", (len(parts) // _PART_BYTES, _PART_WORDS), parts),
            outputs=from_torch(torch.tensor(outputs)),
            lm_head=self._segment.head,
            sinks=self._window.sinks,
            recent=self._window.recent,
        )

    async def _ask(self, request: SegmentRequest, batch: Batch) -> torch.Tensor:
        """Return the numbers of the reply [N, D] or [N, V], in the request's dtype."""
        until = time.monotonic() + self._settings.longest_s
        left_s: float | None = None
        shape = (request.outputs.shape[0], self._columns)
        while True:
            try:
                exchange = await submit(self._channel, request, left_s)
            except ServiceError as error:
                raise self._refused(error, batch) from None
            self._clock.exchanged([exchange])
            self._clock.mark("verify")
            try:
                y = reply_tensor(exchange, request.method, shape, request.hidden_states.dtype)
            except ReplyError as error:
                self._channel.distrust(exchange, error)
                left_s = time_left("segment", until)
            else:
                self._clock.mark(None)
                return y

    def _refused(self, error: ServiceError, batch: Batch) -> TsqpError:
        """Return what a service's refusal means for the sequences; those that it lost begin anew.

        Which it lost it does not say. One that does so again and again is not asked first any more.
        """
        where = self._channel.endpoint
        caches = {chunk.cache: None for chunk in batch.chunks}
        if error.code is ErrorCode.SESSIONS_FULL:
            got = f"{len(caches)} sequences, for which it has no memory"
            expected = "fewer, or shorter ones (gpu-service --sessions-mib, --session-client-mib)"
            return LimitError(f"keys and values at {where}", got=got, expected=expected)
        if error.code is not ErrorCode.UNKNOWN_SESSION:
            return error
        got = "none of a sequence, which begins anew"
        expected = "all so far (gpu-service --sessions-mib, --session-ttl-s)"
        lost = SessionLostError(f"keys and values at {where}", got=got, expected=expected)
        for cache in caches:
            cache.lose()
        if isinstance(self._channel, Replicas) and max(c.losses for c in caches) >= _MOST_LOSSES:
            self._channel.turn_away()
        return lost


def _part(
    session: bytes, numbers: tuple[int, int, int], parent: tuple[KVCache, int] | None
) -> bytes:
    """Encode one row of `SegmentRequest.parts`."""
    start = numbers[0]
    # Whatever else the parent has become since, its first tokens are the same.
    begins_with = parent[0].session if parent is not None and parent[1] == start else _NO_SESSION
    return session + struct.pack("<3q", *numbers) + begins_with
