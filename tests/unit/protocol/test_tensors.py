"""Tensors on the wire: which claims are refused, and that bytes are aliased and not copied."""

from __future__ import annotations

import sys

import pytest
import torch

from protocol.encoding import encode_request
from protocol.errors import ErrorCode, ProtocolError
from protocol.messages import LinearRequest
from protocol.tensors import (
    ITEMSIZE,
    MAX_DIMENSION,
    WireTensor,
    from_torch,
    require_little_endian,
    short_name,
    to_torch,
    torch_dtype,
)
from tests.kit.rows import each_row

INVALID, LIMIT = ErrorCode.INVALID_FIELD, ErrorCode.LIMIT_EXCEEDED
F1, F6 = bytes(4), bytes(24)  # of one float32, and of six
UNKNOWN = [
    *("float64", "int8", "uint32", "complex64", "", "torch.", "torch.torch.float32", "Float32"),
    *(" float32", b"float32", None, 4, ["float32"], {}),
]


def _address(buffer: memoryview | bytes | bytearray) -> int:
    """Where a writable buffer's memory starts, without our own help."""
    return torch.frombuffer(buffer, dtype=torch.uint8).data_ptr()


@each_row(
    ("dtype", "shape", "data", "code", "text"),
    [
        *((name, [1], F1, INVALID, "x.dtype: got") for name in UNKNOWN),
        ("float32", [2, 3], bytes(23), INVALID, "got 23 bytes, expected 24 for"),
        ("float32", [2, 3], bytes(25), INVALID, "got 25 bytes, expected 24 for"),
        ("float16", [2, 3], F6, INVALID, "expected 12 for float16 [2, 3]"),
        ("float32", [1], b"", INVALID, "got 0 bytes"),
        ("float32", [-1, 3], F6, INVALID, "x.shape: got a list of 2 items"),
        ("float32", [0], b"", INVALID, "x.shape: got a list of 1 items"),
        ("float32", [], F1, INVALID, "x.shape: got a list of 0 items"),
        ("float32", [1] * 5, F1, INVALID, "expected 1 to 4 positive"),
        ("float32", [1.0], F1, INVALID, "x.shape"),
        ("float32", [True], F1, INVALID, "x.shape"),
        ("float32", ["1"], F1, INVALID, "x.shape"),
        ("float32", [[1]], F1, INVALID, "x.shape"),
        ("float32", "1", F1, INVALID, "x.shape: got a string of 1 characters"),
        ("float32", 1, F1, INVALID, "x.shape: got 1"),
        ("float32", None, F1, INVALID, "x.shape: got None"),
        ("float32", {1: 1}, F1, INVALID, "x.shape"),
        ("float32", [MAX_DIMENSION + 1], b"", INVALID, "x.shape"),
        ("float32", [2**63], b"", INVALID, "x.shape"),
        ("float32", [MAX_DIMENSION] * 4, b"", LIMIT, "at most 2147483648"),
        ("int64", [2**28 + 1], b"", LIMIT, "at most 2147483648"),
        ("float32", [1], "abcd", INVALID, "x: got str, expected raw bytes"),
        ("float32", [1], None, INVALID, "x: got NoneType"),
        ("float32", [1], [1.0], INVALID, "x: got list"),
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
    for shape in ((5,), (2, 3), (1, 1, 1), (2, 1, 3, 4)):
        tensor = (torch.randn(shape) * 1000).to(dtype)
        wire = from_torch(tensor)
        assert (wire.dtype, wire.shape) == (name, shape)
        for spelling in (name, f"torch.{name}"):
            checked = WireTensor.checked(spelling, list(shape), bytes(wire.data), "x")
            assert to_torch(checked).dtype == dtype
            assert torch.equal(to_torch(checked), tensor)
    request = LinearRequest(layer_idx=0, module_names=("q_proj",), hidden_states=from_torch(tensor))
    frame = encode_request(request, 1, 1000)[1]
    assert isinstance(frame, memoryview)
    assert _address(frame) == tensor.data_ptr()
    # Contiguous all the same: no second element stands there.
    column = torch.arange(35).to(dtype).reshape(7, 5).T[..., :1]
    assert column.stride() == (1, 5)
    wire = from_torch(column)
    assert (wire.shape, _address(wire.data)) == ((5, 1), column.data_ptr())
    assert torch.equal(to_torch(wire), column)


def test_bytes_are_little_endian_and_in_c_order() -> None:
    tensor = torch.tensor([[1, 2], [3, 4]], dtype=torch.int64, requires_grad=False)
    for sent, order in ((tensor, (1, 2, 3, 4)), (tensor.T, (1, 3, 2, 4))):
        assert bytes(from_torch(sent).data) == b"".join(n.to_bytes(8, "little") for n in order)
    gradients = torch.ones(3, requires_grad=True)
    assert bytes(from_torch(gradients).data) == bytes(from_torch(torch.ones(3)).data)
    assert "7777" not in repr(WireTensor("float32", (1,), b"7777"))


def test_memory_is_kept_and_never_aliased_where_it_cannot_change() -> None:
    buffer = bytearray(8000)
    tensor = to_torch(WireTensor.checked("int64", [1000], memoryview(buffer), "x"))
    with pytest.raises(BufferError):
        buffer.extend(b"x")  # a buffer that is viewed cannot move
    assert not tensor.any()
    for wrap in (bytes, memoryview):
        data = bytes(8)
        copied = to_torch(WireTensor.checked("float32", [2], wrap(data), "x"))
        copied += 1.0
        assert data == bytes(8)


def test_a_big_endian_machine_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    require_little_endian()
    monkeypatch.setattr(sys, "byteorder", "big")
    with pytest.raises(ProtocolError, match="got big-endian byte order, expected little-endian"):
        require_little_endian()
