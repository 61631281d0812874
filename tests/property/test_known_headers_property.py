"""Properties of known headers: they change what decoding costs, and nothing that it says."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgpack
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from gpu_side.encoding import (
    EnvelopeError,
    Form,
    RequestReader,
    encode_reply,
    open_request,
    read_request,
)
from protocol.encoding import decode_reply, encode_request
from protocol.errors import ErrorCode, ProtocolError
from protocol.header_numbers import REQUEST
from protocol.messages import (
    MAX_TIMEOUT_MS,
    LinearRequest,
    Request,
    Response,
    TensorReply,
    Timing,
)
from protocol.prepared import PreparedRequest
from protocol.tensors import Buffer, WireTensor
from tests.kit.wire import Expecting
from tests.property import test_encoding_property as wire

# One for all examples, as one service has for all its clients.
_reader = RequestReader(wire.MAX_BYTES, lambda request: lambda _: (request, None))

# Around every bound that a number of a header has.
numbers = st.sampled_from(
    [0, 1, 2, MAX_TIMEOUT_MS, MAX_TIMEOUT_MS + 1, 2**53, 2**53 + 1, 2**63 - 1, 2**63, 2**64 - 1]
) | st.integers(0, 2**64 - 1)


def _said(decode: Callable[[list[Buffer]], Any], frames: list[Buffer]) -> tuple[object, ...]:
    """What a decoder says of a message: all that anybody could see of it."""
    try:
        decoded = decode(frames)
    except ProtocolError as error:
        said: tuple[object, ...] = (type(error), str(error), error.code)
        if isinstance(error, EnvelopeError):
            said += (error.form, error.request_id)
        return said
    message = decoded[-1]
    # repr, for equal values of unequal types; the fields that were set, which == leaves out.
    seen = message.model_fields_set if isinstance(message, BaseModel) else None
    return decoded, repr(decoded), seen


def _in_full(frames: list[Buffer]) -> tuple[object, ...]:
    opened = open_request(frames, wire.MAX_BYTES)
    return opened.form, opened.request_id, opened.timeout_ms, opened.method, read_request(opened)


def _as_known(frames: list[Buffer]) -> tuple[object, ...]:
    opened = _reader.open(frames)
    request, _ = _reader.read(opened)
    return opened.form, opened.request_id, opened.timeout_ms, opened.method, request


def _requests_read_the_same(frames: list[Buffer]) -> None:
    received = [memoryview(bytearray(frame)) for frame in frames]
    in_full = _said(_in_full, list(received))
    # What is remembered outlives the example. Twice, because the first may be what is remembered.
    assert _said(_as_known, list(received)) == in_full
    assert _said(_as_known, list(received)) == in_full


def _reply_reads_the_same(expecting: Expecting, frames: list[Buffer]) -> bool:
    """Compare what is taken without decoding with what decoding says; True if it was taken."""
    received = [memoryview(bytearray(frame)) for frame in frames]
    found = expecting.expected(received)
    if found is not None:
        in_full = decode_reply(received)
        assert (found, repr(found)) == (in_full, repr(in_full))
    return found is not None


@wire.noisy
@given(message=wire.requests, request_id=numbers, timeout_ms=numbers, data=st.data())
def test_requests_read_the_same(
    message: Request, request_id: int, timeout_ms: int, data: st.DataObject
) -> None:
    good = encode_request(message, 1, 1000)
    _requests_read_the_same(good)
    _requests_read_the_same(encode_request(message, request_id, timeout_ms))
    _requests_read_the_same(wire._flipped(good, data))
    header, *frames = good
    _requests_read_the_same([header, *data.draw(st.permutations(frames))])
    tampered = msgpack.packb(wire._tampered(msgpack.unpackb(header), data))
    _requests_read_the_same([tampered, *frames])


@wire.noisy
@given(
    output=wire.tensors(wire.floats | st.just("int32")),
    request_id=numbers,
    queue=numbers,
    compute=numbers,
    other=wire.results,
    data=st.data(),
)
def test_what_is_taken_for_the_expected_reply_decodes_to_it(
    output: WireTensor,
    request_id: int,
    queue: int,
    compute: int,
    other: tuple[str, Response | ErrorCode],
    data: st.DataObject,
) -> None:
    message = LinearRequest(layer_idx=0, module_names=("q_proj",), hidden_states=output)
    # Ids are drawn from 62 bits.
    ids = [n for n in (1, request_id) if n < 2**63]
    expecting = Expecting(PreparedRequest(message, output.shape, output.dtype), ids)
    result, timing = TensorReply(output=output), Timing(queue_us=1, compute_us=2)
    good = encode_reply(Form.FRAMED, 1, "Linear", result, timing)
    assert _reply_reads_the_same(expecting, good)
    claim = Timing.model_construct(queue_us=queue, compute_us=compute)
    in_bounds = request_id < 2**63 and max(queue, compute) <= 2**53
    frames = encode_reply(Form.FRAMED, request_id, "Linear", result, claim)
    assert _reply_reads_the_same(expecting, frames) == in_bounds
    _reply_reads_the_same(expecting, wire._flipped(good, data))
    _reply_reads_the_same(expecting, encode_reply(Form.FRAMED, 1, *other, timing))
    header, *rest = good
    tampered = msgpack.packb(wire._tampered(msgpack.unpackb(header), data))
    _reply_reads_the_same(expecting, [tampered, *rest])


@wire.noisy
@given(
    template=st.binary(max_size=60),
    request_id=numbers,
    number=numbers,
    frames=st.lists(st.binary(max_size=8), max_size=4),
)
def test_random_templates_read_the_same(
    template: bytes, request_id: int, number: int, frames: list[bytes]
) -> None:
    _requests_read_the_same([REQUEST.header(template, request_id, number), *frames])


@wire.noisy
@given(data=st.data(), messages=st.lists(wire.requests, min_size=1, max_size=4))
def test_requests_with_bodies_of_others_read_the_same(
    data: st.DataObject, messages: list[Request]
) -> None:
    """Every header with every other message's frames, all of them known."""
    sent = [encode_request(message, 1, 1000) for message in messages]
    for frames in sent:
        _requests_read_the_same(frames)
    header, *_ = data.draw(st.sampled_from(sent))
    _, *frames = data.draw(st.sampled_from(sent))
    _requests_read_the_same([header, *frames])


@wire.common
@given(result=wire.results, request_id=wire.ids, timing=wire.timings)
def test_replies_are_written_the_same_each_time(
    result: tuple[str, Response | ErrorCode], request_id: int, timing: Timing | None
) -> None:
    first = encode_reply(Form.FRAMED, request_id, *result, timing)
    assert encode_reply(Form.FRAMED, request_id, *result, timing) == first
