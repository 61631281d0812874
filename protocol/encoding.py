"""The two encodings of one schema.

*Framed* (our client): a multipart message. Frame 0 is a small msgpack map

    request  {request_id, timeout_ms, version, method, request}
    reply    {request_id, timing, version, method, status, response | error}

in which every tensor is `{dtype, shape, frame}`, pointing at a raw frame of its own that is never
copied (`protocol.framed`). The order is free; in ours a header that came before is cheap to read
(`protocol.header_memo`). *Inline* (the published schema, any REQ socket in any language): one
msgpack map `{method, request}` or `{status, response | error}` with the tensor bytes inside
(`protocol.inline`). A message is framed if and only if its map has the key `version`.

Decoding a request goes in two stages, so that a request with a bad body still gets an error reply
under its own id: `open_request` reads the envelope, `read_request` the message in it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field

from protocol.codec import (
    MAX_HEADER_BYTES,
    MAX_REPLY_CONTAINERS,
    MAX_REQUEST_CONTAINERS,
    pack,
    unpack,
)
from protocol.errors import ErrorCode, ProtocolError, describe_untrusted
from protocol.framed import framed_key, read_framed, to_framed
from protocol.header_memo import HeaderMemo, KnownMessage, known_message
from protocol.header_numbers import (
    pack_template,
    reply_header,
    request_header,
    split_reply,
    split_request,
)
from protocol.inline import read_inline, to_inline
from protocol.messages import (
    MAX_TIMEOUT_MS,
    MAX_TIMING_US,
    PROTOCOL_VERSION,
    REQUEST_TYPES,
    Request,
    Response,
    TensorReply,
    Timing,
    response_type,
)
from protocol.tensors import Buffer
from protocol.validation import validate

DEFAULT_MAX_MESSAGE_BYTES = 512 * 1024 * 1024
MAX_REQUEST_FRAMES = 4
# Of a request, received at all: more than it may have, so that a slightly wrong one gets its error
# reply.
MAX_FRAMES = 64
MAX_REPLY_HEADER_BYTES = 2 * 1024 * 1024
MAX_REPLY_FRAMES = 2 * 4096 + 4

# The templates of what we send, by what they depend on, and what those of our peers say.
_sent_requests: HeaderMemo[tuple[object, ...], bytes] = HeaderMemo()
_sent_replies: HeaderMemo[tuple[object, ...], bytes] = HeaderMemo()
_known_requests: HeaderMemo[bytes, KnownMessage[Request]] = HeaderMemo()
_known_replies: HeaderMemo[bytes, KnownMessage[Response]] = HeaderMemo()

# Timing(...) with less of pydantic's Python around it, and no less of its checks.
_checked_timing = Timing.__pydantic_validator__.validate_python


class Form(Enum):
    """Which of the two encodings a message came in; the reply goes out in the same."""

    FRAMED = "framed"
    INLINE = "inline"


class EnvelopeError(ProtocolError):
    """A request whose envelope is wrong, but which says enough to be answered in its own form."""

    def __init__(self, error: ProtocolError, form: Form, request_id: int) -> None:
        super().__init__(error.where, got=error.got, expected=error.expected, code=error.code)
        self.form = form
        self.request_id = request_id


class _RequestHeader(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)
    version: int
    request_id: Annotated[int, Field(ge=1, lt=2**63)]
    timeout_ms: Annotated[int, Field(ge=1, le=MAX_TIMEOUT_MS)]
    method: str
    request: dict[str, Any]


class _ReplyHeader(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)
    version: int
    request_id: Annotated[int, Field(ge=0, lt=2**63)]
    method: str
    status: Literal["success", "error"]
    response: dict[str, Any] | None = None
    error: ErrorCode | None = Field(default=None, strict=False)
    timing: Timing | None = None


class OpenedRequest(NamedTuple):
    """A request's envelope; `timeout_ms` is None in the inline form, which has no deadline.

    `known`: what the header was found to say when it came before, None the first time.
    """

    form: Form
    request_id: int
    timeout_ms: int | None
    method: str
    body: Mapping[str, Any]
    frames: Sequence[Buffer]
    known: KnownMessage[Request] | None = None


class Reply(NamedTuple):
    """A decoded framed reply: exactly one of `response` and `error` is set."""

    request_id: int
    method: str
    response: Response | None
    error: ErrorCode | None
    timing: Timing | None


# ------------------------------------------------------------------------------- requests


def encode_request(message: Request, request_id: int, timeout_ms: int) -> list[Buffer]:
    """Encode a request in the framed form; tensor data is referenced, not copied."""
    frames: list[Buffer] = [b""]
    key = framed_key(message, frames)
    template = _sent_requests.recall(key)
    if template is None:
        body = to_framed(message, [b""])
        template = pack_template(
            {"version": PROTOCOL_VERSION, "method": message.method, "request": body}
        )
        _sent_requests.remember(key, template)
    frames[0] = request_header(request_id, timeout_ms, template)
    return frames


def open_request(frames: Sequence[Buffer], max_bytes: int) -> OpenedRequest:
    """Read a request's envelope.

    Raises EnvelopeError, or another ProtocolError for what is no message at all.
    """
    if not 1 <= len(frames) <= MAX_REQUEST_FRAMES:
        raise ProtocolError(
            "request",
            got=f"{len(frames)} frames",
            expected=f"1 to {MAX_REQUEST_FRAMES}",
            code=ErrorCode.MALFORMED_MESSAGE,
        )
    if (known := _open_known(frames)) is not None:
        return known
    limit = max_bytes if len(frames) == 1 else MAX_HEADER_BYTES
    envelope = unpack(
        frames[0], where="request", max_bytes=limit, max_containers=MAX_REQUEST_CONTAINERS
    )
    framed = "version" in envelope
    try:
        return (_open_framed if framed else _open_inline)(envelope, frames)
    except ProtocolError as error:
        given = envelope.get("request_id")
        request_id = given if type(given) is int and 0 < given < 2**63 else 0
        raise EnvelopeError(error, likely_form(frames, envelope), request_id) from None


def _open_known(frames: Sequence[Buffer]) -> OpenedRequest | None:
    """Open a request whose header came before with other numbers; None if it did not."""
    if len(frames) == 1 or (split := split_request(frames[0])) is None:
        return None
    request_id, timeout_ms, template = split
    known = _known_requests.recall(template)
    if known is None or not (0 < request_id < 2**63 and 0 < timeout_ms <= MAX_TIMEOUT_MS):
        return None
    return OpenedRequest(
        Form.FRAMED, request_id, timeout_ms, known.method, known.body, frames, known
    )


def likely_form(frames: Sequence[Buffer], envelope: Mapping[str, Any] | None = None) -> Form:
    """Say in which form to answer a request that is wrong: several frames are ours alone."""
    framed = len(frames) > 1 or (envelope is not None and "version" in envelope)
    return Form.FRAMED if framed else Form.INLINE


def _open_framed(envelope: dict[str, Any], frames: Sequence[Buffer]) -> OpenedRequest:
    if envelope["version"] != PROTOCOL_VERSION:
        raise ProtocolError(
            "request.version",
            got=describe_untrusted(envelope["version"]),
            expected=str(PROTOCOL_VERSION),
            code=ErrorCode.UNSUPPORTED_VERSION,
        )
    header = validate(_RequestHeader, envelope, "request")
    return OpenedRequest(
        Form.FRAMED,
        header.request_id,
        header.timeout_ms,
        header.method,
        header.request,
        frames,
    )


def _open_inline(envelope: dict[str, Any], frames: Sequence[Buffer]) -> OpenedRequest:
    method, body = envelope.get("method"), envelope.get("request")
    if (
        set(envelope) != {"method", "request"}
        or not isinstance(method, str)
        or not isinstance(body, dict)
        or len(frames) != 1
    ):
        raise ProtocolError(
            "request",
            got=f"{len(frames)} frames and a map of {len(envelope)} keys",
            expected="one frame with method (str) and request (map), or a framed request",
            code=ErrorCode.MALFORMED_MESSAGE,
        )
    return OpenedRequest(Form.INLINE, 0, None, method, body, frames)


def read_request(opened: OpenedRequest) -> Request:
    """Decode and check the message in an opened envelope. Raises ProtocolError."""
    if opened.known is not None and (built := opened.known.build(opened.frames)) is not None:
        return built
    cls = REQUEST_TYPES.get(opened.method)
    if cls is None:
        raise ProtocolError(
            "request.method",
            got=describe_untrusted(opened.method),
            expected=f"one of {', '.join(REQUEST_TYPES)}",
            code=ErrorCode.UNKNOWN_METHOD,
        )
    if opened.form is Form.FRAMED:
        message = read_framed(cls, opened.body, opened.frames, opened.method)
        if (split := split_request(opened.frames[0])) is not None:
            known = known_message(opened.method, opened.body, message)
            if known is not None:
                _known_requests.remember(split[-1], known)
        return message
    return read_inline(cls, opened.body, opened.method)


# -------------------------------------------------------------------------------- replies


def encode_reply(
    form: Form,
    request_id: int,
    method: str,
    result: Response | ErrorCode,
    timing: Timing | None = None,
) -> list[Buffer]:
    """Encode a good reply, or an error reply that carries nothing but the code."""
    if form is Form.INLINE:
        return [pack(_inline_reply(result))]
    frames: list[Buffer] = [b""]
    if timing is None:
        # Error replies, which are not repeated.
        frames[0] = pack({"request_id": request_id, **_framed_reply(method, result, frames)})
        return frames
    if type(result) is TensorReply:
        output = result.output
        frames.append(output.data)
        key = (method, output.dtype, output.shape)
        template = _sent_replies.recall(key)
        if template is None:
            template = pack_template(_framed_reply(method, result, [b""]))
            _sent_replies.remember(key, template)
    else:
        template = pack_template(_framed_reply(method, result, frames))
    frames[0] = reply_header(request_id, timing.queue_us, timing.compute_us, template)
    return frames


def _inline_reply(result: Response | ErrorCode) -> dict[str, Any]:
    if isinstance(result, ErrorCode):
        return {"status": "error", "error": result.value}
    return {"status": "success", "response": to_inline(result)}


def _framed_reply(
    method: str, result: Response | ErrorCode, frames: list[Buffer]
) -> dict[str, Any]:
    """Return a reply's fields but for the numbers, and append its tensors' frames."""
    fields: dict[str, Any] = {"version": PROTOCOL_VERSION, "method": method}
    if isinstance(result, ErrorCode):
        return fields | {"status": "error", "error": result.value}
    return fields | {"status": "success", "response": to_framed(result, frames)}


def decode_reply(frames: Sequence[Buffer]) -> Reply:
    """Decode and check a framed reply. Raises ProtocolError."""
    if not 1 <= len(frames) <= MAX_REPLY_FRAMES:
        raise ProtocolError(
            "reply",
            got=f"{len(frames)} frames",
            expected=f"1 to {MAX_REPLY_FRAMES}",
            code=ErrorCode.MALFORMED_MESSAGE,
        )
    if (known := _decode_known(frames)) is not None:
        return known
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
            got=str(header.version),
            expected=str(PROTOCOL_VERSION),
            code=ErrorCode.UNSUPPORTED_VERSION,
        )
    good = header.status == "success"
    if (header.response is not None) != good or (header.error is not None) == good:
        raise ProtocolError(
            "reply",
            got=f"status {header.status} with {len(envelope)} keys",
            expected="response with success, error with error",
            code=ErrorCode.MALFORMED_MESSAGE,
        )
    response: Response | None = None
    if header.response is not None:
        # A name of ours, or none: what a service calls its reply is not repeated in messages.
        where = header.method if header.method in REQUEST_TYPES else "reply"
        response = read_framed(response_type(header.method), header.response, frames, where)
        if (split := split_reply(frames[0])) is not None:
            to_remember = known_message(header.method, header.response, response)
            if to_remember is not None:
                _known_replies.remember(split[-1], to_remember)
    return Reply(header.request_id, header.method, response, header.error, header.timing)


def _decode_known(frames: Sequence[Buffer]) -> Reply | None:
    """Decode a good reply whose header came before with other numbers; None if it did not."""
    if (split := split_reply(frames[0])) is None:
        return None
    request_id, queue_us, compute_us, template = split
    known = _known_replies.recall(template)
    if (
        known is None
        or request_id >= 2**63
        or queue_us > MAX_TIMING_US
        or compute_us > MAX_TIMING_US
        or (response := known.build(frames)) is None
    ):
        return None
    timing: Timing = _checked_timing({"queue_us": queue_us, "compute_us": compute_us})
    return Reply(request_id, known.method, response, None, timing)
