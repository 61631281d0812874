"""Tests of what is remembered of requests' headers, and that nothing is accepted for it."""

from __future__ import annotations

import itertools
import tracemalloc
from typing import Any, get_args

import msgpack
import pytest

from gpu_side.encoding import (
    MAX_KNOWN_HEADERS,
    Form,
    RequestReader,
    encode_reply,
    open_request,
    read_request,
)
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
    Timing,
)
from protocol.tensors import Buffer, WireTensor

MEMORY_BYTES = 16 * 1024 * 1024
LIMIT = 2**20


class Preparing:
    """Prepares what it is asked to, and counts how often."""

    def __init__(self) -> None:
        self.prepared: list[Request] = []

    def __call__(self, request: Request) -> Kernel:
        self.prepared.append(request)
        number = len(self.prepared)
        return lambda *_: (TensorReply(output=_tensor(number)), None)


@pytest.fixture
def preparing() -> Preparing:
    return Preparing()


@pytest.fixture
def reader(preparing: Preparing) -> RequestReader:
    return RequestReader(LIMIT, preparing)


def _tensor(*shape: int, fill: bytes = b"\1") -> WireTensor:
    tensor = WireTensor("float16", shape, b"")
    return WireTensor("float16", shape, fill * tensor.payload_bytes)


def _linear(**changes: Any) -> LinearRequest:
    fields: dict[str, Any] = {
        "layer_idx": 3,
        "module_names": ("q_proj",),
        "hidden_states": _tensor(1, 4),
    }
    return LinearRequest(**fields | changes)


def _read(reader: RequestReader, frames: list[Buffer]) -> Request:
    request, _ = reader.read(reader.open(frames))
    return request


# --------------------------------------------------------------------------- what is remembered


def test_second_request_of_a_header_is_known_and_has_the_same_kernel(
    reader: RequestReader, preparing: Preparing
) -> None:
    first = reader.open(encode_request(_linear(), 1, 1000))
    assert first.known is None
    assert len(reader.known) == 0  # its body has not been checked yet
    _, kernel = reader.read(first)
    assert len(reader.known) == 1
    again = _linear(hidden_states=_tensor(1, 4, fill=b"\2"))
    opened = reader.open(encode_request(again, 2**63 - 1, 3_600_000))
    assert opened.known is not None
    assert (opened.form, opened.method) == (Form.FRAMED, "Linear")
    assert (opened.request_id, opened.timeout_ms) == (2**63 - 1, 3_600_000)
    assert reader.read(opened) == (again, kernel)
    assert len(reader.known) == len(preparing.prepared) == 1


def test_a_request_that_cannot_be_served_is_not_remembered() -> None:
    def refuse(request: Request) -> Kernel:
        raise ProtocolError("Linear", got="it", expected="another", code=ErrorCode.UNAVAILABLE)

    reader = RequestReader(LIMIT, refuse)
    for _ in range(2):
        with pytest.raises(ProtocolError, match="Linear: got it"):
            _read(reader, encode_request(_linear(), 1, 1000))
    assert not reader.known


def test_requests_of_two_headers_have_two_kernels(reader: RequestReader) -> None:
    kernels = set()
    for layer in (1, 2, 1, 2):
        _, kernel = reader.read(reader.open(encode_request(_linear(layer_idx=layer), 1, 1000)))
        kernels.add(kernel)
    assert len(kernels) == len(reader.known) == 2


@pytest.mark.parametrize(
    "frames",
    [
        encode_request(InitRequest(), 1, 1000),
        encode_request(_linear(), 0, 1000),
        encode_request(_linear(), 1, 0),
        encode_request(_linear(), 1, 1000)[:1],
        [*encode_request(_linear(), 1, 1000), b"\0"],
        [encode_request(_linear(), 1, 1000)[0], b"\0" * 7],
        [bytes(encode_request(_linear(), 1, 1000)[0]) + b"\0", b"\0" * 8],
        encode_request(LinearRequest.model_construct(**dict(_linear(), layer_idx=-1)), 1, 1000),
        # The same map in another order.
        [
            msgpack.packb(
                dict(reversed(msgpack.unpackb(encode_request(_linear(), 1, 1)[0]).items()))
            ),
            b"\0" * 8,
        ],
    ],
)
def test_what_is_refused_or_laid_out_otherwise_is_not_remembered(
    frames: list[Buffer], reader: RequestReader
) -> None:
    outcomes = []
    for _ in range(2):
        try:
            outcomes.append(repr(_read(reader, frames)))
        except ProtocolError as error:
            outcomes.append(str(error))
    assert outcomes[0] == outcomes[1]
    assert len(reader.known) == 0


