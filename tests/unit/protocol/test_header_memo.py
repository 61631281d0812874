"""Tests of what is remembered of headers, for how long, and that nothing is accepted for it."""

from __future__ import annotations

import itertools
import tracemalloc
from typing import Any, get_args

import msgpack
import pytest

from protocol import encoding
from protocol.encoding import (
    Form,
    Reply,
    decode_reply,
    encode_reply,
    encode_request,
    open_request,
    read_request,
)
from protocol.errors import ErrorCode, ProtocolError
from protocol.framed import framed_key, read_framed, to_framed
from protocol.header_memo import MAX_ENTRIES, HeaderMemo, KnownMessage, known_message
from protocol.messages import (
    InitRequest,
    LinearRequest,
    LMHeadRequest,
    MatmulRequest,
    Message,
    ModuleName,
    Request,
    Response,
    TensorReply,
    Timing,
)
from protocol.tensors import Buffer, WireTensor

MEMORY_BYTES = 16 * 1024 * 1024
TIMING = Timing(queue_us=3, compute_us=4)

Requests = HeaderMemo[bytes, KnownMessage[Request]]
Replies = HeaderMemo[bytes, KnownMessage[Response]]


@pytest.fixture
def requests(monkeypatch: pytest.MonkeyPatch) -> Requests:
    memo = Requests()
    monkeypatch.setattr(encoding, "_known_requests", memo)
    return memo


@pytest.fixture
def replies(monkeypatch: pytest.MonkeyPatch) -> Replies:
    memo = Replies()
    monkeypatch.setattr(encoding, "_known_replies", memo)
    return memo


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


def _read(frames: list[Buffer]) -> Request:
    return read_request(open_request(frames, 2**20))


def _reply(result: Response | ErrorCode, timing: Timing | None = TIMING) -> list[Buffer]:
    return encode_reply(Form.FRAMED, 7, "Linear", result, timing)


# --------------------------------------------------------------------------------- the store


def test_memo_returns_what_was_remembered() -> None:
    memo = HeaderMemo[str, int]()
    assert memo.recall("a") is None
    memo.remember("a", 1)
    memo.remember("b", 2)
    memo.remember("a", 3)
    assert (memo.recall("a"), memo.recall("b"), memo.recall("c")) == (3, 2, None)


def test_memo_holds_no_more_than_its_entries() -> None:
    memo = HeaderMemo[int, int](8)
    for key in range(100):
        memo.remember(key, key + 1)
        assert len(memo) <= 8
        assert [memo.recall(k) for k in range(max(0, key - 3), key + 1)] == [
            k + 1 for k in range(max(0, key - 3), key + 1)
        ]


def test_memo_forgets_what_was_not_used_first() -> None:
    memo = HeaderMemo[str, int](8)
    memo.remember("used", 1)
    memo.remember("idle", 2)
    for number in range(100):
        memo.remember(str(number), number)
        assert memo.recall("used") == 1
    assert memo.recall("idle") is None


# --------------------------------------------------------------------------- what is remembered


def test_second_request_of_a_template_is_known(requests: Requests) -> None:
    first = open_request(encode_request(_linear(), 1, 1000), 2**20)
    assert first.known is None
    assert len(requests) == 0  # its body has not been checked yet
    read_request(first)
    assert len(requests) == 1
    again = _linear(hidden_states=_tensor(1, 4, fill=b"\2"))
    opened = open_request(encode_request(again, 2**63 - 1, 3_600_000), 2**20)
    assert opened.known is not None
    assert (opened.form, opened.method) == (Form.FRAMED, "Linear")
    assert (opened.request_id, opened.timeout_ms) == (2**63 - 1, 3_600_000)
    assert read_request(opened) == again
    assert len(requests) == 1


def test_second_reply_of_a_template_is_known(replies: Replies) -> None:
    assert decode_reply(_reply(TensorReply(output=_tensor(2)))).response is not None
    assert len(replies) == 1
    again = TensorReply(output=_tensor(2, fill=b"\2"))
    timing = Timing(queue_us=0, compute_us=2**53)
    frames = encode_reply(Form.FRAMED, 0, "Linear", again, timing)
    assert decode_reply(frames) == Reply(0, "Linear", again, None, timing)
    assert len(replies) == 1


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
    frames: list[Buffer], requests: Requests
) -> None:
    outcomes = []
    for _ in range(2):
        try:
            outcomes.append(repr(_read(frames)))
        except ProtocolError as error:
            outcomes.append(str(error))
    assert outcomes[0] == outcomes[1]
    assert len(requests) == 0


def test_replies_without_tensor_or_timing_are_not_remembered(replies: Replies) -> None:
    decode_reply(_reply(ErrorCode.INTERNAL))
    decode_reply(_reply(ErrorCode.INTERNAL, None))
    decode_reply(_reply(TensorReply(output=_tensor(2)), None))
    with pytest.raises(ProtocolError):
        decode_reply(_reply(TensorReply(output=WireTensor("float16", (2,), b"\0"))))
    assert len(replies) == 0


