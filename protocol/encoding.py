"""The two encodings of one schema.

*Framed* (our client): a multipart message. Frame 0 is a small msgpack map

    request  {version, request_id, timeout_ms, method, request}
    reply    {version, request_id, method, status, response | error, timing}

and every tensor in it is `{dtype, shape, frame}`, pointing at a raw frame of its own that is never
copied. *Inline* (the published schema, any REQ socket in any language): one msgpack map
`{method, request}` or `{status, response | error}` with the tensor bytes inside. A message is
framed if and only if its map has the key `version`.

Decoding a request goes in two stages, so that a request with a bad body still gets an error reply
under its own id: `open_request` reads the envelope, `read_request` the message in it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from protocol.codec import (
    MAX_HEADER_BYTES,
    MAX_REPLY_CONTAINERS,
    MAX_REQUEST_CONTAINERS,
    pack,
    unpack,
)
from protocol.errors import ErrorCode, ProtocolError, describe
from protocol.messages import (
    MAX_TIMEOUT_MS,
    PROTOCOL_VERSION,
    REQUEST_TYPES,
    EmbeddingRequest,
    InitReply,
    LinearRequest,
    LMHeadRequest,
    MatmulRequest,
    NormWeight,
    Request,
    Response,
    RotaryParams,
    TensorReply,
    Timing,
    response_type,
)
from protocol.tensors import Buffer, WireTensor

DEFAULT_MAX_MESSAGE_BYTES = 512 * 1024 * 1024
MAX_REQUEST_FRAMES = 4
MAX_REPLY_HEADER_BYTES = 2 * 1024 * 1024
MAX_REPLY_FRAMES = 2 * 4096 + 4

M = TypeVar("M", bound=BaseModel)


class Form(Enum):
    """Which of the two encodings a message came in; the reply goes out in the same."""

    FRAMED = "framed"
    INLINE = "inline"


@dataclass(frozen=True, slots=True)
class Inline:
    """Keys of one tensor in the inline form; `dtype` is a key, or the fixed dtype after `=`."""

    data: str
    shape: str
    dtype: str


_INLINE_TENSORS: dict[type[BaseModel], dict[str, Inline]] = {
    EmbeddingRequest: {"input_ids": Inline("input_ids", "input_shape", "=int64")},
    LinearRequest: {"hidden_states": Inline("hidden_states", "shape", "dtype")},
    MatmulRequest: {
        "a": Inline("a_buffer", "a_shape", "dtype"),
        "b": Inline("b_buffer", "b_shape", "dtype"),
    },
    LMHeadRequest: {"hidden_states": Inline("hidden_states", "shape", "dtype")},
    RotaryParams: {"inv_freq": Inline("inv_freq", "inv_freq_shape", "=float32")},
    NormWeight: {"weight": Inline("weight", "shape", "=float32")},
    TensorReply: {"output": Inline("output", "shape", "dtype")},
}


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


@dataclass(frozen=True, slots=True)
class OpenedRequest:
    """A request's envelope; `timeout_ms` is None in the inline form, which has no deadline."""

    form: Form
    request_id: int
    timeout_ms: int | None
    method: str
    body: Mapping[str, Any]
    frames: Sequence[Buffer]


@dataclass(frozen=True, slots=True)
class Reply:
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
    header = {
        "version": PROTOCOL_VERSION,
        "request_id": request_id,
        "timeout_ms": timeout_ms,
        "method": message.method,
        "request": _to_framed(message, frames),
    }
    frames[0] = pack(header)
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


def likely_form(frames: Sequence[Buffer], envelope: Mapping[str, Any] | None = None) -> Form:
    """Say in which form to answer a request that is wrong: several frames are ours alone."""
    framed = len(frames) > 1 or (envelope is not None and "version" in envelope)
    return Form.FRAMED if framed else Form.INLINE


def _open_framed(envelope: dict[str, Any], frames: Sequence[Buffer]) -> OpenedRequest:
    if envelope["version"] != PROTOCOL_VERSION:
        raise ProtocolError(
            "request.version",
            got=describe(envelope["version"]),
            expected=str(PROTOCOL_VERSION),
            code=ErrorCode.UNSUPPORTED_VERSION,
        )
    header = _validate(_RequestHeader, envelope, "request")
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
            got=f"{len(frames)} frames with keys {sorted(envelope)[:8]}",
            expected="one frame with method (str) and request (map), or a framed request",
            code=ErrorCode.MALFORMED_MESSAGE,
        )
    return OpenedRequest(Form.INLINE, 0, None, method, body, frames)


