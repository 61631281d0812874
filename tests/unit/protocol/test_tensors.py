"""Tests of tensors on the wire: what is refused, and that bytes are aliased and not copied."""

from __future__ import annotations

import sys

import pytest
import torch
import zmq

from protocol.encoding import encode_request
from protocol.errors import ErrorCode, ProtocolError
from protocol.messages import LinearRequest
from protocol.tensors import (
    MAX_DIMENSION,
    MAX_TENSOR_BYTES,
    WireTensor,
    dtype_name,
    from_torch,
    require_little_endian,
    short_name,
    to_torch,
    torch_dtype,
)
from tests.kit.rows import each_row

DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.int32, torch.int64]


def _address(buffer: memoryview | bytes | bytearray) -> int:
    """Where a writable buffer's memory starts, without torch's or our own help."""
    return torch.frombuffer(buffer, dtype=torch.uint8).data_ptr()


@pytest.mark.parametrize("name", ["float32", "float16", "bfloat16", "int32", "int64"])
def test_both_forms_of_a_dtype_name_are_read(name: str) -> None:
    assert dtype_name(name, "x") == name
    assert dtype_name(f"torch.{name}", "x") == name
    assert short_name(torch_dtype(name)) == name


@each_row(
    "name",
    [
        *("float64", "int8", "uint32", "", "torch.", "torch.torch.float32", "Float32", " float32"),
        *(b"float32", None, 4, ["float32"], {}),
    ],
)
def test_unknown_dtype_is_refused(name: object) -> None:
    with pytest.raises(ProtocolError, match=r"^x\.dtype: got .*, expected one of float32") as info:
        dtype_name(name, "x")
    assert info.value.code is ErrorCode.INVALID_FIELD


@each_row(
    ("dtype", "shape", "data", "code", "text"),
    [
        ("float32", [2, 3], b"\0" * 23, ErrorCode.INVALID_FIELD, "got 23 bytes, expected 24 for"),
        ("float32", [2, 3], b"\0" * 25, ErrorCode.INVALID_FIELD, "got 25 bytes, expected 24 for"),
        ("float16", [2, 3], b"\0" * 24, ErrorCode.INVALID_FIELD, "expected 12 for float16 [2, 3]"),
        ("float32", [1], b"", ErrorCode.INVALID_FIELD, "got 0 bytes"),
        ("float32", [-1, 3], b"\0" * 24, ErrorCode.INVALID_FIELD, "x.shape: got a list of 2 items"),
        ("float32", [0], b"", ErrorCode.INVALID_FIELD, "x.shape: got a list of 1 items"),
        ("float32", [], b"\0" * 4, ErrorCode.INVALID_FIELD, "x.shape: got a list of 0 items"),
        ("float32", [1] * 5, b"\0" * 4, ErrorCode.INVALID_FIELD, "expected 1 to 4 positive"),
        ("float32", [1.0], b"\0" * 4, ErrorCode.INVALID_FIELD, "x.shape"),
        ("float32", [True], b"\0" * 4, ErrorCode.INVALID_FIELD, "x.shape"),
        ("float32", ["1"], b"\0" * 4, ErrorCode.INVALID_FIELD, "x.shape"),
        ("float32", [[1]], b"\0" * 4, ErrorCode.INVALID_FIELD, "x.shape"),
        (
            "float32",
            "1",
            b"\0" * 4,
            ErrorCode.INVALID_FIELD,
            "x.shape: got a string of 1 characters",
        ),
        ("float32", 1, b"\0" * 4, ErrorCode.INVALID_FIELD, "x.shape: got 1"),
        ("float32", None, b"\0" * 4, ErrorCode.INVALID_FIELD, "x.shape: got None"),
        ("float32", {1: 1}, b"\0" * 4, ErrorCode.INVALID_FIELD, "x.shape"),
        ("float32", [MAX_DIMENSION + 1], b"", ErrorCode.INVALID_FIELD, "x.shape"),
        ("float32", [2**63], b"", ErrorCode.INVALID_FIELD, "x.shape"),
        ("float32", [MAX_DIMENSION] * 4, b"", ErrorCode.LIMIT_EXCEEDED, "at most 2147483648"),
        ("int64", [2**28 + 1], b"", ErrorCode.LIMIT_EXCEEDED, f"at most {MAX_TENSOR_BYTES}"),
        ("float32", [1], "abcd", ErrorCode.INVALID_FIELD, "x: got str, expected raw bytes"),
        ("float32", [1], None, ErrorCode.INVALID_FIELD, "x: got NoneType"),
        ("float32", [1], [1.0], ErrorCode.INVALID_FIELD, "x: got list"),
        (
            "complex64",
            [1],
            b"\0" * 8,
            ErrorCode.INVALID_FIELD,
            "x.dtype: got a string of 9 characters",
        ),
    ],
)
def test_wrong_claim_about_bytes_is_refused(
    dtype: object, shape: object, data: object, code: ErrorCode, text: str
) -> None:
    with pytest.raises(ProtocolError) as info:
        WireTensor.checked(dtype, shape, data, "x")
    assert info.value.code is code
    assert text in str(info.value)


