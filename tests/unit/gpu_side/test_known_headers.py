"""What is remembered of requests' headers; tests/property says that it changes no message."""

from __future__ import annotations

import itertools
import tracemalloc
from typing import Any, get_args

import msgpack
import pytest

from gpu_side import encoding
from gpu_side.encoding import Form, RequestReader, encode_reply
from gpu_side.replies import Kernel
from protocol.encoding import decode_reply, encode_request
from protocol.errors import ErrorCode, ProtocolError
from protocol.messages import (
    InitRequest,
    LinearRequest,
    MatmulRequest,
    ModuleName,
    Request,
    TensorReply,
)
from protocol.tensors import Buffer, WireTensor
from tests.kit.rows import each_row

LIMIT = 2**20


def _prepare(request: Request) -> Kernel:
    return lambda *_: (TensorReply(output=_tensor(1)), None)


def _tensor(*shape: int, fill: bytes = b"\1") -> WireTensor:
    tensor = WireTensor("float16", shape, b"")
    return WireTensor("float16", shape, fill * tensor.payload_bytes)


def _linear(**changes: Any) -> LinearRequest:
    fields = {"layer_idx": 3, "module_names": ("q_proj",), "hidden_states": _tensor(1, 4)}
    return LinearRequest(**fields | changes)


def _read(reader: RequestReader[Kernel], frames: list[Buffer]) -> Request:
    request, _ = reader.read(reader.open(frames))
    return request


def test_requests_of_one_header_have_one_kernel_and_those_of_two_have_two() -> None:
    reader = RequestReader(LIMIT, _prepare)
    first = reader.open(encode_request(_linear(), 1, 1000))
    assert (first.known, reader.known) == (None, {})  # its body has not been checked yet
    _, kernel = reader.read(first)
    again = _linear(hidden_states=_tensor(1, 4, fill=b"\2"))
    opened = reader.open(encode_request(again, 2**63 - 1, 3_600_000))
    assert opened.known is not None
    assert (opened.form, opened.method) == (Form.FRAMED, "Linear")
    assert (opened.request_id, opened.timeout_ms) == (2**63 - 1, 3_600_000)
    assert reader.read(opened) == (again, kernel)
    _, other = reader.read(reader.open(encode_request(_linear(layer_idx=4), 1, 1000)))
    assert other is not kernel
    assert len(reader.known) == 2


def _refuse(request: Request) -> Kernel:
    raise ProtocolError("Linear", got="it", expected="another", code=ErrorCode.UNAVAILABLE)


GOOD = encode_request(_linear(), 1, 1000)
REVERSED = dict(reversed(msgpack.unpackb(encode_request(_linear(), 1, 1)[0]).items()))


@each_row(
    "frames",
    [
        encode_request(InitRequest(), 1, 1000),
        encode_request(_linear(), 0, 1000),
        encode_request(_linear(), 1, 0),
        GOOD[:1],
        [*GOOD, b"\0"],
        [GOOD[0], b"\0" * 7],
        [bytes(GOOD[0]) + b"\0", b"\0" * 8],
        encode_request(LinearRequest.model_construct(**dict(_linear(), layer_idx=-1)), 1, 1000),
        # The same map in another order.
        [msgpack.packb(REVERSED), b"\0" * 8],
        # A reply.
        encode_reply(Form.FRAMED, 7, "Linear", TensorReply(output=_tensor(4))),
    ],
)
def test_what_is_refused_or_laid_out_otherwise_is_not_remembered(frames: list[Buffer]) -> None:
    reader, outcomes = RequestReader(LIMIT, _prepare), []
    for _ in range(2):
        try:
            outcomes.append(repr(_read(reader, frames)))
        except ProtocolError as error:
            outcomes.append(str(error))
    assert outcomes[0] == outcomes[1]
    assert reader.known == {}
    # Nor is what cannot be served.
    reader = RequestReader(LIMIT, _refuse)
    for _ in range(2):
        with pytest.raises(ProtocolError, match="Linear: got it"):
            _read(reader, GOOD)
    assert reader.known == {}
    with pytest.raises(ProtocolError):
        decode_reply(GOOD)


@each_row(
    ("request_id", "timeout_ms", "where"),
    [
        *((number, 1000, "request_id") for number in (0, 2**63, 2**64 - 1)),
        *((1, number, "timeout_ms") for number in (0, 3_600_001, 2**64 - 1)),
    ],
)
def test_numbers_of_a_known_request_are_checked(
    request_id: int, timeout_ms: int, where: str
) -> None:
    reader = RequestReader(LIMIT, _prepare)
    _read(reader, GOOD)
    with pytest.raises(ProtocolError) as info:
        reader.open(encode_request(_linear(), request_id, timeout_ms))
    assert (info.value.where, info.value.code) == (f"request.{where}", ErrorCode.INVALID_FIELD)


H, A, B = encode_request(MatmulRequest(a=_tensor(2, 3), b=_tensor(3, 4)), 1, 1000)


@each_row(
    ("frames", "code"),
    [
        ([H], ErrorCode.INVALID_FIELD),
        ([H, A], ErrorCode.INVALID_FIELD),
        ([H, B, A], ErrorCode.INVALID_FIELD),
        ([H, A, bytes(B)[:-1]], ErrorCode.INVALID_FIELD),
        ([H, A, bytes(B) + b"\0"], ErrorCode.INVALID_FIELD),
        ([H, A, B, B], ErrorCode.MALFORMED_MESSAGE),
        ([H, A, B, B, B], ErrorCode.MALFORMED_MESSAGE),
    ],
)
def test_frames_of_a_known_request_are_checked(frames: list[Buffer], code: ErrorCode) -> None:
    reader = RequestReader(LIMIT, _prepare)
    _read(reader, [H, A, B])
    with pytest.raises(ProtocolError) as info:
        _read(reader, frames)
    assert info.value.code is code
    # A header alone is a message of one frame, with the limit of those.
    reader._max_bytes = 10
    with pytest.raises(ProtocolError, match="expected at most 10"):
        reader.open([H])


def test_a_client_that_never_repeats_itself_fills_little_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    most = encoding.MAX_KNOWN_HEADERS // 16
    monkeypatch.setattr(encoding, "MAX_KNOWN_HEADERS", most)
    reader = RequestReader(LIMIT, _prepare)
    triples = itertools.product(get_args(ModuleName), repeat=3)
    messages = itertools.product(triples, range(4000, 4004))
    tracemalloc.start()
    try:
        for names, layer in itertools.islice(messages, 3 * most):
            message = _linear(
                layer_idx=layer, module_names=names, hidden_states=_tensor(1, 1, 1, 1)
            )
            _read(reader, [memoryview(bytearray(f)) for f in encode_request(message, 1, 1000)])
            assert len(reader.known) <= most
        held = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert len(reader.known) > most // 2
    # 16 MiB for as many as there may be.
    assert held < most * 4096