def read_request(opened: OpenedRequest) -> Request:
    """Decode and check the message in an opened envelope. Raises ProtocolError."""
    cls = REQUEST_TYPES.get(opened.method)
    if cls is None:
        raise ProtocolError(
            "request.method",
            got=describe(opened.method),
            expected=f"one of {', '.join(REQUEST_TYPES)}",
            code=ErrorCode.UNKNOWN_METHOD,
        )
    if opened.form is Form.FRAMED:
        return _read_framed(cls, opened.body, opened.frames, opened.method)
    return _from_inline(cls, opened.body, opened.method)


# -------------------------------------------------------------------------------- replies


def encode_reply(
    form: Form,
    request_id: int,
    method: str,
    result: Response | ErrorCode,
    timing: Timing | None = None,
) -> list[Buffer]:
    """Encode a good reply, or an error reply that carries nothing but the code."""
    frames: list[Buffer] = [b""]
    reply: dict[str, Any]
    if isinstance(result, ErrorCode):
        reply = {"status": "error", "error": result.value}
    elif form is Form.INLINE:
        reply = {"status": "success", "response": _to_inline(result)}
    else:
        reply = {"status": "success", "response": _to_framed(result, frames)}
    if form is Form.FRAMED:
        reply |= {"version": PROTOCOL_VERSION, "request_id": request_id, "method": method}
        if timing is not None:
            reply["timing"] = timing.model_dump()
    frames[0] = pack(reply)
    return frames


def decode_reply(frames: Sequence[Buffer]) -> Reply:
    """Decode and check a framed reply. Raises ProtocolError."""
    if not 1 <= len(frames) <= MAX_REPLY_FRAMES:
        raise ProtocolError(
            "reply",
            got=f"{len(frames)} frames",
            expected=f"1 to {MAX_REPLY_FRAMES}",
            code=ErrorCode.MALFORMED_MESSAGE,
        )
    envelope = unpack(
        frames[0],
        where="reply",
        max_bytes=MAX_REPLY_HEADER_BYTES,
        max_containers=MAX_REPLY_CONTAINERS,
    )
    header = _validate(_ReplyHeader, envelope, "reply")
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
            got=f"status {header.status} with keys {sorted(envelope)[:8]}",
            expected="response with success, error with error",
            code=ErrorCode.MALFORMED_MESSAGE,
        )
    response: Response | None = None
    if header.response is not None:
        response = _read_framed(
            response_type(header.method), header.response, frames, header.method
        )
    return Reply(header.request_id, header.method, response, header.error, header.timing)


# ---------------------------------------------------------------------------- framed form


def _to_framed(value: Any, frames: list[Buffer]) -> Any:
    """Replace every tensor by a description that points at the frame appended for it."""
    if isinstance(value, WireTensor):
        frames.append(value.data)
        return {"dtype": value.dtype, "shape": list(value.shape), "frame": len(frames) - 1}
    if isinstance(value, BaseModel):
        return {name: _to_framed(getattr(value, name), frames) for name in type(value).model_fields}
    if isinstance(value, dict):
        return {name: _to_framed(item, frames) for name, item in value.items()}
    return list(value) if isinstance(value, tuple) else value


def _read_framed(cls: type[M], body: Mapping[str, Any], frames: Sequence[Buffer], where: str) -> M:
    unused = set(range(1, len(frames)))
    fields = _resolve_frames(body, frames, unused, where)
    if unused:
        raise ProtocolError(
            where,
            got=f"{len(unused)} frames that no field points at",
            expected="every frame used once",
            code=ErrorCode.MALFORMED_MESSAGE,
        )
    return _validate(cls, fields, where)


def _resolve_frames(
    body: Mapping[str, Any], frames: Sequence[Buffer], unused: set[int], where: str
) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    for name, value in body.items():
        path = f"{where}.{name}"
        if not isinstance(value, dict):
            fields[name] = value
        elif "frame" in value:
            fields[name] = _framed_tensor(value, frames, unused, path)
        else:
            fields[name] = _resolve_frames(value, frames, unused, path)
    return fields


