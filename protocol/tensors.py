"""Tensors as they cross the wire: dtype name, shape, and the raw bytes, checked before use.

C-order, little-endian. `WireTensor` knows nothing of torch, so that messages can be decoded and
checked without it; `to_torch` and `from_torch` are the only two places where bytes become numbers.
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any, TypeAlias

from protocol.errors import ErrorCode, ProtocolError, describe_untrusted

if TYPE_CHECKING:
    import torch

# Bytes; a memoryview of single bytes, whose length is their number.
Buffer: TypeAlias = bytes | bytearray | memoryview

ITEMSIZE = {"float32": 4, "float16": 2, "bfloat16": 2, "int32": 4, "int64": 8}

MAX_DIMENSIONS = 4
MAX_DIMENSION = 2**31 - 1
MAX_TENSOR_BYTES = 2**31


@dataclass(frozen=True, slots=True)
class WireTensor:
    """A tensor's bytes with the dtype and shape that they have been checked against.

    `dtype` is a short name (`float32`), `shape` has 1 to 4 positive dimensions, `data` is exactly
    `prod(shape) * itemsize` bytes. Building one by `WireTensor.checked` is the only way in for
    bytes from a peer.
    """

    dtype: str
    shape: tuple[int, ...]
    data: Buffer = field(repr=False)

    @property
    def payload_bytes(self) -> int:
        """Size of the raw data in bytes."""
        return math.prod(self.shape) * ITEMSIZE[self.dtype]

    @staticmethod
    def checked(dtype: object, shape: object, data: object, where: str) -> WireTensor:
        """Check a peer's claims about `data`.

        Raises ProtocolError when the dtype is unknown, a dimension is not a positive bounded
        integer, or the number of bytes is not what dtype and shape imply.
        """
        # As `float32`, or `torch.float32`.
        name = dtype.removeprefix("torch.") if isinstance(dtype, str) else ""
        if name not in ITEMSIZE:
            raise ProtocolError(
                f"{where}.dtype",
                describe_untrusted(dtype),
                f"one of {', '.join(ITEMSIZE)}",
                code=ErrorCode.INVALID_FIELD,
            )
        if (
            not isinstance(shape, (list, tuple))
            or not 1 <= len(shape) <= MAX_DIMENSIONS
            or any(type(n) is not int or not 1 <= n <= MAX_DIMENSION for n in shape)
        ):
            raise ProtocolError(
                f"{where}.shape",
                describe_untrusted(shape),
                f"1 to {MAX_DIMENSIONS} positive integers",
                code=ErrorCode.INVALID_FIELD,
            )
        if not isinstance(data, (bytes, bytearray, memoryview)):
            raise ProtocolError(
                where, type(data).__name__, "raw bytes", code=ErrorCode.INVALID_FIELD
            )
        expected_bytes = math.prod(shape) * ITEMSIZE[name]
        if expected_bytes > MAX_TENSOR_BYTES:
            ProtocolError.at_most(MAX_TENSOR_BYTES, f"{where}.shape", expected_bytes)
        received_bytes = data.nbytes if isinstance(data, memoryview) else len(data)
        if received_bytes != expected_bytes:
            raise ProtocolError(
                where,
                f"{received_bytes} bytes",
                f"{expected_bytes} for {name} {list(shape)}",
                code=ErrorCode.INVALID_FIELD,
            )
        return WireTensor(name, tuple(shape), data)


@cache
def torch_dtype(name: str) -> torch.dtype:
    """Return the torch dtype of a short name, one of `ITEMSIZE`."""
    import torch

    dtype: torch.dtype = getattr(torch, name)
    return dtype


@cache
def short_name(dtype: torch.dtype) -> str:
    """Return `float32` for `torch.float32`."""
    return str(dtype).removeprefix("torch.")


def to_torch(tensor: WireTensor) -> torch.Tensor:
    """View the received bytes as a CPU tensor, without a copy where the buffer is writable.

    ZeroMQ frames are writable and belong to us alone. `bytes` out of a msgpack map (the inline
    form) are not, and torch must not alias immutable memory: they are copied once.
    """
    import torch

    data = tensor.data
    if isinstance(data, bytes) or (isinstance(data, memoryview) and data.readonly):
        data = bytearray(data)
    flat = torch.frombuffer(data, dtype=torch_dtype(tensor.dtype))
    return flat if len(tensor.shape) == 1 else flat.view(*tensor.shape)


def from_torch(tensor: torch.Tensor) -> WireTensor:
    """Describe a tensor for sending. Its bytes: see `raw_bytes`."""
    return WireTensor(short_name(tensor.dtype), tuple(tensor.shape), raw_bytes(tensor))


def raw_bytes(tensor: torch.Tensor) -> memoryview:
    """Return a tensor's bytes; no copy if it is contiguous and on the CPU.

    The bytes alias the tensor, which must not be written to as long as the transport refers to
    them. The reply does not say that it has let go: it may come, from a service that answers before
    it has read, while some of the request still waits here to be sent, and what is written by then
    is what goes out. Only a tensor that is never written to again is safe.
    """
    import torch

    held = tensor.detach() if tensor.requires_grad else tensor
    if not held.is_cpu:
        held = held.to("cpu")
    if not held.is_contiguous():
        held = held.contiguous()
    # numpy has no bfloat16; a view of the same width asks nothing of the strides.
    raw: Any = (held.view(torch.int16) if held.dtype is torch.bfloat16 else held).numpy()
    return memoryview(raw).cast("B")


def require_little_endian() -> None:
    """Refuse a big-endian machine: the wire is little-endian and never byte-swapped."""
    ProtocolError.unless(
        sys.byteorder == "little",
        "this machine",
        f"{sys.byteorder}-endian byte order",
        "little-endian",
        code=ErrorCode.INTERNAL,
    )
