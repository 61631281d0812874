"""A request of tensors whose header is written once, what a good reply says, and what came of it.

A forward pass sends the same few hundred requests again and again: only the request id, the
deadline and the tensors' numbers are new. A request of a site and row count is prepared once, sent
by `Channel.start`, and a reply with exactly the expected header needs no decoding.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias

import numpy
import torch

from protocol import native
from protocol.encoding import REPLY, REQUEST, HeaderLayout, reply_template, request_template
from protocol.errors import ErrorCode, ProtocolError, ReplyError
from protocol.messages import (
    SEED_SHAPE,
    Preparable,
    Response,
    SeededRingLinearRequest,
    TensorReply,
    Timing,
)
from protocol.stream_wire import layout
from protocol.tensors import (
    Buffer,
    WireTensor,
    from_torch,
    raw_bytes,
    short_name,
    to_torch,
    torch_dtype,
)

_SHAPE = struct.Struct("5q")
# A head that is longer is not taken by compiled code (message.h).
_MAX_HEAD_BYTES = 1024


class MessageShape:
    """A message of which all but a few numbers and a tensor is known before, for compiled code.

    `protocol/native/message.h` says how it is laid out in memory. `address`: of that, 0 where there
    is no compiled code for it. `total_bytes`: of the message, as it lies in a stream or a slot, at
    whose end the tensor is.
    """

    def __init__(self, numbers: HeaderLayout, template: bytes, payload_bytes: int) -> None:
        header = numbers.header(template, *(0 for _ in numbers.places))
        (first, _), gaps, self.total_bytes = layout((len(header), payload_bytes))
        head = gaps[0] + header + gaps[1]
        places = [first.start + place for place in numbers.places]
        content = _SHAPE.pack(len(head), payload_bytes, *places, *([0] * (3 - len(places)))) + head
        self._kept, self.payload_bytes = numpy.frombuffer(content, numpy.uint8), payload_bytes
        fits = native.library is not None and len(head) <= _MAX_HEAD_BYTES
        self.address: int = self._kept.ctypes.data if fits else 0


@dataclass(slots=True, eq=False)
class Exchange:
    """One request with its reply, and what it cost; not frozen, as that takes a microsecond more.

    Bytes count every frame, header included. `elapsed_ns` runs from handing the request to the
    transport to having received the reply; `timing` is the service's own claim. `sent_ns` is when
    the request was handed over, on the clock of `time.perf_counter_ns`; its encoding had begun
    `encode_ns` before. `endpoint`: of the service that answered. `output`: in place of `response`,
    where the reply to a prepared request is exactly the expected one: its tensor. `lent`: that lies
    in memory which the service may still write to, as the request says that it is read once.
    """

    response: Response | None = None
    bytes_sent: int = 0
    bytes_received: int = 0
    encode_ns: int = 0
    elapsed_ns: int = 0
    decode_ns: int = 0
    timing: Timing | None = None
    sent_ns: int = 0
    endpoint: str = ""
    output: torch.Tensor | None = None
    lent: bool = False


@dataclass(slots=True)
class Traffic:
    """Running totals of a channel: finished round trips, and bytes of all frames."""

    round_trips: int = 0
    bytes_sent: int = 0
    bytes_received: int = 0


class Payloads(tuple[torch.Tensor, ...]):
    """The tensors of a message that has several, in the order of its fields."""

    __slots__ = ()

    @property
    def shape(self) -> tuple[tuple[int, ...], ...]:
        """Of each tensor."""
        return tuple(tuple(tensor.shape) for tensor in self)

    @property
    def dtype(self) -> tuple[torch.dtype, ...]:
        """Of each tensor."""
        return tuple(tensor.dtype for tensor in self)


# What fills a prepared request: its tensor, or its tensors.
Payload: TypeAlias = torch.Tensor | Payloads


class PreparedRequest:
    """A request but for its id, its deadline and its tensors' numbers.

    `message`: what it was made from; `method`; `shape` of the payload, of several tensors all, and
    `dtype` (a short name) of the first; `template`: the header behind the id and deadline;
    `request_bytes`: size of all frames. Of the reply: `reply_shape`, `reply_dtype`,
    `reply_payload_bytes`, `reply_bytes`, and `reply_template` (the header behind the id and
    timing). `sent_as`, `answered_as`: both messages for compiled code, which sends no several
    tensors. `read_once`: the caller says that it reads no element of a reply twice, so that one may
    lie where the service can still write.
    """

    read_once = False

    def __init__(self, message: Preparable, reply_shape: tuple[int, ...], reply_dtype: str) -> None:
        """Prepare requests like this message.

        Of the message's tensors only shape and dtype count, not their bytes. `reply_shape` and
        `reply_dtype` (a short name): of the tensor that a good reply holds.
        """
        self.message, self.method = message, message.method
        self._tensors = {name: one for name, one in message if isinstance(one, WireTensor)}
        sent = list(self._tensors.values())
        self._forms = [(one.shape, torch_dtype(one.dtype)) for one in sent]
        shapes = tuple(one.shape for one in sent)
        self.shape: tuple[Any, ...] = shapes if shapes[1:] else shapes[0]
        self.dtype = sent[0].dtype
        self.template = request_template(message, [b""])
        payload_bytes = sum(one.payload_bytes for one in sent)
        self.request_bytes = REQUEST.head_bytes + len(self.template) + payload_bytes
        expected = WireTensor(reply_dtype, reply_shape, b"")
        self.reply_shape, self.reply_dtype = reply_shape, reply_dtype
        self.reply_payload_bytes = expected.payload_bytes
        self.reply_template = reply_template(self.method, TensorReply(output=expected), [b""])
        self.torch_dtype, self.reply_torch_dtype = torch_dtype(self.dtype), torch_dtype(reply_dtype)
        self.reply_bytes = REPLY.head_bytes + len(self.reply_template) + self.reply_payload_bytes
        self.sent_as = MessageShape(REQUEST, self.template, sent[0].payload_bytes)
        self.answered_as = MessageShape(REPLY, self.reply_template, self.reply_payload_bytes)

    @cached_property
    def seeded(self) -> PreparedRequest:
        """The same request, and reply, where the words of a `Seed` cross in place of the elements.

        Raises ValueError for what is no RingLinear.
        """
        others = {name: value for name, value in self.message if name not in self._tensors}
        (rows, columns), seed = self.shape, WireTensor(self.dtype, SEED_SHAPE, b"")
        message = SeededRingLinearRequest(**others, rows=rows, columns=columns, seed=seed)
        found = PreparedRequest(message, self.reply_shape, self.reply_dtype)
        found.read_once = self.read_once
        return found

    def payload(self, payload: Payload) -> list[Buffer]:
        """Return the bytes of each tensor, which must be of the prepared shape and dtype.

        Raises ProtocolError.
        """
        tensors = payload if isinstance(payload, Payloads) else (payload,)
        if [(one.shape, one.dtype) for one in tensors] != self._forms:
            got = " and ".join(f"{short_name(one.dtype)} {list(one.shape)}" for one in tensors)
            sent = self._tensors.values()
            wanted = " and ".join(f"{one.dtype} {list(one.shape)}" for one in sent)
            where = f"payload of {self.method}"
            raise ProtocolError(where, got, wanted, code=ErrorCode.INVALID_FIELD)
        return list(map(raw_bytes, tensors))

    def request(self, payload: Payload) -> Preparable:
        """Return the whole message with this payload."""
        tensors = payload if isinstance(payload, Payloads) else (payload,)
        filled = zip(self._tensors, map(from_torch, tensors), strict=True)
        return self.message.model_copy(update=dict(filled))

    def output(self, exchange: Exchange) -> torch.Tensor:
        """Return the tensor of a reply, [*reply_shape] in `reply_dtype`, as a view of its bytes.

        Raises ReplyError for a reply of another kind, shape or dtype.
        """
        if exchange.output is not None:
            return exchange.output
        response = exchange.response
        got = type(response).__name__
        if isinstance(response, TensorReply):
            output = response.output
            if (output.shape, output.dtype) == (self.reply_shape, self.reply_dtype):
                return to_torch(output)
            got = f"{output.dtype} {list(output.shape)}"
        raise ReplyError(
            f"{self.method} reply from {exchange.endpoint}",
            got,
            f"{self.reply_dtype} {list(self.reply_shape)}",
        )
