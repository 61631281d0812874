"""Whole layers that leave the TEE in one call; the service keeps their keys and values.

What a sequence has at a service is a *session*. The TEE knows how many tokens it has, and says so
in every call: a service that has fewer has lost the session, and the engine computes all of the
sequence's tokens once more. Nothing checks what comes back but its form.
"""

import struct
import weakref
from collections import deque
from collections.abc import Iterator
from functools import lru_cache
from itertools import groupby
from typing import NamedTuple, cast

import torch

from protocol.channel import Channel
from protocol.errors import ErrorCode, LimitError, ServiceError, SessionLostError, TsqpError
from protocol.messages import SESSION_BYTES, SegmentRequest
from protocol.model.config import ModelConfig
from protocol.prepared import Payloads, PreparedRequest
from protocol.tensors import WireTensor, raw_bytes, short_name
from tee_side.model.batch import Batch, Chunk, KVCache
from tee_side.policy.placement import AttentionWindow, Segment
from tee_side.protect.masking import MaskRules
from tee_side.protect.masks.mask import Masked, MaskKey, in_the_clear
from tee_side.protect.randomness import Randomness
from tee_side.protect.verification import UNVERIFIED
from tee_side.remote.call import MAX_PREPARED, CallPlan, CallSettings, ChannelsAt, carry_out, turn
from tee_side.remote.services.replicas import Replicas

_NO_SESSION = bytes(SESSION_BYTES)
_PART_WORDS = 7
# Of no rows: behind the name of a session that nothing needs any more.
_ENDED = bytes(8 * _PART_WORDS - SESSION_BYTES)
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
    layers = range(segment.first, segment.last + 1)
    parts = [list(part) for _, part in groupby(layers, lambda layer: id(channels_at(layer)[0]))]
    return [
        segment._replace(first=part[0], last=part[-1], head=segment.head and part is parts[-1])
        for part in parts
    ]


class _Rows(NamedTuple):
    """What a segment is called with: all rows [T, D], whose they are, and which are wanted."""

    h_TD: torch.Tensor
    batch: Batch
    rows: list[int]


