"""A request as it is sent, and a reply as it is received: the framed encoding.

A multipart message. Frame 0 is a small msgpack map

    request  {request_id, timeout_ms, version, method, request}
    reply    {request_id, timing, version, method, status, response | error}

in which every tensor is `{dtype, shape, frame}`, pointing at a raw frame of its own that is never
copied (`protocol.framed`). The order is free; in ours the numbers come first and the rest, the
*template*, is the same for every request of its kind (`protocol.header_numbers`). The service's
half, and the other encoding of the same schema, are in `gpu_side.encoding`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field

from protocol.codec import MAX_REPLY_CONTAINERS, unpack
from protocol.errors import ErrorCode, ProtocolError
from protocol.framed import read_framed, to_framed
from protocol.header_numbers import REQUEST, pack_template
from protocol.messages import (
    PROTOCOL_VERSION,
    REQUEST_TYPES,
    Request,
    Response,
    Timing,
    response_type,
)
from protocol.tensors import Buffer
from protocol.validation import validate

DEFAULT_MAX_MESSAGE_BYTES = 512 * 1024 * 1024
MAX_REPLY_HEADER_BYTES = 2 * 1024 * 1024
MAX_REPLY_FRAMES = 2 * 4096 + 4


class _ReplyHeader(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)
    version: int
    request_id: Annotated[int, Field(ge=0, lt=2**63)]
    method: str
    status: Literal["success", "error"]
    response: dict[str, Any] | None = None
    error: ErrorCode | None = Field(default=None, strict=False)
    timing: Timing | None = None


class Reply(NamedTuple):
    """A decoded framed reply: exactly one of `response` and `error` is set."""

    request_id: int
    method: str
    response: Response | None
    error: ErrorCode | None
    timing: Timing | None


def request_template(message: Request, frames: list[Buffer]) -> bytes:
    """Encode a request's header behind its numbers, and append its tensors' frames."""
    body = to_framed(message, frames)
    return pack_template({"version": PROTOCOL_VERSION, "method": message.method, "request": body})


def reply_template(method: str, result: Response | ErrorCode, frames: list[Buffer]) -> bytes:
    """Encode a reply's header behind its numbers, and append its tensors' frames."""
    fields: dict[str, Any] = {"version": PROTOCOL_VERSION, "method": method}
    if isinstance(result, ErrorCode):
        fields |= {"status": "error", "error": result.value}
    else:
        fields |= {"status": "success", "response": to_framed(result, frames)}
    return pack_template(fields)


def encode_request(message: Request, request_id: int, timeout_ms: int) -> list[Buffer]:
    """Encode a request; tensor data is referenced, not copied."""
    frames: list[Buffer] = [b""]
    template = request_template(message, frames)
    frames[0] = REQUEST.header(template, request_id, timeout_ms)
    return frames


def decode_reply(frames: Sequence[Buffer]) -> Reply:
    """Decode and check a framed reply. Raises ProtocolError."""
    if not 1 <= len(frames) <= MAX_REPLY_FRAMES:
        raise ProtocolError(
            "reply",
            f"{len(frames)} frames",
            f"1 to {MAX_REPLY_FRAMES}",
            code=ErrorCode.MALFORMED_MESSAGE,
        )
    envelope = unpack(
        frames[0],
        where="reply",
        max_bytes=MAX_REPLY_HEADER_BYTES,
        max_containers=MAX_REPLY_CONTAINERS,
    )
    header = validate(_ReplyHeader, envelope, "reply")
    if header.version != PROTOCOL_VERSION:
        raise ProtocolError(
            "reply.version",
            str(header.version),
            str(PROTOCOL_VERSION),
            code=ErrorCode.UNSUPPORTED_VERSION,
        )
    good = header.status == "success"
    if (header.response is not None) != good or (header.error is not None) == good:
        raise ProtocolError(
            "reply",
            f"status {header.status} with {len(envelope)} keys",
            "response with success, error with error",
            code=ErrorCode.MALFORMED_MESSAGE,
        )
    response: Response | None = None
    if header.response is not None:
        # A name of ours, or none: what a service calls its reply is not repeated in messages.
        where = header.method if header.method in REQUEST_TYPES else "reply"
        response = read_framed(response_type(header.method), header.response, frames, where)
    return Reply(header.request_id, header.method, response, header.error, header.timing)
