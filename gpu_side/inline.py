"""The inline form of a message: the published schema, tensor bytes inside the msgpack map."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

from protocol.errors import ErrorCode, ProtocolError
from protocol.messages import (
    EmbeddingRequest,
    InitReply,
    LinearRequest,
    LMHeadRequest,
    MatmulRequest,
    NormWeight,
    RingLinearRequest,
    RingLMHeadRequest,
    RotaryParams,
    SeededRingLinearRequest,
    SegmentRequest,
    TensorReply,
)
from protocol.tensors import WireTensor
from protocol.validation import M, validate


@dataclass(frozen=True, slots=True)
class Inline:
    """Keys of one tensor in the inline form; `dtype` is a key, or the fixed dtype after `=`."""

    data: str
    shape: str
    dtype: str


_INLINE_TENSORS: dict[type[BaseModel], dict[str, Inline]] = {
    EmbeddingRequest: {"input_ids": Inline("input_ids", "input_shape", "=int64")},
    LinearRequest: {"hidden_states": Inline("hidden_states", "shape", "dtype")},
    RingLinearRequest: {"elements": Inline("elements", "shape", "=int32")},
    SeededRingLinearRequest: {"seed": Inline("seed", "seed_shape", "=int32")},
    MatmulRequest: {
        "a": Inline("a_buffer", "a_shape", "dtype"),
        "b": Inline("b_buffer", "b_shape", "dtype"),
    },
    LMHeadRequest: {"hidden_states": Inline("hidden_states", "shape", "dtype")},
    RingLMHeadRequest: {"elements": Inline("elements", "shape", "=int32")},
    SegmentRequest: {
        "hidden_states": Inline("hidden_states", "shape", "dtype"),
        "parts": Inline("parts", "parts_shape", "=int64"),
        "outputs": Inline("outputs", "outputs_shape", "=int64"),
    },
    RotaryParams: {"inv_freq": Inline("inv_freq", "inv_freq_shape", "=float32")},
    NormWeight: {"weight": Inline("weight", "shape", "=float32")},
    TensorReply: {"output": Inline("output", "shape", "dtype")},
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

# Requests that may name one module under `module_name`, as the published Linear does.
_NAMES_MODULES = (LinearRequest, RingLinearRequest, SeededRingLinearRequest)


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
        keys = tensors[name]
        fields[keys.data] = bytes(item.data)
        fields[keys.shape] = list(item.shape)
        if not keys.dtype.startswith("="):
            fields[keys.dtype] = f"torch.{item.dtype}"
    if isinstance(value, InitReply):
        # Ours, not in the published schema: a strict client of it would refuse the keys.
        for name in _FRAMED_ONLY:
            del fields[name]
    return fields


def read_inline(cls: type[M], body: Mapping[str, Any], where: str) -> M:
    """Build a message model from a published map. Raises ProtocolError."""
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
    if cls in _NAMES_MODULES and "module_name" in fields and "module_names" not in fields:
        fields["module_names"] = [fields.pop("module_name")]
    if cls is EmbeddingRequest:
        fields["dtype"] = _embedding_reply_dtype(fields.get("dtype"))
    return validate(cls, fields, where)


def _embedding_reply_dtype(dtype: Any) -> Any:
    """Read the inline Embedding's `dtype`.

    The published schema does not say whose dtype it is. A float dtype can only be the reply's;
    int64 can only be that of the ids, and then the reply is float32, as everywhere else.
    """
    if not isinstance(dtype, str):
        return dtype
    short = dtype.removeprefix("torch.")
    return "float32" if short == "int64" else short
