"""A request as it is received, and a reply as it is sent, in both encodings of the schema.

*Framed* (our client): a multipart message whose first frame is a small msgpack map, in which every
tensor points at a raw frame of its own (`protocol.encoding`). *Inline* (the published schema, any
REQ socket in any language): one msgpack map `{method, request}` or `{status, response | error}`
with the tensor bytes inside. A message is framed if and only if its map has the key `version`.

Decoding a request goes in two stages, so that a request with a bad body still gets an error reply
under its own id: `open` reads the envelope, `read` the message in it. A forward pass repeats the
same few hundred headers: what a header was found to say, when it was decoded and checked in full,
is looked up by its bytes.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Annotated, Any, Generic, Literal, NamedTuple, TypeAlias, TypeVar

from pydantic import BaseModel, Field

from protocol.encoding import (
    MAX_HEADER_BYTES,
    REPLY,
    REQUEST,
    HeaderLayout,
    pack,
    read_framed,
    reply_template,
    unpack,
)
from protocol.errors import ErrorCode, ProtocolError, describe_untrusted
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
    RingLinearRequest,
    RingLMHeadRequest,
    RotaryParams,
    SeededRingLinearRequest,
    SegmentRequest,
    TensorReply,
    Timing,
)
from protocol.stream_wire import layout
from protocol.tensors import Buffer, WireTensor
from protocol.validation import M, Strict, validate

# A request holds an envelope, its fields and up to three tensor descriptions.
_MAX_REQUEST_CONTAINERS = 64
# An error reply that says nothing of its time has one field less than `REPLY`.
_UNTIMED_REPLY = HeaderLayout(b"\x85\xaarequest_id")


# Of each tensor in the inline form the keys of its data, shape and dtype; the last may be the fixed
# dtype after `=` instead.
_INLINE_TENSORS: dict[type[BaseModel], dict[str, tuple[str, str, str]]] = {
    EmbeddingRequest: {"input_ids": ("input_ids", "input_shape", "=int64")},
    LinearRequest: {"hidden_states": ("hidden_states", "shape", "dtype")},
    RingLinearRequest: {"elements": ("elements", "shape", "=int32")},
    SeededRingLinearRequest: {"seed": ("seed", "seed_shape", "=int32")},
    MatmulRequest: {
        "a": ("a_buffer", "a_shape", "dtype"),
        "b": ("b_buffer", "b_shape", "dtype"),
    },
    LMHeadRequest: {"hidden_states": ("hidden_states", "shape", "dtype")},
    RingLMHeadRequest: {"elements": ("elements", "shape", "=int32")},
    SegmentRequest: {
        "hidden_states": ("hidden_states", "shape", "dtype"),
        "parts": ("parts", "parts_shape", "=int64"),
        "outputs": ("outputs", "outputs_shape", "=int64"),
    },
    RotaryParams: {"inv_freq": ("inv_freq", "inv_freq_shape", "=float32")},
    NormWeight: {"weight": ("weight", "shape", "=float32")},
    TensorReply: {"output": ("output", "shape", "dtype")},
}

# Fields of InitReply that the inline form leaves out.
_FRAMED_ONLY = (
    "model_digest",
    "linear_digest",
    "max_message_bytes",
    "arithmetic",
    "provision_id",
    "instance_id",
    "layers",
    "max_queued_requests",
    "max_queued_bytes",
    "statement",
    "ranks",
)


def to_inline(value: Any) -> Any:
    """Lay a message out as the published schema does: tensor bytes beside shape and dtype."""
    if isinstance(value, dict):
        return {name: to_inline(item) for name, item in value.items()}
    if not isinstance(value, BaseModel):
        return list(value) if isinstance(value, tuple) else value
    tensors = _INLINE_TENSORS.get(type(value), {})
    fields: dict[str, Any] = {}
    for name in type(value).model_fields:
        item = getattr(value, name)
        if name not in tensors:
            fields[name] = to_inline(item)
            continue
        data, shape, dtype = tensors[name]
        fields |= {data: bytes(item.data), shape: list(item.shape)}
        if not dtype.startswith("="):
            fields[dtype] = f"torch.{item.dtype}"
    if isinstance(value, InitReply):
        # Ours, not in the published schema: a strict client of it would refuse the keys.
        for name in _FRAMED_ONLY:
            del fields[name]
    return fields


def read_inline(cls: type[M], body: Mapping[str, Any], where: str) -> M:
    """Build a message model from a published map. Raises ProtocolError."""
    fields = dict(body)
    consumed: set[str] = set()
    for name, (data, shape, said) in _INLINE_TENSORS.get(cls, {}).items():
        ProtocolError.unless(
            name == data or name not in body,
            f"{where}.{name}",
            "an unknown field",
            data,
            code=ErrorCode.INVALID_FIELD,
        )
        fixed = said.startswith("=")
        needed = [data, shape] + ([] if fixed else [said])
        missing = [key for key in needed if key not in body]
        ProtocolError.unless(
            not missing,
            where,
            f"no {''.join(missing[:1])}",
            f"the fields {', '.join(needed)}",
            code=ErrorCode.INVALID_FIELD,
        )
        dtype = said[1:] if fixed else body[said]
        consumed.update(needed)
        fields[name] = WireTensor.checked(dtype, body[shape], body[data], f"{where}.{data}")
    for key in consumed - set(cls.model_fields):
        fields.pop(key, None)
    # These may name one module under `module_name`, as the published Linear does.
    if cls in (LinearRequest, RingLinearRequest, SeededRingLinearRequest) and (
        "module_name" in fields and "module_names" not in fields
    ):
        fields["module_names"] = [fields.pop("module_name")]
    if cls is EmbeddingRequest:
        # The published schema does not say whose dtype it is. A float dtype can only be the
        # reply's; int64 can only be that of the ids, and then the reply is float32, as everywhere
        # else.
        given = fields.get("dtype")
        short = given.removeprefix("torch.") if isinstance(given, str) else given
        fields["dtype"] = "float32" if short == "int64" else short
    return validate(cls, fields, where)


# What computes requests of one header.
K = TypeVar("K")

MAX_REQUEST_FRAMES = 4

# Of a request, received at all: more than it may have, so that a slightly wrong one gets its error
# reply.
MAX_FRAMES = 64

# Headers that are remembered: 126 layers of four operators in four shapes.
MAX_KNOWN_HEADERS = 4096


# Which of the two encodings a message came in; the reply goes out in the same.
Form: TypeAlias = Literal["framed", "inline"]


class _RequestHeader(Strict):
    version: int
    request_id: Annotated[int, Field(ge=1, lt=2**63)]
    timeout_ms: Annotated[int, Field(ge=1, le=MAX_TIMEOUT_MS)]
    method: str
    request: dict[str, Any]


class KnownRequest(NamedTuple, Generic[K]):
    """What a header said when its request was read in full, and what computes the result.

    `validate`: builds the message from its fields, of which `fields` are those without a tensor.
    `tensors`: everything about the others but the bytes, which are name, dtype, shape, frame, and
    bytes of the payload.
    """

    method: str
    body: Mapping[str, Any]
    validate: Callable[[dict[str, Any]], Request]
    fields: Mapping[str, Any]
    tensors: Sequence[tuple[str, str, tuple[int, ...], int, int]]
    kernel: K


class OpenedRequest(NamedTuple):
    """A request's envelope; `timeout_ms` is None in the inline form, which has no deadline.

    `known`: what the header was found to say when it came before, None the first time. `error`:
    what is wrong with the envelope, of which there is then what a reply needs, as far as it can be
    read.
    """

    form: Form
    request_id: int
    timeout_ms: int | None
    method: str
    body: Mapping[str, Any]
    frames: Sequence[Buffer]
    known: KnownRequest[Any] | None = None
    error: ProtocolError | None = None


class RequestReader(Generic[K]):
    """Reads requests of at most `max_bytes`, and finds what computes them.

    `prepare`: checks that a request can be served and returns its kernel; raises ProtocolError. It
    is called once for all requests with the same header.
    """

    def __init__(self, max_bytes: int, prepare: Callable[[Request], K]) -> None:
        self._max_bytes = max_bytes
        self._prepare = prepare
        # By the bytes behind the header's numbers.
        self.known: dict[bytes, KnownRequest[K]] = {}

    def open(self, frames: Sequence[Buffer]) -> OpenedRequest:
        """Read a request's envelope; a wrong one is not raised but returned, with its error."""
        if 1 < len(frames) <= MAX_REQUEST_FRAMES and (split := REQUEST.split(frames[0])):
            (request_id, timeout_ms), template = split
            known = self.known.get(template)
            if known and 0 < request_id < 2**63 and 0 < timeout_ms <= MAX_TIMEOUT_MS:
                return OpenedRequest(
                    "framed", request_id, timeout_ms, known.method, known.body, frames, known
                )
        return open_request(frames, self._max_bytes)

    def read(self, opened: OpenedRequest) -> tuple[Request, K]:
        """Decode and check the message, and return it with its kernel. Raises ProtocolError."""
        known, frames = opened.known, opened.frames
        if known is not None and len(frames) == len(known.tensors) + 1:
            fields = dict(known.fields)
            for name, dtype, shape, frame, payload_bytes in known.tensors:
                if len(frames[frame]) != payload_bytes:
                    break
                fields[name] = WireTensor(dtype, shape, frames[frame])
            else:
                # The model's own checks each time: they cost less than filling it in by hand.
                return known.validate(fields), known.kernel
        request = read_request(opened)
        kernel = self._prepare(request)
        if opened.form == "framed" and (split := REQUEST.split(frames[0])):
            # Of those with tensors alone: others are not repeated.
            tensors = []
            fields = {name: getattr(request, name) for name in opened.body}
            for name in opened.body:
                if isinstance(tensor := fields[name], WireTensor):
                    frame, size = opened.body[name]["frame"], tensor.payload_bytes
                    tensors.append((name, tensor.dtype, tensor.shape, frame, size))
                    del fields[name]
            if tensors:
                if len(self.known) >= MAX_KNOWN_HEADERS:
                    self.known.clear()
                validate = type(request).__pydantic_validator__.validate_python
                self.known[split[-1]] = KnownRequest(
                    opened.method, opened.body, validate, fields, tensors, kernel
                )
        return request, kernel


