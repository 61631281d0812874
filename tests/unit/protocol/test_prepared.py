"""Prepared requests: the bytes that they send, and replies that are not the expected one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgpack
import pytest
import torch

from gpu_side.encoding import Form, encode_reply
from protocol.channel import Channel
from protocol.encoding import encode_request
from protocol.errors import ErrorCode, ProtocolError, ReplyError, ServiceError
from protocol.messages import (
    EmbeddingRequest,
    LinearRequest,
    LMHeadRequest,
    RingLinearRequest,
    SeededRingLinearRequest,
    TensorReply,
    Timing,
)
from protocol.pending import OversizedRequestError
from protocol.prepared import Preparable, PreparedRequest
from protocol.tensors import Buffer, WireTensor, from_torch
from tests.unit.protocol.test_pending import ScriptedChannel

TIMING = Timing(queue_us=3, compute_us=4)
ROWS, IN, OUT = 2, 4, 6


def _empty(dtype: str, *shape: int) -> WireTensor:
    return WireTensor(dtype, shape, b"")


MESSAGES: list[tuple[Preparable, torch.dtype]] = [
    (
        RingLinearRequest(
            layer_idx=3, module_names=("q_proj", "k_proj"), elements=_empty("int32", ROWS, IN)
        ),
        torch.int32,
    ),
    (
        LinearRequest(
            layer_idx=0,
            module_names=("o_proj",),
            hidden_states=_empty("bfloat16", ROWS, IN),
            bias=False,
        ),
        torch.bfloat16,
    ),
    (LMHeadRequest(hidden_states=_empty("float32", ROWS, IN)), torch.float32),
    (EmbeddingRequest(input_ids=_empty("int64", ROWS, IN), dtype="float16"), torch.int64),
]


class Keeping(ScriptedChannel):
    """Keeps the frames that it sends."""

    def _send(self, method: str, frames: Any, size: int, timeout_s: float) -> int:
        self.frames = [bytes(frame) for frame in frames]
        assert size == sum(map(len, self.frames))
        return super()._send(method, frames, size, timeout_s)


def _ring() -> PreparedRequest:
    return PreparedRequest(MESSAGES[0][0], (ROWS, OUT), "int32")


def _payload(dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.arange(ROWS * IN).view(ROWS, IN).to(dtype)


def _reply(request_id: int, output: torch.Tensor, method: str = "RingLinear") -> list[Buffer]:
    result = TensorReply(output=from_torch(output))
    return encode_reply(Form.FRAMED, request_id, method, result, TIMING)


OUTPUT = torch.arange(ROWS * OUT, dtype=torch.int32).view(ROWS, OUT)


@pytest.mark.parametrize(("message", "dtype"), MESSAGES)
def test_a_started_request_has_the_bytes_of_a_submitted_one(
    message: Preparable, dtype: torch.dtype
) -> None:
    channel, payload = Keeping(), _payload(dtype)
    prepared = PreparedRequest(message, (ROWS, OUT), "float32")
    request_id = channel.start(prepared, payload, 1.5)
    whole = prepared.request(payload)
    expected = [bytes(frame) for frame in encode_request(whole, request_id, 1500)]
    assert channel.frames == expected
    assert prepared.request_bytes == sum(map(len, expected))
    channel.submit(whole, 1.5)
    header = msgpack.unpackb(channel.frames[0]) | {"request_id": request_id}
    assert header == msgpack.unpackb(expected[0])
    assert channel.frames[1:] == expected[1:]


def test_a_seed_crosses_in_place_of_the_elements() -> None:
    channel, prepared, words = Keeping(), _ring(), torch.arange(8, dtype=torch.int32)
    request_id = channel.start(prepared.seeded, words, 1.5)
    whole = SeededRingLinearRequest(
        layer_idx=3,
        module_names=("q_proj", "k_proj"),
        rows=ROWS,
        columns=IN,
        seed=from_torch(words),
    )
    assert channel.frames == [bytes(frame) for frame in encode_request(whole, request_id, 1500)]
    assert prepared.seeded.request(words) == whole
    assert prepared.seeded is prepared.seeded
    frames = _reply(request_id, OUTPUT, "SeededRingLinear")
    channel.script.append((frames, 1))
    assert torch.equal(prepared.output(channel.wait(request_id)), OUTPUT)
    with pytest.raises(ValueError, match="SeededRingLinearRequest"):
        _ = PreparedRequest(MESSAGES[2][0], (ROWS, OUT), "float32").seeded


def test_the_expected_reply_is_taken_without_being_decoded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def decode(frames: object) -> None:
        raise AssertionError("decoded in full")

    monkeypatch.setattr("protocol.pending.decode_reply", decode)
    channel, prepared = ScriptedChannel(), _ring()
    request_id = channel.start(prepared, _payload())
    frames = _reply(request_id, OUTPUT)
    channel.script.append((frames, 1))
    exchange = channel.wait(request_id)
    assert torch.equal(prepared.output(exchange), OUTPUT)
    assert exchange.timing == TIMING
    assert (exchange.bytes_sent, exchange.bytes_received) == (
        prepared.request_bytes,
        sum(len(bytes(frame)) for frame in frames),
    )


def _spelt_otherwise(frames: list[Buffer]) -> list[Buffer]:
    fields = msgpack.unpackb(frames[0])
    return [msgpack.packb(dict(reversed(fields.items()))), frames[1]]


def test_a_good_reply_that_is_spelt_otherwise_is_decoded() -> None:
    channel, prepared = ScriptedChannel(), _ring()
    request_id = channel.start(prepared, _payload())
    channel.script.append((_spelt_otherwise(_reply(request_id, OUTPUT)), 1))
    assert torch.equal(prepared.output(channel.wait(request_id)), OUTPUT)


@pytest.mark.parametrize(
    "output",
    [
        OUTPUT[:1],
        OUTPUT.float(),
        OUTPUT.flatten(),
        OUTPUT.view(OUT, ROWS),
        OUTPUT.view(1, ROWS, OUT),
    ],
)
def test_a_reply_of_another_form_is_refused_when_its_output_is_asked_for(
    output: torch.Tensor,
) -> None:
    channel, prepared = ScriptedChannel(), _ring()
    request_id = channel.start(prepared, _payload())
    channel.script.append((_reply(request_id, output), 1))
    exchange = channel.wait(request_id)
    with pytest.raises(ReplyError, match=r"RingLinear reply from scripted: got .*expected int32"):
        prepared.output(exchange)


def test_a_reply_to_another_method_is_refused() -> None:
    channel = ScriptedChannel()
    request_id = channel.start(_ring(), _payload())
    channel.script.append((_reply(request_id, OUTPUT, "Linear"), 1))
    with pytest.raises(ReplyError, match="got Linear, expected RingLinear"):
        channel.wait(request_id)


def test_an_error_reply_is_an_error() -> None:
    channel = ScriptedChannel()
    request_id = channel.start(_ring(), _payload())
    error = encode_reply(Form.FRAMED, request_id, "RingLinear", ErrorCode.INTERNAL, TIMING)
    channel.script.append((error, 1))
    with pytest.raises(ServiceError, match="INTERNAL"):
        channel.wait(request_id)


@pytest.mark.parametrize(
    "change",
    [
        lambda header, frame: [header],
        lambda header, frame: [header, frame, frame],
        lambda header, frame: [header, frame[:-1]],
        lambda header, frame: [header, bytes(frame) + b"\0"],
        lambda header, frame: [header[:-1], frame],
        lambda header, frame: [header + b"\0", frame],
        lambda header, frame: [header[:-1] + b"\2", frame],
    ],
)
def test_frames_that_are_not_the_expected_ones_are_refused(
    change: Callable[[bytes, Buffer], list[Buffer]],
) -> None:
    channel = ScriptedChannel()
    request_id = channel.start(_ring(), _payload())
    header, frame = _reply(request_id, OUTPUT)
    channel.script.append((change(bytes(header), frame), 1))
    with pytest.raises(ProtocolError):
        channel.wait(request_id)


@pytest.mark.parametrize(("queue_us", "compute_us"), [(2**53 + 1, 0), (0, 2**53 + 1)])
def test_times_of_an_expected_reply_are_bounded(queue_us: int, compute_us: int) -> None:
    channel = ScriptedChannel()
    request_id = channel.start(_ring(), _payload())
    claim = Timing.model_construct(queue_us=queue_us, compute_us=compute_us)
    result = TensorReply(output=from_torch(OUTPUT))
    frames = encode_reply(Form.FRAMED, request_id, "RingLinear", result, claim)
    channel.script.append((frames, 1))
    with pytest.raises(ProtocolError, match="timing"):
        channel.wait(request_id)


def test_replies_of_two_prepared_requests_are_not_taken_for_each_other() -> None:
    channel, first = ScriptedChannel(), _ring()
    second = PreparedRequest(MESSAGES[0][0], (ROWS, 1), "int32")
    ids = channel.start(first, _payload()), channel.start(second, _payload())
    channel.script.extend([(_reply(ids[1], OUTPUT[:, :1]), 1), (_reply(ids[0], OUTPUT), 1)])
    assert torch.equal(first.output(channel.wait(ids[0])), OUTPUT)
    assert torch.equal(second.output(channel.wait(ids[1])), OUTPUT[:, :1])


@pytest.mark.parametrize(
    "payload",
    [_payload()[:1], _payload(torch.float32), _payload().flatten(), _payload().view(4, 2)],
)
def test_a_payload_that_was_not_prepared_is_not_sent(payload: torch.Tensor) -> None:
    channel = ScriptedChannel()
    with pytest.raises(ProtocolError, match=r"payload of RingLinear: .* expected int32 \[2, 4\]"):
        channel.start(_ring(), payload)
    assert channel.sent == []


def test_a_payload_that_is_not_contiguous_is_sent_in_order() -> None:
    channel, payload = Keeping(), _payload()
    channel.start(_ring(), payload.t().contiguous().t())
    assert channel.frames[1] == payload.numpy().tobytes()


def test_a_prepared_request_that_is_too_large_is_not_sent() -> None:
    prepared = _ring()
    channel = ScriptedChannel(max_message_bytes=prepared.request_bytes - 1)
    with pytest.raises(OversizedRequestError, match=f"at most {prepared.request_bytes - 1} "):
        channel.start(prepared, _payload())
    assert channel.sent == []


def test_a_channel_that_only_submits_can_be_started() -> None:
    """What looks into messages need not know of prepared ones."""

    class Looking(ScriptedChannel):
        start = Channel.start

    channel, prepared = Looking(), _ring()
    request_id = channel.start(prepared, _payload())
    channel.script.append((_reply(request_id, OUTPUT), 1))
    assert torch.equal(prepared.output(channel.wait(request_id)), OUTPUT)
