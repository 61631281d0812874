"""A tensor request whose header is written once, and what a good reply to it says.

A forward pass sends the same few hundred requests again and again: only the request id, the
deadline and the tensor's numbers are new. A request of a site and row count is prepared once, sent
by `Channel.start`, and a reply with exactly the expected header needs no decoding.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

from protocol.encoding import reply_template, request_template
from protocol.errors import ErrorCode, ProtocolError, ReplyError
from protocol.header_numbers import REPLY_HEAD_BYTES, REQUEST_HEAD_BYTES
from protocol.messages import (
    EmbeddingRequest,
    LinearRequest,
    LMHeadRequest,
    RingLinearRequest,
    TensorReply,
)
from protocol.tensors import (
    Buffer,
    WireTensor,
    from_torch,
    raw_bytes,
    short_name,
    to_torch,
)

if TYPE_CHECKING:
    import torch

    from protocol.channel import Exchange

# Requests that carry exactly one tensor.
Preparable: TypeAlias = EmbeddingRequest | LinearRequest | RingLinearRequest | LMHeadRequest

_TENSOR_FIELDS: dict[type[Preparable], str] = {
    EmbeddingRequest: "input_ids",
    LinearRequest: "hidden_states",
    RingLinearRequest: "elements",
    LMHeadRequest: "hidden_states",
}


@dataclass(frozen=True, slots=True, eq=False)
class PreparedRequest:
    """A request but for its id, its deadline and its tensor's numbers. See `prepare`.

    `method`; `shape` and `dtype` (a short name) of the payload, and its size `payload_bytes`;
    `template`: the header behind the id and deadline; `request_bytes`: size of all frames. Of the
    reply: `reply_shape`, `reply_dtype`, `reply_payload_bytes`, `reply_template` (the header behind
    the id and timing), and `reply_bytes`, the size of all frames of the expected reply.
    """

    method: str
    shape: tuple[int, ...]
    dtype: str
    payload_bytes: int
    template: bytes
    request_bytes: int
    reply_shape: tuple[int, ...]
    reply_dtype: str
    reply_payload_bytes: int
    reply_template: bytes
    reply_bytes: int
    _message: Preparable = field(repr=False)

    def payload(self, tensor: torch.Tensor) -> Buffer:
        """Return the bytes of a tensor, which must be of the prepared shape and dtype.

        Raises ProtocolError.
        """
        if tensor.shape != self.shape or short_name(tensor.dtype) != self.dtype:
            raise ProtocolError(
                f"payload of {self.method}",
                got=f"{short_name(tensor.dtype)} {list(tensor.shape)}",
                expected=f"{self.dtype} {list(self.shape)}",
                code=ErrorCode.INVALID_FIELD,
            )
        return raw_bytes(tensor)

    def request(self, tensor: torch.Tensor) -> Preparable:
        """Return the whole message with this payload, for `Channel.submit`."""
        name = _TENSOR_FIELDS[type(self._message)]
        return self._message.model_copy(update={name: from_torch(tensor)})

    def output(self, exchange: Exchange) -> torch.Tensor:
        """Return the tensor of a reply, [*reply_shape] in `reply_dtype`, as a view of its bytes.

        Raises ReplyError for a reply of another kind, shape or dtype.
        """
        response = exchange.response
        if not isinstance(response, TensorReply):
            got = type(response).__name__
        else:
            output = response.output
            if output.shape == self.reply_shape and output.dtype == self.reply_dtype:
                return to_torch(output)
            got = f"{output.dtype} {list(output.shape)}"
        raise ReplyError(
            f"{self.method} reply from {exchange.endpoint}",
            got=got,
            expected=f"{self.reply_dtype} {list(self.reply_shape)}",
        )


def prepare(message: Preparable, reply_shape: tuple[int, ...], reply_dtype: str) -> PreparedRequest:
    """Prepare requests like this message.

    Of the message's tensor only shape and dtype count, not its bytes. `reply_shape` and
    `reply_dtype` (a short name): of the tensor that a good reply holds.
    """
    tensor: WireTensor = getattr(message, _TENSOR_FIELDS[type(message)])
    template = request_template(message, [b""])
    expected = WireTensor(reply_dtype, reply_shape, b"")
    expected_template = reply_template(message.method, TensorReply(output=expected), [b""])
    return PreparedRequest(
        method=message.method,
        shape=tensor.shape,
        dtype=tensor.dtype,
        payload_bytes=tensor.payload_bytes,
        template=template,
        request_bytes=REQUEST_HEAD_BYTES + len(template) + tensor.payload_bytes,
        reply_shape=reply_shape,
        reply_dtype=reply_dtype,
        reply_payload_bytes=expected.payload_bytes,
        reply_template=expected_template,
        reply_bytes=REPLY_HEAD_BYTES + len(expected_template) + expected.payload_bytes,
        _message=message,
    )