def open_request(frames: Sequence[Buffer], max_bytes: int) -> OpenedRequest:
    """Read a request's envelope; a wrong one is not raised but returned, with its error."""
    envelope: dict[str, Any] = {}
    try:
        ProtocolError.unless(
            1 <= len(frames) <= MAX_REQUEST_FRAMES,
            "request",
            f"{len(frames)} frames",
            f"1 to {MAX_REQUEST_FRAMES}",
            code=ErrorCode.MALFORMED_MESSAGE,
        )
        limit = max_bytes if len(frames) == 1 else MAX_HEADER_BYTES
        envelope = unpack(
            frames[0], where="request", max_bytes=limit, max_containers=_MAX_REQUEST_CONTAINERS
        )
        return (_open_framed if "version" in envelope else _open_inline)(envelope, frames)
    except ProtocolError as error:
        opened, given = unread(frames), envelope.get("request_id")
        request_id = given if type(given) is int and 0 < given < 2**63 else 0
        form: Form = "framed" if "version" in envelope else opened.form
        return opened._replace(form=form, request_id=request_id, error=error)


def unread(frames: Sequence[Buffer]) -> OpenedRequest:
    """Return what is known of a request whose envelope cannot be read, and how to answer it."""
    # Several frames are ours alone.
    form: Form = "framed" if len(frames) > 1 else "inline"
    return OpenedRequest(form, 0, None, "", {}, frames)


