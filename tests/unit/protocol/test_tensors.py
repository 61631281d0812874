"""Tensors on the wire: which claims are refused, and that bytes are aliased and not copied."""

from __future__ import annotations

import pytest
import torch

from protocol.errors import ErrorCode, ProtocolError
from protocol.tensors import (
    ITEMSIZE,
    MAX_DIMENSION,
    WireTensor,
    from_torch,
    short_name,
    to_torch,
    torch_dtype,
)
from tests.kit.rows import each_row

INVALID, LIMIT = ErrorCode.INVALID_FIELD, ErrorCode.LIMIT_EXCEEDED
F32, F1, F6 = "float32", bytes(4), bytes(24)  # one float32, and six
WRONG_SHAPES = [
    *([-1, 3], [0], [], [1] * 5, [1.0], [True], ["1"], [[1]], "1", 1, None, {1: 1}),
    *([MAX_DIMENSION + 1], [2**63]),
]
UNKNOWN = [
    *("float64", "int8", "uint32", "complex64", "", "torch.", "torch.torch.float32", "Float32"),
    *(" float32", b"float32", None, 4, ["float32"], {}),
]


@each_row(
    ("dtype", "shape", "data", "code", "text"),
    [
        *((name, [1], F1, INVALID, "x.dtype: got") for name in UNKNOWN),
        *((F32, shape, F6, INVALID, "x.shape") for shape in WRONG_SHAPES),
        (F32, [2, 3], bytes(23), INVALID, "got 23 bytes, expected 24 for"),
        (F32, [2, 3], bytes(25), INVALID, "got 25 bytes, expected 24 for"),
        ("float16", [2, 3], F6, INVALID, "expected 12 for float16 [2, 3]"),
        (F32, [1], b"", INVALID, "got 0 bytes"),
        (F32, [MAX_DIMENSION] * 4, b"", LIMIT, "at most 2147483648"),
        ("int64", [2**28 + 1], b"", LIMIT, "at most 2147483648"),
        (F32, [1], "abcd", INVALID, "x: got str, expected raw bytes"),
        (F32, [1], None, INVALID, "x: got NoneType"),
        (F32, [1], [1.0], INVALID, "x: got list"),
    ],
)
def test_a_wrong_claim_about_bytes_is_refused(
    dtype: object, shape: object, data: object, code: ErrorCode, text: str
) -> None:
    with pytest.raises(ProtocolError) as info:
        WireTensor.checked(dtype, shape, data, "x")
    assert info.value.code is code
    assert text in str(info.value)


@each_row("name", list(ITEMSIZE))
def test_every_bit_comes_back_and_is_sent_from_where_it_lies(name: str) -> None:
    dtype = torch_dtype(name)
    assert short_name(dtype) == name
    for shape in ((5,), (2, 1, 3, 4)):
        tensor = (torch.randn(shape) * 1000).to(dtype)
        wire = from_torch(tensor)
        assert (wire.dtype, wire.shape) == (name, shape)
        for spelling in (name, f"torch.{name}"):
            checked = WireTensor.checked(spelling, list(shape), bytes(wire.data), "x")
            assert to_torch(checked).dtype == dtype
            assert torch.equal(to_torch(checked), tensor)
    frame = from_torch(tensor).data
    assert torch.frombuffer(frame, dtype=torch.uint8).data_ptr() == tensor.data_ptr()


def test_bytes_are_little_endian_and_in_c_order() -> None:
    tensor = torch.tensor([[1, 2], [3, 4]], dtype=torch.int64)
    for sent, order in ((tensor, (1, 2, 3, 4)), (tensor.T, (1, 3, 2, 4))):
        assert bytes(from_torch(sent).data) == b"".join(n.to_bytes(8, "little") for n in order)
    assert "7777" not in repr(WireTensor("float32", (1,), b"7777"))
    for wrap in (bytes, memoryview):  # what cannot change is not aliased
        data = bytes(8)
        copied = to_torch(WireTensor.checked("float32", [2], wrap(data), "x"))
        copied += 1.0
        assert data == bytes(8)