@pytest.mark.parametrize("data", [b"\0" * 24, bytearray(24), memoryview(bytes(24))])
def test_right_claim_is_accepted(data: bytes | bytearray | memoryview) -> None:
    tensor = WireTensor.checked("torch.float32", [2, 3], data, "x")
    assert (tensor.dtype, tensor.shape, tensor.payload_bytes) == ("float32", (2, 3), 24)
    assert tensor.data is data


def test_contents_are_not_in_the_repr() -> None:
    assert "7777" not in repr(WireTensor.checked("float32", [1], b"7777", "x"))


@each_row("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(5,), (2, 3), (1, 1, 1), (2, 1, 3, 4)])
def test_round_trip_keeps_every_bit(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = (torch.randn(shape) * 1000).to(dtype)
    wire = from_torch(tensor)
    assert (wire.dtype, wire.shape) == (short_name(dtype), shape)
    back = to_torch(WireTensor.checked(wire.dtype, list(wire.shape), bytes(wire.data), "x"))
    assert back.dtype == dtype
    assert torch.equal(back, tensor)


def test_bytes_are_little_endian_and_in_c_order() -> None:
    tensor = torch.tensor([[1, 2], [3, 4]], dtype=torch.int64)
    expected = b"".join(n.to_bytes(8, "little") for n in (1, 2, 3, 4))
    assert bytes(from_torch(tensor).data) == expected
    transposed = b"".join(n.to_bytes(8, "little") for n in (1, 3, 2, 4))
    assert bytes(from_torch(tensor.T).data) == transposed


@pytest.mark.parametrize("dtype", DTYPES)
def test_sending_aliases_the_tensors_memory(dtype: torch.dtype) -> None:
    tensor = torch.ones(4, 8, dtype=dtype)
    request = LinearRequest(layer_idx=0, module_names=("q_proj",), hidden_states=from_torch(tensor))
    frame = encode_request(request, 1, 1000)[1]
    assert isinstance(frame, memoryview)
    assert _address(frame) == tensor.data_ptr()
    tensor.zero_()
    assert not any(frame)


def test_sending_a_view_that_is_not_contiguous_copies() -> None:
    tensor = torch.arange(6, dtype=torch.float32).reshape(2, 3)
    wire = from_torch(tensor.T)
    assert isinstance(wire.data, memoryview)
    assert _address(wire.data) != tensor.data_ptr()
    assert torch.equal(to_torch(wire), tensor.T)


@pytest.mark.parametrize("dtype", DTYPES)
def test_sending_a_column_aliases_it(dtype: torch.dtype) -> None:
    tensor = torch.arange(35).to(dtype).reshape(7, 5).T[..., :1]
    assert tensor.stride() == (1, 5)  # contiguous all the same: no second element stands there
    wire = from_torch(tensor)
    assert isinstance(wire.data, memoryview)
    assert (wire.shape, _address(wire.data)) == ((5, 1), tensor.data_ptr())
    assert torch.equal(to_torch(wire), tensor)


def test_gradients_stay_behind() -> None:
    tensor = torch.ones(3, requires_grad=True)
    assert bytes(from_torch(tensor).data) == bytes(from_torch(torch.ones(3)).data)


# 16 bytes fit inside ZeroMQ's message structure; a megabyte is received into a buffer of its own.
@pytest.mark.parametrize("elements", [4, 2**18])
def test_received_frame_is_aliased_by_the_tensor(elements: int) -> None:
    sent = torch.randn(elements)
    context = zmq.Context()
    try:
        with context.socket(zmq.PAIR) as left, context.socket(zmq.PAIR) as right:
            port = left.bind_to_random_port("tcp://127.0.0.1")
            right.connect(f"tcp://127.0.0.1:{port}")
            left.send(from_torch(sent).data)
            assert right.poll(10_000)
            frame = right.recv(copy=False)
    finally:
        context.term()
    tensor = to_torch(WireTensor.checked("float32", [elements], frame.buffer, "x"))
    assert torch.equal(tensor, sent)
    assert tensor.data_ptr() == _address(frame.buffer)
    tensor[0] = 42.0
    assert bytes(frame.buffer[:4]) == bytes(from_torch(torch.tensor([42.0])).data)


def test_tensor_keeps_the_frame_alive() -> None:
    buffer = bytearray(from_torch(torch.arange(1000, dtype=torch.int64)).data)
    tensor = to_torch(WireTensor.checked("int64", [1000], memoryview(buffer), "x"))
    with pytest.raises(BufferError):
        buffer.extend(b"x")  # a buffer that is viewed cannot move
    assert torch.equal(tensor, torch.arange(1000))


@pytest.mark.parametrize("wrap", [bytes, memoryview])
def test_immutable_bytes_are_never_aliased(wrap: type) -> None:
    data = bytes(8)
    tensor = to_torch(WireTensor.checked("float32", [2], wrap(data), "x"))
    tensor += 1.0
    assert data == bytes(8)


def test_big_endian_machine_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    require_little_endian()
    monkeypatch.setattr(sys, "byteorder", "big")
    with pytest.raises(ProtocolError, match="got big-endian byte order, expected little-endian"):
        require_little_endian()