def _open_framed(envelope: dict[str, Any], frames: Sequence[Buffer]) -> OpenedRequest:
    ProtocolError.unless(
        envelope["version"] == PROTOCOL_VERSION,
        "request.version",
        describe_untrusted(envelope["version"]),
        str(PROTOCOL_VERSION),
        code=ErrorCode.UNSUPPORTED_VERSION,
    )
    header = validate(_RequestHeader, envelope, "request")
    return OpenedRequest(
        "framed",
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
    return OpenedRequest("inline", 0, None, method, body, frames)


def read_request(opened: OpenedRequest) -> Request:
    """Decode and check the message in an opened envelope. Raises ProtocolError, also for that."""
    if (error := opened.error) is not None:
        # Another one: this one would refer to its own caller's frame, which refers to it, and keep
        # the message until the garbage is collected.
        raise ProtocolError(error.where, got=error.got, expected=error.expected, code=error.code)
    cls = REQUEST_TYPES.get(opened.method)
    if cls is None:
        raise ProtocolError(
            "request.method",
            got=describe_untrusted(opened.method),
            expected=f"one of {', '.join(REQUEST_TYPES)}",
            code=ErrorCode.UNKNOWN_METHOD,
        )
    if opened.form == "framed":
        return read_framed(cls, opened.body, opened.frames, opened.method)
    return read_inline(cls, opened.body, opened.method)


def encode_reply(
    form: Form,
    request_id: int,
    method: str,
    result: Response | ErrorCode,
    timing: Timing | None = None,
) -> list[Buffer]:
    """Encode a good reply, or an error reply that carries nothing but the code."""
    if form == "inline":
        if isinstance(result, ErrorCode):
            return [pack({"status": "error", "error": result.value})]
        return [pack({"status": "success", "response": to_inline(result)})]
    frames: list[Buffer] = [b""]
    if type(result) is TensorReply:
        output = result.output
        frames.append(output.data)
        template = _tensor_template(method, output.dtype, output.shape)
    else:
        template = reply_template(method, result, frames)
    if timing is None:
        frames[0] = _UNTIMED_REPLY.header(template, request_id)
    else:
        frames[0] = REPLY.header(template, request_id, timing.queue_us, timing.compute_us)
    return frames


def payload_place(method: str, dtype: str, shape: tuple[int, ...]) -> slice:
    """Return where the tensor of a good framed reply stands in it, as it lies in a slot."""
    payload_bytes = WireTensor(dtype, shape, b"").payload_bytes
    header_bytes = REPLY.head_bytes + len(_tensor_template(method, dtype, shape))
    (_, place), _, _ = layout((header_bytes, payload_bytes))
    return place


@lru_cache(MAX_KNOWN_HEADERS)
def _tensor_template(method: str, dtype: str, shape: tuple[int, ...]) -> bytes:
    return reply_template(method, TensorReply(output=WireTensor(dtype, shape, b"")), [b""])
