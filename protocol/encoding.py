"""A request as it is sent, and a reply as it is received: the framed encoding.

A multipart message. Frame 0 is a small msgpack map

    request  {request_id, timeout_ms, version, method, request}
    reply    {request_id, timing, version, method, status, response | error}

in which every tensor is `{dtype, shape, frame}`, pointing at a raw frame of its own that is never
copied: a sent frame aliases the tensor's memory, a received one the transport's. The order is free.
In ours the numbers come first, each a msgpack uint64: a header is a head of known length with the
numbers in it, and a *template*, the bytes behind it, which is the same for every request of its
kind (`protocol.prepared`). msgpack of any other spelling and order is read too. The service's half,
and the other encoding of the same schema, are in `gpu_side.encoding`.

What a peer may make us allocate is bounded before it is allocated. A byte limit alone is not enough
for msgpack: three megabytes of empty lists decode into hundreds of megabytes of objects. So
containers are counted as they close, arrays hold only scalars, nesting is shallow, and duplicate
keys, non-string keys and extension types are refused (`unpack`).
"""

import re
import struct
from collections.abc import Mapping, Sequence
from itertools import accumulate, chain, count
from typing import Annotated, Any, Literal, NamedTuple

import msgpack
from pydantic import BaseModel, Field

from protocol.errors import ErrorCode, ProtocolError, describe_untrusted
from protocol.messages import (
    OTHER_REPLIES,
    PROTOCOL_VERSION,
    REQUEST_TYPES,
    Request,
    Response,
    TensorReply,
    Timing,
)
from protocol.tensors import Buffer, WireTensor
from protocol.validation import M, Strict, validate

MAX_HEADER_BYTES = 64 * 1024
MAX_ARRAY_LENGTH = 64
MAX_MAP_LENGTH = 4096
MAX_STRING_BYTES = 256
MAX_DEPTH = 6

# An Init reply holds two norms a layer; no model known to us has more than a few hundred layers.
MAX_REPLY_CONTAINERS = 16384


class _Map(dict[str, Any]):
    """A decoded map that remembers how deeply it is nested, so that depth can be bounded."""

    __slots__ = ("depth",)
    depth: int


def pack(message: dict[str, Any]) -> bytes:
    """Encode a message as msgpack with separate string and binary types."""
    return bytes(msgpack.packb(message, use_bin_type=True))


def unpack(data: Buffer, *, where: str, max_bytes: int, max_containers: int) -> dict[str, Any]:
    """Decode one msgpack map and nothing else.

    Raises ProtocolError for anything that is not one map of string keys within the limits.
    """
    ProtocolError.at_most(max_bytes, where, len(data))
    containers = count(1)

    def note_container() -> None:
        if next(containers) > max_containers:
            raise ValueError(f"more than {max_containers} maps and arrays")

    def on_array(items: list[Any]) -> list[Any]:
        note_container()
        if any(isinstance(item, (list, dict)) for item in items):
            raise ValueError("an array of containers")
        return items

    def on_map(pairs: list[tuple[Any, Any]]) -> _Map:
        note_container()
        result = _Map(pairs)
        if len(result) != len(pairs):
            raise ValueError("a duplicate key")
        if any(type(key) is not str for key in result):
            raise ValueError("a key that is not a string")
        inner = (value.depth for value in result.values() if type(value) is _Map)
        result.depth = 1 + max(inner, default=0)
        if result.depth > MAX_DEPTH:
            raise ValueError(f"maps nested more than {MAX_DEPTH} deep")
        return result

    def on_extension(_code: int, _data: bytes) -> Any:
        raise ValueError("an extension type")

    try:
        message = msgpack.unpackb(
            data,
            raw=False,
            strict_map_key=True,
            list_hook=on_array,
            object_pairs_hook=on_map,
            max_str_len=MAX_STRING_BYTES,
            max_bin_len=max_bytes,
            max_array_len=MAX_ARRAY_LENGTH,
            max_map_len=min(MAX_MAP_LENGTH, max_containers),
            max_ext_len=0,
            ext_hook=on_extension,
        )
        got = type(message).__name__
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        # ValueError covers bad UTF-8, trailing bytes, exceeded limits and our own refusals.
        message = None
        got = f"undecodable msgpack ({type(error).__name__}: {error})"[:160]
    if not isinstance(message, _Map):
        raise ProtocolError(where, got, "a map within limits")
    return message


DEFAULT_MAX_MESSAGE_BYTES = 512 * 1024 * 1024
MAX_REPLY_HEADER_BYTES = 2 * 1024 * 1024
MAX_REPLY_FRAMES = 2 * 4096 + 4
# Longer templates are not worth remembering: those of all repeated messages are far below it.
MAX_TEMPLATE_BYTES = 512
_FIELD_NAME = re.compile("[a-z0-9_]{1,40}")