# ------------------------------------------------------------------- what is checked all the same


@pytest.mark.parametrize(
    ("request_id", "timeout_ms", "where"),
    [
        (0, 1000, "request.request_id"),
        (2**63, 1000, "request.request_id"),
        (2**64 - 1, 1000, "request.request_id"),
        (1, 0, "request.timeout_ms"),
        (1, 3_600_001, "request.timeout_ms"),
        (1, 2**64 - 1, "request.timeout_ms"),
    ],
)
def test_numbers_of_a_known_request_are_checked(
    request_id: int, timeout_ms: int, where: str, reader: RequestReader
) -> None:
    _read(reader, encode_request(_linear(), 1, 1000))
    assert len(reader.known) == 1
    with pytest.raises(ProtocolError) as info:
        reader.open(encode_request(_linear(), request_id, timeout_ms))
    assert (info.value.where, info.value.code) == (where, ErrorCode.INVALID_FIELD)


@pytest.mark.parametrize(
    ("change", "code"),
    [
        (lambda h, a, b: [h], ErrorCode.INVALID_FIELD),
        (lambda h, a, b: [h, a], ErrorCode.INVALID_FIELD),
        (lambda h, a, b: [h, b, a], ErrorCode.INVALID_FIELD),
        (lambda h, a, b: [h, a, b[:-1]], ErrorCode.INVALID_FIELD),
        (lambda h, a, b: [h, a, bytes(b) + b"\0"], ErrorCode.INVALID_FIELD),
        (lambda h, a, b: [h, a, b, b], ErrorCode.MALFORMED_MESSAGE),
        (lambda h, a, b: [h, a, b, b, b], ErrorCode.MALFORMED_MESSAGE),
    ],
)
def test_frames_of_a_known_request_are_checked(
    change: Any, code: ErrorCode, reader: RequestReader
) -> None:
    header, a, b = encode_request(MatmulRequest(a=_tensor(2, 3), b=_tensor(3, 4)), 1, 1000)
    _read(reader, [header, a, b])
    assert len(reader.known) == 1
    with pytest.raises(ProtocolError) as info:
        _read(reader, change(header, a, b))
    assert info.value.code is code


def test_limit_of_a_single_frame_holds_for_a_known_header(reader: RequestReader) -> None:
    frames = encode_request(_linear(), 1, 1000)
    _read(reader, frames)
    assert len(reader.known) == 1
    with pytest.raises(ProtocolError, match="expected at most 100") as info:
        RequestReader(100, Preparing()).open(frames[:1])
    assert info.value.code is ErrorCode.LIMIT_EXCEEDED


def test_a_peer_that_never_repeats_itself_fills_little_memory() -> None:
    reader = RequestReader(LIMIT, lambda request: lambda *_: (TensorReply(output=_tensor(1)), None))
    triples = itertools.product(get_args(ModuleName), repeat=3)
    messages = itertools.product(triples, range(4000, 4040))
    tracemalloc.start()
    try:
        for names, layer in itertools.islice(messages, 3 * MAX_KNOWN_HEADERS):
            message = _linear(
                layer_idx=layer, module_names=names, hidden_states=_tensor(1, 1, 1, 1)
            )
            _read(reader, [memoryview(bytearray(f)) for f in encode_request(message, 1, 1000)])
            assert len(reader.known) <= MAX_KNOWN_HEADERS
        held = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert len(reader.known) > MAX_KNOWN_HEADERS // 2
    assert held < MEMORY_BYTES


def test_requests_and_replies_are_not_mistaken_for_each_other(reader: RequestReader) -> None:
    request = encode_request(_linear(), 1, 1000)
    timing = Timing(queue_us=3, compute_us=4)
    reply = encode_reply(Form.FRAMED, 7, "Linear", TensorReply(output=_tensor(4)), timing)
    for _ in range(2):
        assert _read(reader, request) == _linear()
        assert decode_reply(reply).response == TensorReply(output=_tensor(4))
        with pytest.raises(ProtocolError):
            _read(reader, reply)
        with pytest.raises(ProtocolError):
            decode_reply(request)


def test_a_reader_says_what_the_full_way_says(reader: RequestReader) -> None:
    frames = encode_request(_linear(), 1, 1000)
    for _ in range(2):
        assert _read(reader, frames) == read_request(open_request(frames, LIMIT))
