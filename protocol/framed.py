"""The framed form of a message: tensors are `{dtype, shape, frame}`, each with a raw frame.

Nothing is copied: a sent frame aliases the tensor's memory, a received one ZeroMQ's.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel

from protocol.errors import ErrorCode, ProtocolError, describe_untrusted
from protocol.tensors import Buffer, WireTensor
from protocol.validation import M, validate

_FIELD_NAME = re.compile("[a-z0-9_]{1,40}")


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
    if unused:
        raise ProtocolError(
            where,
            f"{len(unused)} frames that no field points at",
            "every frame used once",
            code=ErrorCode.MALFORMED_MESSAGE,
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
            f"{len(value)} keys, frame {describe_untrusted(index)}",
            "dtype, shape and a frame of its own",
            code=ErrorCode.INVALID_FIELD,
        )
    unused.remove(index)
    return WireTensor.checked(value["dtype"], value["shape"], frames[index], path)