class HeaderLayout:
    """A head of known length: numbers, each behind the msgpack of what precedes it.

    `places`: where the numbers stand, 8 bytes each, big-endian.
    """

    def __init__(self, *keys: bytes) -> None:
        self._keys = tuple(key + b"\xcf" for key in keys)  # the mark of a uint64
        self._head = struct.Struct(">" + "".join(f"{len(key)}sQ" for key in self._keys))
        self.head_bytes = self._head.size
        # Where the numbers stand.
        keyed = accumulate(len(key) + 8 for key in self._keys)
        self.places = tuple(end - 8 for end in keyed)
        self._max_bytes = self.head_bytes + MAX_TEMPLATE_BYTES

    def header(self, template: bytes, *numbers: int) -> bytes:
        """Put the numbers before a template."""
        keyed = chain.from_iterable(zip(self._keys, numbers, strict=True))
        return self._head.pack(*keyed) + template

    def split(self, header: Buffer) -> tuple[tuple[int, ...], bytes] | None:
        """Return the numbers and the template, or None where a header is not laid out so."""
        if not self.head_bytes < len(header) <= self._max_bytes:
            return None
        found = self._head.unpack_from(header)
        if found[::2] != self._keys:
            return None
        return found[1::2], bytes(header[self.head_bytes :])


REQUEST = HeaderLayout(b"\x85\xaarequest_id", b"\xaatimeout_ms")
REPLY = HeaderLayout(b"\x86\xaarequest_id", b"\xa6timing\x82\xa8queue_us", b"\xaacompute_us")


def to_framed(value: Any, frames: list[Buffer]) -> Any:
    """Replace every tensor by a description that points at the frame appended for it."""
    if isinstance(value, WireTensor):
        frames.append(value.data)
        return {"dtype": value.dtype, "shape": list(value.shape), "frame": len(frames) - 1}
    if isinstance(value, BaseModel):
        return {name: to_framed(getattr(value, name), frames) for name in type(value).model_fields}
    if isinstance(value, dict):
        return {name: to_framed(item, frames) for name, item in value.items()}
    return list(value) if isinstance(value, tuple) else value


def read_framed(cls: type[M], body: Mapping[str, Any], frames: Sequence[Buffer], where: str) -> M:
    """Build a message model from a header's map and the frames that it points at.

    Raises ProtocolError; every frame must be named exactly once.
    """
    unused = set(range(1, len(frames)))
    fields = _resolve_frames(body, frames, unused, where)
    ProtocolError.unless(
        not unused, where, f"{len(unused)} frames that no field points at", "every frame used once"
    )
    return validate(cls, fields, where)


def _resolve_frames(
    body: Mapping[str, Any], frames: Sequence[Buffer], unused: set[int], where: str
) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    for name, value in body.items():
        # Names of ours are lower-case words; anything else is not repeated in messages.
        path = f"{where}.{name if _FIELD_NAME.fullmatch(name) else 'a field'}"
        if not isinstance(value, dict):
            fields[name] = value
        elif "frame" in value:
            index = value["frame"]
            known = set(value) == {"dtype", "shape", "frame"}
            ProtocolError.unless(
                known and type(index) is int and index in unused,
                path,
                f"{len(value)} keys, frame {describe_untrusted(index)}",
                "dtype, shape and a frame of its own",
                code=ErrorCode.INVALID_FIELD,
            )
            unused.remove(index)
            fields[name] = WireTensor.checked(value["dtype"], value["shape"], frames[index], path)
        else:
            fields[name] = _resolve_frames(value, frames, unused, path)
    return fields


class _ReplyHeader(Strict):
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
    # Without the head of its map, as `reply_template`.
    return pack({"version": PROTOCOL_VERSION, "method": message.method, "request": body})[1:]


def reply_template(method: str, result: Response | ErrorCode, frames: list[Buffer]) -> bytes:
    """Encode a reply's header behind its numbers, and append its tensors' frames."""
    fields: dict[str, Any] = {"version": PROTOCOL_VERSION, "method": method}
    if isinstance(result, ErrorCode):
        fields |= {"status": "error", "error": result.value}
    else:
        fields |= {"status": "success", "response": to_framed(result, frames)}
    return pack(fields)[1:]


def encode_request(message: Request, request_id: int, timeout_ms: int) -> list[Buffer]:
    """Encode a request; tensor data is referenced, not copied."""
    frames: list[Buffer] = [b""]
    template = request_template(message, frames)
    frames[0] = REQUEST.header(template, request_id, timeout_ms)
    return frames


def decode_reply(frames: Sequence[Buffer]) -> Reply:
    """Decode and check a framed reply. Raises ProtocolError."""
    ProtocolError.unless(
        1 <= len(frames) <= MAX_REPLY_FRAMES,
        "reply",
        f"{len(frames)} frames",
        f"1 to {MAX_REPLY_FRAMES}",
    )
    envelope = unpack(
        frames[0],
        where="reply",
        max_bytes=MAX_REPLY_HEADER_BYTES,
        max_containers=MAX_REPLY_CONTAINERS,
    )
    header = validate(_ReplyHeader, envelope, "reply")
    ProtocolError.unless(
        header.version == PROTOCOL_VERSION,
        "reply.version",
        str(header.version),
        str(PROTOCOL_VERSION),
        code=ErrorCode.UNSUPPORTED_VERSION,
    )
    good = header.status == "success"
    ProtocolError.unless(
        (header.response is not None) == good and (header.error is not None) != good,
        "reply",
        f"status {header.status} with {len(envelope)} keys",
        "response with success, error with error",
    )
    response: Response | None = None
    if header.response is not None:
        # A name of ours, or none: what a service calls its reply is not repeated in messages.
        where = header.method if header.method in REQUEST_TYPES else "reply"
        kind = OTHER_REPLIES.get(header.method, TensorReply)
        response = read_framed(kind, header.response, frames, where)
    return Reply(header.request_id, header.method, response, header.error, header.timing)