class SegmentCall:
    """The call for a segment's layers, all at one service.

    GPU sees: the rows, as the mask leaves them, and what they are of: which session, from which
    token on. It computes and keeps keys and values from them. Raises SessionLostError, after which
    the sequences of the batch begin anew; LimitError where the service has no memory for them;
    ReplyError where no other service is left; MaskError, and the channel's errors.
    """

    def __init__(
        self,
        config: ModelConfig,
        settings: CallSettings,
        sessions: Sessions,
        key: MaskKey | None,
        segment: Segment,
    ) -> None:
        self._segment, self._sessions, self._key = segment, sessions, key
        self._rules = MaskRules(segment.placed.mask)
        hides = key and key.hide_states and (key.unmask_logits or not segment.head)
        if segment.placed.mask is not None and not hides:
            self._rules.refuse("segment", "no key of its own", "the key that tsqp provision wrote")
        self._channel: Channel = settings.channels_at(segment.first)[0]
        # Behind the last layer nobody looks at the other rows.
        self._ends = segment.last == config.num_hidden_layers - 1
        columns = config.vocab_size if segment.head else config.hidden_size
        window = segment.placed.window or AttentionWindow.model_construct(recent=0)

        @lru_cache(MAX_PREPARED)
        def requests(
            shapes: tuple[tuple[int, ...], ...], dtypes: tuple[torch.dtype, ...]
        ) -> tuple[PreparedRequest, ...]:
            hidden, parts, outputs = (
                WireTensor(short_name(dtype), shape, b"")
                for shape, dtype in zip(shapes, dtypes, strict=True)
            )
            message = SegmentRequest(
                first_layer=segment.first,
                last_layer=segment.last,
                hidden_states=hidden,
                parts=parts,
                outputs=outputs,
                lm_head=segment.head,
                sinks=window.sinks,
                recent=window.recent,
            )
            return (PreparedRequest(message, (*outputs.shape, columns), hidden.dtype),)

        self._plan = CallPlan(
            operator="segment",
            layer=segment.first,
            channels=(self._channel,),
            encode=lambda operand: (operand, None),
            hide=self._hide,
            requests=requests,
            rules=self._rules,
            shape=lambda operand: (len(operand.rows), columns),
            check=UNVERIFIED,
            decode=lambda y, _: y,
            timeout_s=settings.timeout_s,
            clock=settings.clock("segment", segment.first),
        )

    async def __call__(self, h_TD: torch.Tensor, batch: Batch) -> torch.Tensor:
        """Return the rows [T, D]; behind the last layer those wanted alone, or their logits."""
        first, last = self._segment.first, self._segment.last
        for chunk in {chunk.cache: chunk for chunk in reversed(batch.chunks)}.values():
            # The service needs the rows of one sequence in order: those of this request are.
            while not chunk.follows(first):
                await turn()
        wanted = batch.wanted_rows if self._ends else list(range(len(h_TD)))
        # Each once, and at least one.
        rows = sorted({*wanted}) or [len(h_TD) - 1]
        try:
            output = await carry_out(self._plan, _Rows(h_TD, batch, rows))
        except ServiceError as error:
            raise self._refused(error, batch) from None
        for chunk in batch.chunks:
            for layer in range(first, last + 1):
                chunk.cache.written[layer] = chunk.behind + chunk.tokens
        return output if rows == wanted else output[[rows.index(row) for row in wanted]]

    def _hide(self, operand: _Rows) -> Masked:
        """Mask all rows [T, D]; with whose they are, and which are wanted."""
        (h_TD, batch, rows), key = operand, self._key
        masked = in_the_clear(h_TD)
        if key is not None and key.hide_states is not None:
            masked = key.hide_states(h_TD, self._sessions.noise(h_TD, batch))
        self._rules.check_sent("segment", h_TD, masked)
        parts = b"".join(
            _part(chunk, self._sessions.name(chunk.cache)) for chunk in batch.chunks
        ) + b"".join(session + _ENDED for session in self._sessions.ended())
        parts_P7 = torch.frombuffer(bytearray(parts), dtype=torch.int64).view(-1, _PART_WORDS)
        sent = cast("torch.Tensor", masked.sent[0])  # seeds are refused here
        unmask = masked.unmask
        if self._segment.head and key is not None and key.unmask_logits is not None:
            unmask = key.unmask_logits
        return Masked((Payloads((sent, parts_P7, torch.tensor(rows))),), unmask)

    def _refused(self, error: ServiceError, batch: Batch) -> TsqpError:
        """Return what a service's refusal means for the sequences; those that it lost begin anew.

        Which it lost it does not say. One that does so again and again is not asked first any more.
        """
        where = f"keys and values at {self._channel.endpoint}"
        caches = {chunk.cache: None for chunk in batch.chunks}
        if error.code is ErrorCode.SESSIONS_FULL:
            return LimitError(
                where,
                f"{len(caches)} sequences, for which it has no memory",
                "fewer, or shorter ones (gpu-service --sessions-mib, --session-client-mib)",
            )
        if error.code is not ErrorCode.UNKNOWN_SESSION:
            return error
        for cache in caches:
            cache.lose()
        if isinstance(self._channel, Replicas) and max(c.losses for c in caches) >= _MOST_LOSSES:
            self._channel.turn_away()
        return SessionLostError(
            where,
            "none of a sequence, which begins anew",
            "all so far (gpu-service --sessions-mib, --session-ttl-s)",
        )


def _part(chunk: Chunk, session: bytes) -> bytes:
    """Encode one row of `SegmentRequest.parts`."""
    start, parent = chunk.start, chunk.cache.parent
    # Whatever else the parent has become since, its first tokens are the same.
    begins_with = parent[0].session if parent is not None and parent[1] == start else _NO_SESSION
    return session + struct.pack("<3q", start, chunk.tokens, chunk.known_length) + begins_with
