"""What is recorded is what crosses: every byte of every request, and nothing else."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from gpu_side.encoding import encode_reply
from gpu_side.weights import load_weights
from protocol.encoding import decode_reply, encode_request
from protocol.errors import ErrorCode, MaskError, ServiceError
from protocol.messages import (
    EmbeddingRequest,
    HealthRequest,
    InitRequest,
    LinearRequest,
    Request,
    TensorReply,
    Timing,
)
from protocol.model.weights import CPU
from protocol.tensors import from_torch, to_torch
from tests.kit.model import SavedModel, token_ids
from tsqp.lab.leak.recording import RecordingChannel
from tsqp.lab.leak.trace import Trace

ROWS = torch.randn(3, 48, generator=torch.Generator().manual_seed(0))
LINEAR = LinearRequest(layer_idx=1, module_names=("o_proj",), hidden_states=from_torch(ROWS))
IDS = EmbeddingRequest(input_ids=from_torch(torch.tensor([3, 5])), dtype="float32")
LATER = EmbeddingRequest(input_ids=from_torch(torch.tensor([9])), dtype="float32")
TOO_DEEP = LINEAR.model_copy(update={"layer_idx": 9})


@pytest.fixture
def channel(model: SavedModel) -> RecordingChannel:
    return RecordingChannel(load_weights(model.directory, device=CPU, dtype=torch.float32))


def sent(request: Request, number: int) -> tuple[bytes, ...]:
    """Return the frames that a socket would get, of a client's request of some number."""
    return tuple(map(bytes, encode_request(request, number, 60_000)))


def test_what_is_recorded_is_what_a_socket_gets(channel: RecordingChannel) -> None:
    rows = torch.randn(2, 96)
    down = LinearRequest(layer_idx=0, module_names=("down_proj",), hidden_states=from_torch(rows))
    for request in (IDS, down):
        channel.call(request)
    assert channel.take().messages == (sent(IDS, 1), sent(down, 2))


def test_a_trace_holds_bytes_alone(channel: RecordingChannel) -> None:
    """No request, no tensor, no token comes with it."""
    channel.call(IDS)
    trace = channel.take()
    assert [field.name for field in dataclasses.fields(Trace)] == ["messages"]
    assert vars(trace).keys() == {"messages"}
    assert {type(frame) for message in trace.messages for frame in message} == {bytes}


def test_what_is_recorded_stays_when_the_sender_goes_on(channel: RecordingChannel) -> None:
    """The frames refer to the sender's memory, which is used again."""
    wide = torch.zeros(3, 96)
    before = wide.clone()
    channel.call(
        LinearRequest(layer_idx=0, module_names=("o_proj",), hidden_states=from_torch(wide))
    )
    wide.fill_(7)
    (call,) = channel.take().calls
    assert torch.equal(call.rows, before)


def test_a_trace_begins_where_the_last_one_ended(channel: RecordingChannel) -> None:
    channel.call(IDS)
    assert channel.recorded == 1
    assert len(channel.take().messages) == 1
    assert channel.recorded == 0
    assert channel.take() == Trace(())
    channel.call(IDS)
    channel.call(LATER)
    assert channel.recorded == 2
    assert channel.take().messages == (sent(IDS, 2), sent(LATER, 3))


def test_what_is_answered_is_the_services_result(
    model: SavedModel, channel: RecordingChannel
) -> None:
    exchange = channel.call(IDS)
    assert isinstance(exchange.response, TensorReply)
    weight = model.reference.get_input_embeddings().weight
    assert torch.equal(to_torch(exchange.response.output), weight[[3, 5]])
    assert exchange.endpoint == channel.endpoint == "recording"


def test_traffic_counts_bytes_both_ways(channel: RecordingChannel) -> None:
    exchange = channel.call(IDS)
    assert exchange.bytes_sent == sum(map(len, sent(IDS, 1)))
    assert isinstance(exchange.response, TensorReply)
    # As large as a reply with such a tensor is, whatever the numbers in it.
    reply = encode_reply(
        "framed", 1, "Embedding", exchange.response, Timing(queue_us=0, compute_us=0)
    )
    assert decode_reply([memoryview(bytearray(frame)) for frame in reply]).response is not None
    assert exchange.bytes_received == sum(map(len, reply))
    channel.call(IDS)
    traffic = channel.traffic
    assert traffic.round_trips == 2
    assert traffic.bytes_sent == 2 * exchange.bytes_sent
    assert traffic.bytes_received == 2 * exchange.bytes_received


@pytest.mark.parametrize(
    ("request_", "code"),
    [
        (TOO_DEEP, ErrorCode.INVALID_FIELD),
        (LINEAR, ErrorCode.INVALID_FIELD),
    ],
)
def test_an_error_reply_is_raised_and_its_request_recorded(
    channel: RecordingChannel, request_: Request, code: ErrorCode
) -> None:
    """The second has 48 features, where o_proj takes 96."""
    with pytest.raises(ServiceError) as caught:
        channel.call(request_)
    assert caught.value.code == code
    assert channel.take().messages == (sent(request_, 1),)
    # And the channel goes on.
    channel.call(IDS)
    assert channel.take().messages == (sent(IDS, 2),)


def test_a_request_that_has_no_answer_here_is_recorded(channel: RecordingChannel) -> None:
    """How the service is only its loop knows, which is not here."""
    with pytest.raises(KeyError):
        channel.call(HealthRequest())
    assert channel.take().messages == (sent(HealthRequest(), 1),)


def test_an_abandoned_reply_is_gone(channel: RecordingChannel) -> None:
    number = channel.submit(IDS)
    channel.abandon(number)
    channel.abandon(number)
    with pytest.raises(KeyError):
        channel.wait(number)
    assert channel.recorded == 1


def test_replies_wait_for_whoever_asks_first(channel: RecordingChannel) -> None:
    first, second = channel.submit(IDS), channel.submit(InitRequest())
    assert channel.wait(second).response.__class__.__name__ == "InitReply"
    assert isinstance(channel.wait(first).response, TensorReply)


def test_a_wrong_result_is_not_believed(channel: RecordingChannel) -> None:
    exchange = channel.call(IDS)
    error = MaskError("mask", got="this", expected="that")
    with pytest.raises(MaskError) as caught:
        channel.distrust(exchange, error)
    assert caught.value is error
    channel.close()


def test_a_session_is_all_that_reached_the_service(model: SavedModel) -> None:
    """The runner's requests, one for one, and not what the service answered."""
    weights = load_weights(model.directory, device=CPU, dtype=torch.float32)
    recording = RecordingChannel(weights, "one")
    loopback = model.tee("attention-in-tee")
    tee = model.tee("attention-in-tee", channels=[recording])  # type: ignore[list-item]
    assert tee.greedy(token_ids(5), 3) == loopback.greedy(token_ids(5), 3)
    assert loopback.channel is not None
    trace = recording.take()
    assert trace.messages == tuple(
        sent(request, number) for number, request in enumerate(loopback.channel.requests, 1)
    )