def _framed_tensor(
    value: dict[str, Any], frames: Sequence[Buffer], unused: set[int], path: str
) -> WireTensor:
    index = value["frame"]
    if set(value) != {"dtype", "shape", "frame"} or type(index) is not int or index not in unused:
        raise ProtocolError(
            path,
            got=f"keys {sorted(value)[:6]}, frame {describe(index)}"[:120],
            expected="dtype, shape and a frame of its own",
            code=ErrorCode.INVALID_FIELD,
        )
    unused.remove(index)
    return WireTensor.checked(value["dtype"], value["shape"], frames[index], path)


# ---------------------------------------------------------------------------- inline form


def _to_inline(value: Any) -> Any:
    """Lay a message out as the published schema does: tensor bytes beside shape and dtype."""
    if isinstance(value, dict):
        return {name: _to_inline(item) for name, item in value.items()}
    if not isinstance(value, BaseModel):
        return list(value) if isinstance(value, tuple) else value
    tensors = _INLINE_TENSORS.get(type(value), {})
    fields: dict[str, Any] = {}
    for name in type(value).model_fields:
        item = getattr(value, name)
        if name not in tensors:
            fields[name] = _to_inline(item)
            continue
        keys = tensors[name]
        fields[keys.data] = bytes(item.data)
        fields[keys.shape] = list(item.shape)
        if not keys.dtype.startswith("="):
            fields[keys.dtype] = f"torch.{item.dtype}"
    if isinstance(value, InitReply):
        # Ours, not in the published schema: a strict client of it would refuse the keys.
        del fields["model_digest"], fields["max_message_bytes"]
    return fields


def _from_inline(cls: type[M], body: Mapping[str, Any], where: str) -> M:
    fields = dict(body)
    consumed: set[str] = set()
    for name, keys in _INLINE_TENSORS.get(cls, {}).items():
        if name != keys.data and name in body:
            raise ProtocolError(
                f"{where}.{name}",
                got="an unknown field",
                expected=keys.data,
                code=ErrorCode.INVALID_FIELD,
            )
        fixed = keys.dtype.startswith("=")
        needed = [keys.data, keys.shape] + ([] if fixed else [keys.dtype])
        if missing := [key for key in needed if key not in body]:
            raise ProtocolError(
                where,
                got=f"no {missing[0]}",
                expected=f"the fields {', '.join(needed)}",
                code=ErrorCode.INVALID_FIELD,
            )
        dtype = keys.dtype[1:] if fixed else body[keys.dtype]
        consumed.update(needed)
        fields.pop(keys.data)
        fields[name] = WireTensor.checked(
            dtype, body[keys.shape], body[keys.data], f"{where}.{keys.data}"
        )
    for key in consumed - set(cls.model_fields):
        fields.pop(key, None)
    if cls is LinearRequest and "module_name" in fields and "module_names" not in fields:
        fields["module_names"] = [fields.pop("module_name")]
    if cls is EmbeddingRequest:
        fields["dtype"] = _embedding_reply_dtype(fields.get("dtype"))
    return _validate(cls, fields, where)


def _embedding_reply_dtype(dtype: Any) -> Any:
    """Read the inline Embedding's `dtype`.

    The published schema does not say whose dtype it is. A float dtype can only be the reply's;
    int64 can only be that of the ids, and then the reply is float32, as everywhere else.
    """
    if not isinstance(dtype, str):
        return dtype
    short = dtype.removeprefix("torch.")
    return "float32" if short == "int64" else short


# ------------------------------------------------------------------------------- checking


def _validate(cls: type[M], fields: Mapping[str, Any], where: str) -> M:
    try:
        return cls.model_validate(fields)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        path = ".".join(str(part) for part in first["loc"])
        raise ProtocolError(
            f"{where}.{path}" if path else where,
            got=_describe_input(first["type"], first["input"]),
            expected=first["msg"][:100],
            code=ErrorCode.INVALID_FIELD,
        ) from None


def _describe_input(kind: str, value: object) -> str:
    """Say what was given; by its type only where a tensor was expected or nothing is known."""
    if kind == "missing":
        return "nothing"
    if kind in ("dataclass_exact_type", "extra_forbidden") or isinstance(value, list | tuple):
        return f"a value of type {type(value).__name__}"
    return describe(value)
