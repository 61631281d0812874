"""Properties of remembered headers: they change what decoding costs, and nothing that it says."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from protocol import encoding
from protocol.encoding import (
    EnvelopeError,
    Form,
    decode_reply,
    encode_reply,
    encode_request,
    open_request,
    read_request,
)
from protocol.errors import ErrorCode, ProtocolError
from protocol.header_memo import HeaderMemo
from protocol.header_numbers import reply_header, request_header
from protocol.messages import MAX_TIMEOUT_MS, Request, Response, Timing
from protocol.tensors import Buffer
from tests.property import test_encoding_property as wire

MEMOS = ("_sent_requests", "_sent_replies", "_known_requests", "_known_replies")

# Around every bound that a number of a header has.
numbers = st.sampled_from(
    [0, 1, 2, MAX_TIMEOUT_MS, MAX_TIMEOUT_MS + 1, 2**53, 2**53 + 1, 2**63 - 1, 2**63, 2**64 - 1]
) | st.integers(0, 2**64 - 1)


class _Forgetful(HeaderMemo[Any, Any]):
    """Remembers nothing, so that everything goes the full way."""

    def recall(self, key: Any) -> Any:
        return None


@contextmanager
def _in_full() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for name in MEMOS:
            patch.setattr(encoding, name, _Forgetful(2))
        yield


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


def _read(frames: list[Buffer]) -> tuple[object, ...]:
    opened = open_request(frames, wire.MAX_BYTES)
    return opened.form, opened.request_id, opened.timeout_ms, opened.method, read_request(opened)


def _decode(frames: list[Buffer]) -> tuple[object, ...]:
    reply = decode_reply(frames)
    return reply, reply.request_id, reply.method, reply.error, reply.timing, reply.response


def _same_both_ways(decode: Callable[[list[Buffer]], Any], frames: list[Buffer]) -> None:
    received = [memoryview(bytearray(frame)) for frame in frames]
    with _in_full():
        in_full = _said(decode, list(received))
    # What is remembered outlives the example: all of them share one memory, as clients do. Twice,
    # because the first may be the one that is remembered.
    assert _said(decode, list(received)) == in_full
    assert _said(decode, list(received)) == in_full


@wire.noisy
@given(message=wire.requests, request_id=numbers, timeout_ms=numbers, data=st.data())
def test_requests_read_the_same(
    message: Request, request_id: int, timeout_ms: int, data: st.DataObject
) -> None:
    good = encode_request(message, 1, 1000)
    _same_both_ways(_read, good)
    _same_both_ways(_read, encode_request(message, request_id, timeout_ms))
    _same_both_ways(_read, wire._flipped(good, data))
    header, *frames = good
    _same_both_ways(_read, [header, *data.draw(st.permutations(frames))])
    tampered = msgpack.packb(wire._tampered(msgpack.unpackb(header), data))
    _same_both_ways(_read, [tampered, *frames])


@wire.noisy
@given(result=wire.results, request_id=numbers, queue=numbers, compute=numbers, data=st.data())
def test_replies_decode_the_same(
    result: tuple[str, Response | ErrorCode],
    request_id: int,
    queue: int,
    compute: int,
    data: st.DataObject,
) -> None:
    good = encode_reply(Form.FRAMED, 1, *result, Timing(queue_us=1, compute_us=2))
    _same_both_ways(_decode, good)
    claim = Timing.model_construct(queue_us=queue, compute_us=compute)
    _same_both_ways(_decode, encode_reply(Form.FRAMED, request_id, *result, claim))
    _same_both_ways(_decode, wire._flipped(good, data))
    header, *frames = good
    tampered = msgpack.packb(wire._tampered(msgpack.unpackb(header), data))
    _same_both_ways(_decode, [tampered, *frames])


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
    _same_both_ways(_read, [request_header(request_id, number, template), *frames])
    _same_both_ways(_decode, [reply_header(request_id, number, number, template), *frames])


@wire.noisy
@given(data=st.data(), messages=st.lists(wire.requests, min_size=1, max_size=4))
def test_requests_with_bodies_of_others_read_the_same(
    data: st.DataObject, messages: list[Request]
) -> None:
    """Every header with every other message's frames, all of them known."""
    sent = [encode_request(message, 1, 1000) for message in messages]
    for frames in sent:
        _same_both_ways(_read, frames)
    header, *_ = data.draw(st.sampled_from(sent))
    _, *frames = data.draw(st.sampled_from(sent))
    _same_both_ways(_read, [header, *frames])


@wire.common
@given(message=wire.requests, request_id=wire.ids, timeout_ms=st.integers(1, MAX_TIMEOUT_MS))
def test_requests_are_written_the_same(message: Request, request_id: int, timeout_ms: int) -> None:
    with _in_full():
        in_full = encode_request(message, request_id, timeout_ms)
    for _ in range(2):
        assert encode_request(message, request_id, timeout_ms) == in_full


@wire.common
@given(result=wire.results, request_id=wire.ids, timing=wire.timings)
def test_replies_are_written_the_same(
    result: tuple[str, Response | ErrorCode], request_id: int, timing: Timing | None
) -> None:
    with _in_full():
        in_full = encode_reply(Form.FRAMED, request_id, *result, timing)
    for _ in range(2):
        assert encode_reply(Form.FRAMED, request_id, *result, timing) == in_full
