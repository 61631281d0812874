"""msgpack under limits: what a peer may make us allocate is bounded before it is allocated.

A byte limit alone is not enough: three megabytes of empty lists decode into hundreds of megabytes
of objects. So containers are counted as they close, arrays hold only scalars, nesting is shallow,
and duplicate keys, non-string keys and extension types are refused.
"""

from __future__ import annotations

from typing import Any

import msgpack

from protocol.errors import ErrorCode, ProtocolError
from protocol.tensors import Buffer

MAX_HEADER_BYTES = 64 * 1024
MAX_ARRAY_LENGTH = 64
MAX_MAP_LENGTH = 4096
MAX_STRING_BYTES = 256
MAX_DEPTH = 6

# A request holds an envelope, its fields and up to three tensor descriptions. An Init reply holds
# two norms a layer, and no model known to us has more than a few hundred layers.
MAX_REQUEST_CONTAINERS = 64
MAX_REPLY_CONTAINERS = 16384


class _Map(dict[str, Any]):
    """A decoded map that remembers how deeply it is nested, so that depth can be bounded."""

    __slots__ = ("depth",)
    depth: int


def pack(message: dict[str, Any]) -> bytes:
    """Encode a message as msgpack with separate string and binary types."""
    packed: bytes = msgpack.packb(message, use_bin_type=True)
    return packed


def unpack(data: Buffer, *, where: str, max_bytes: int, max_containers: int) -> dict[str, Any]:
    """Decode one msgpack map and nothing else.

    Raises ProtocolError for anything that is not one map of string keys within the limits.
    """
    if len(data) > max_bytes:
        raise ProtocolError(
            where, f"{len(data)} bytes", f"at most {max_bytes}", code=ErrorCode.LIMIT_EXCEEDED
        )
    containers = 0

    def count() -> None:
        nonlocal containers
        containers += 1
        if containers > max_containers:
            raise ValueError(f"more than {max_containers} maps and arrays")

    def on_array(items: list[Any]) -> list[Any]:
        count()
        if any(isinstance(item, (list, dict)) for item in items):
            raise ValueError("an array of containers")
        return items

    def on_map(pairs: list[tuple[Any, Any]]) -> _Map:
        count()
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
        message, got = None, f"undecodable msgpack ({type(error).__name__}: {error})"[:160]
    if not isinstance(message, _Map):
        raise ProtocolError(where, got, "a map within limits", code=ErrorCode.MALFORMED_MESSAGE)
    return message
