"""What is remembered of requests' headers; tests/property says that it changes no message."""

from __future__ import annotations

import itertools
from typing import Any, get_args

import msgpack
import pytest

from gpu_side import encoding
from gpu_side.encoding import Form, RequestReader
from gpu_side.replies import Kernel
from protocol.encoding import encode_request
from protocol.errors import ErrorCode, ProtocolError
from protocol.messages import InitRequest, LinearRequest, ModuleName, Request, TensorReply
from protocol.tensors import Buffer, WireTensor
from tests.kit.rows import each_row

LIMIT = 2**20


def _prepare(request: Request) -> Kernel:
    return lambda *_: (TensorReply(output=_tensor(b"\1")), None)


def _refuse(request: Request) -> Kernel:
    raise ProtocolError("Linear", got="it", expected="another", code=ErrorCode.UNAVAILABLE)


def _tensor(fill: bytes) -> WireTensor:
    return WireTensor("float16", (1, 4), fill * 8)


def _linear(**changes: Any) -> LinearRequest:
    fields = {"layer_idx": 3, "module_names": ("q_proj",), "hidden_states": _tensor(b"\1")}
    return LinearRequest(**fields | changes)


def test_requests_of_one_header_have_one_kernel_and_those_of_two_have_two() -> None:
    reader = RequestReader(LIMIT, _prepare)
    first = reader.open(encode_request(_linear(), 1, 1000))
    assert (first.known, reader.known) == (None, {})  # its body has not been checked yet
    _, kernel = reader.read(first)
    again = _linear(hidden_states=_tensor(b"\2"))
    opened = reader.open(encode_request(again, 2**63 - 1, 3_600_000))
    assert opened.known is not None
    assert (opened.form, opened.method) == (Form.FRAMED, "Linear")
    assert (opened.request_id, opened.timeout_ms) == (2**63 - 1, 3_600_000)
    assert reader.read(opened) == (again, kernel)
    _, other = reader.read(reader.open(encode_request(_linear(layer_idx=4), 1, 1000)))
    assert other is not kernel
    assert len(reader.known) == 2


GOOD = encode_request(_linear(), 1, 1000)
REVERSED = dict(reversed(msgpack.unpackb(encode_request(_linear(), 1, 1)[0]).items()))


@each_row(
    ("frames", "prepare"),
    [
        (encode_request(InitRequest(), 1, 1000), _prepare),
        (encode_request(_linear(), 0, 1000), _prepare),
        (GOOD[:1], _prepare),
        ([*GOOD, b"\0"], _prepare),
        ([GOOD[0], b"\0" * 7], _prepare),
        # The same map in another order.
        ([msgpack.packb(REVERSED), b"\0" * 8], _prepare),
        # What cannot be served.
        (GOOD, _refuse),
    ],
)
def test_what_is_refused_or_laid_out_otherwise_is_not_remembered(
    frames: list[Buffer], prepare: Any
) -> None:
    reader, outcomes = RequestReader(LIMIT, prepare), []
    for _ in range(2):
        try:
            outcomes.append(repr(reader.read(reader.open(frames))[0]))
        except ProtocolError as error:
            outcomes.append(str(error))
    assert outcomes[0] == outcomes[1]
    assert reader.known == {}


def test_a_client_that_never_repeats_itself_fills_little_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    most = encoding.MAX_KNOWN_HEADERS // 16
    monkeypatch.setattr(encoding, "MAX_KNOWN_HEADERS", most)
    reader = RequestReader(LIMIT, _prepare)
    triples = itertools.product(get_args(ModuleName), repeat=3)
    for names, layer in itertools.islice(itertools.product(triples, range(4)), 3 * most):
        frames = encode_request(_linear(layer_idx=4000 + layer, module_names=names), 1, 1000)
        reader.read(reader.open([memoryview(bytearray(frame)) for frame in frames]))
        assert len(reader.known) <= most
