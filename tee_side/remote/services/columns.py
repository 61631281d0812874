"""A channel to services that hold a part of every weight's output columns each.

All of them get the same bytes, so a mask hides from each what it hides from one that has all. Their
outputs are put side by side, module by module; those of an embedding, zeros for ids that are
another's, are added up.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch

from protocol.channel import Channel
from protocol.errors import ReplyError, TsqpError
from protocol.messages import EmbeddingRequest, LMHeadRequest, Request, RingLMHeadRequest
from protocol.model.columns import part_of
from protocol.model.config import ModelConfig
from protocol.prepared import Exchange, PreparedRequest


class _Parted(NamedTuple):
    """A prepared request for each part. `widths`: of the modules in each reply; None: of a sum."""

    requests: tuple[PreparedRequest, ...]
    widths: tuple[list[int], ...] | None

    def join(self, outputs: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the whole output."""
        if self.widths is None:
            return sum(outputs[1:], outputs[0])
        if len(self.widths[0]) > 1:
            pieces = [y.split_with_sizes(w, -1) for y, w in zip(outputs, self.widths, strict=True)]
            outputs = [piece for of_module in zip(*pieces, strict=True) for piece in of_module]
        return torch.cat(tuple(outputs), -1)


@dataclass(slots=True, eq=False)
class Joined(Exchange):
    """A request that several services have part in; `parts`: with each, in order of columns.

    `output`: None where one of the replies is of another form than was asked for.
    """

    parts: tuple[tuple[Channel, PreparedRequest, Exchange], ...] = ()


class ColumnParts(Channel):
    """A `Channel` over the parts, in order of their columns. Raises what they do.

    A product of activations needs no weight, and is computed by the first of them.
    """

    def __init__(self, parts: Sequence[Channel], config: ModelConfig) -> None:
        self.endpoint = " and ".join(part.endpoint for part in parts)
        self.traffic = parts[0].traffic  # of all services together
        self._parts, self._config = tuple(parts), config
        self._parted: WeakKeyDictionary[PreparedRequest, _Parted] = WeakKeyDictionary()
        self._in_flight: dict[int, tuple[_Parted | None, list[int]]] = {}
        self._last_id = 0

    def submit(self, request: Request, timeout_s: float | None = None) -> int:
        """See `Channel.submit`; for what is computed without weights."""
        return self._begun(None, [self._parts[0].submit(request, timeout_s)])

    def start(
        self, prepared: PreparedRequest, payload: torch.Tensor, timeout_s: float | None = None
    ) -> int:
        """See `Channel.start`. GPU sees: the payload, at each of the services."""
        parted = self._parted.get(prepared)
        if parted is None:
            parted = self._parted[prepared] = self._part(prepared)
        begun: list[int] = []
        try:
            for channel, request in zip(self._parts, parted.requests, strict=True):
                begun.append(channel.start(request, payload, timeout_s))
        except BaseException:
            self._abandon(begun)
            raise
        return self._begun(parted, begun)

    def _begun(self, parted: _Parted | None, begun: list[int]) -> int:
        self._last_id += 1
        self._in_flight[self._last_id] = parted, begun
        return self._last_id

    def wait(self, request_id: int) -> Exchange:
        """See `Channel.wait`. Bytes of a `Joined` are added up; the last reply ends it."""
        parted, begun = self._in_flight.pop(request_id)
        exchanges: list[Exchange] = []
        try:
            for channel, inner_id in zip(self._parts, begun, strict=False):
                exchanges.append(channel.wait(inner_id))
        except BaseException:
            self._abandon(begun)
            raise
        return exchanges[0] if parted is None else self._joined(parted, exchanges)

    def _joined(self, parted: _Parted, exchanges: Sequence[Exchange]) -> Joined:
        started_ns = time.perf_counter_ns()
        parts = tuple(zip(self._parts, parted.requests, exchanges, strict=True))
        try:
            output = parted.join([request.output(exchange) for _, request, exchange in parts])
        except ReplyError:
            output = None
        last = max(exchanges, key=lambda one: one.sent_ns + one.elapsed_ns)
        sent_ns, joining_ns = exchanges[0].sent_ns, time.perf_counter_ns() - started_ns
        return Joined(
            bytes_sent=sum(one.bytes_sent for one in exchanges),
            bytes_received=sum(one.bytes_received for one in exchanges),
            encode_ns=sum(one.encode_ns for one in exchanges),
            elapsed_ns=last.sent_ns + last.elapsed_ns - sent_ns,
            decode_ns=sum(one.decode_ns for one in exchanges) + joining_ns,
            timing=last.timing,
            sent_ns=sent_ns,
            endpoint=" and ".join([one.endpoint for one in exchanges]),
            output=output,
            parts=parts,
        )

    def _part(self, prepared: PreparedRequest) -> _Parted:
        """Prepare a request for each part, with the reply that it gives."""
        message, config, count = prepared.message, self._config, len(self._parts)
        if isinstance(message, EmbeddingRequest):
            return _Parted((copy(prepared),) * count, None)  # itself would keep itself alive
        sizes = (
            [config.vocab_size]
            if isinstance(message, LMHeadRequest | RingLMHeadRequest)
            else [config.module_shape(module)[0] for module in message.module_names]
        )
        widths = tuple(
            [len(range(size)[part_of(size, part, count)]) for size in sizes]
            for part in range(count)
        )
        rows, dtype = prepared.reply_shape[:-1], prepared.reply_dtype
        requests = (PreparedRequest(message, (*rows, sum(of_part)), dtype) for of_part in widths)
        return _Parted(tuple(requests), widths)

    def _abandon(self, begun: Sequence[int]) -> None:
        for channel, inner_id in zip(self._parts, begun, strict=False):
            channel.abandon(inner_id)

    def abandon(self, request_id: int) -> None:
        """See `Channel.abandon`."""
        _, begun = self._in_flight.pop(request_id, (None, ()))
        self._abandon(begun)

    def distrust(self, exchange: Exchange, error: TsqpError) -> None:
        """See `Channel.distrust`; of a `Joined`, which only its parts can tell, all services."""
        if not isinstance(exchange, Joined):
            self._parts[0].distrust(exchange, error)
        else:
            for channel, _, one in exchange.parts:
                channel.distrust(one, error)

    def close(self) -> None:
        """See `Channel.close`."""
        for channel in self._parts:
            channel.close()