class _Inner(Message):
    weight: WireTensor


class _Outer(Message):
    output: WireTensor
    inner: _Inner


def test_message_with_a_tensor_further_down_is_not_remembered() -> None:
    """What is kept of it would be the first message's bytes."""
    message = _Outer(output=_tensor(2), inner=_Inner(weight=_tensor(3)))
    frames: list[Buffer] = [b""]
    body = to_framed(message, frames)
    assert read_framed(_Outer, body, frames, "Outer") == message
    assert known_message("Outer", body, message) is None


def test_messages_of_two_kinds_have_two_keys() -> None:
    tensor = _tensor(2)
    frames: list[Buffer] = []
    asked = framed_key(LMHeadRequest(hidden_states=tensor), frames)
    answered = framed_key(TensorReply(output=tensor), frames)
    assert asked != answered
    assert frames == [tensor.data, tensor.data]


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
    request_id: int, timeout_ms: int, where: str, requests: Requests
) -> None:
    _read(encode_request(_linear(), 1, 1000))
    assert len(requests) == 1
    with pytest.raises(ProtocolError) as info:
        open_request(encode_request(_linear(), request_id, timeout_ms), 2**20)
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
    change: Any, code: ErrorCode, requests: Requests
) -> None:
    header, a, b = encode_request(MatmulRequest(a=_tensor(2, 3), b=_tensor(3, 4)), 1, 1000)
    _read([header, a, b])
    assert len(requests) == 1
    with pytest.raises(ProtocolError) as info:
        _read(change(header, a, b))
    assert info.value.code is code


def test_limit_of_a_single_frame_holds_for_a_known_header(requests: Requests) -> None:
    frames = encode_request(_linear(), 1, 1000)
    _read(frames)
    assert len(requests) == 1
    with pytest.raises(ProtocolError, match="expected at most 100") as info:
        open_request(frames[:1], 100)
    assert info.value.code is ErrorCode.LIMIT_EXCEEDED


@pytest.mark.parametrize(
    ("queue_us", "compute_us", "request_id"),
    [(2**53 + 1, 0, 1), (0, 2**53 + 1, 1), (0, 2**64 - 1, 1), (0, 0, 2**63)],
)
def test_numbers_of_a_known_reply_are_checked(
    queue_us: int, compute_us: int, request_id: int, replies: Replies
) -> None:
    good = TensorReply(output=_tensor(2))
    decode_reply(_reply(good))
    assert len(replies) == 1
    timing = Timing.model_construct(queue_us=queue_us, compute_us=compute_us)
    with pytest.raises(ProtocolError) as info:
        decode_reply(encode_reply(Form.FRAMED, request_id, "Linear", good, timing))
    assert info.value.code is ErrorCode.INVALID_FIELD


@pytest.mark.parametrize(
    ("frames", "code"),
    [
        ([], ErrorCode.INVALID_FIELD),
        ([b"\0" * 3], ErrorCode.INVALID_FIELD),
        ([b"\0" * 4] * 2, ErrorCode.MALFORMED_MESSAGE),
    ],
)
def test_frames_of_a_known_reply_are_checked(
    frames: list[Buffer], code: ErrorCode, replies: Replies
) -> None:
    header, frame = _reply(TensorReply(output=_tensor(2)))
    decode_reply([header, frame])
    assert len(replies) == 1
    with pytest.raises(ProtocolError) as info:
        decode_reply([header, *frames])
    assert info.value.code is code


def test_requests_and_replies_are_not_mistaken_for_each_other(
    requests: Requests, replies: Replies
) -> None:
    request, reply = encode_request(_linear(), 1, 1000), _reply(TensorReply(output=_tensor(4)))
    for _ in range(2):
        assert _read(request) == _linear()
        assert decode_reply(reply).response == TensorReply(output=_tensor(4))
        with pytest.raises(ProtocolError):
            _read(reply)
        with pytest.raises(ProtocolError):
            decode_reply(request)


def test_a_peer_that_never_repeats_itself_fills_little_memory(
    requests: Requests, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(encoding, "_sent_requests", HeaderMemo[tuple[object, ...], bytes]())
    triples = itertools.product(get_args(ModuleName), repeat=3)
    messages = itertools.product(triples, range(4000, 4040))
    tracemalloc.start()
    try:
        for names, layer in itertools.islice(messages, 3 * MAX_ENTRIES):
            message = _linear(
                layer_idx=layer, module_names=names, hidden_states=_tensor(1, 1, 1, 1)
            )
            _read([memoryview(bytearray(f)) for f in encode_request(message, 1, 1000)])
            assert len(requests) <= MAX_ENTRIES
        held = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert len(requests) > MAX_ENTRIES // 2
    assert held < MEMORY_BYTES
