"""Tests of the client's end, against a ROUTER socket that the test itself plays."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import msgpack
import pytest
import torch
import zmq

from protocol.encoding import Form, OpenedRequest, encode_reply, open_request, read_request
from protocol.errors import (
    DeadlineExceededError,
    EndpointError,
    ErrorCode,
    ProtocolError,
    ReplyError,
    ServiceError,
)
from protocol.messages import InitRequest, LMHeadRequest, TensorReply, Timing
from protocol.tensors import Buffer, from_torch, to_torch
from protocol.zmq_channel import ZmqChannel

TINY_S = 0.05


class Peer:
    """A service that answers what the test tells it to."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], endpoint: str) -> None:
        self.socket = context.socket(zmq.ROUTER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.bind(endpoint)
        self.endpoint = self.socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self.identity = b""

    def receive(self) -> OpenedRequest:
        assert self.socket.poll(10_000), "no request came"
        self.identity, *frames = self.socket.recv_multipart()
        return open_request(frames, 2**30)

    def send(self, *frames: Buffer) -> None:
        self.socket.send_multipart([self.identity, *frames])

    def reply(
        self,
        request_id: int,
        result: torch.Tensor | ErrorCode,
        method: str = "LMHead",
        timing: Timing | None = None,
    ) -> None:
        good = TensorReply(output=from_torch(result)) if isinstance(result, torch.Tensor) else None
        self.send(*encode_reply(Form.FRAMED, request_id, method, good or ErrorCode(result), timing))


@pytest.fixture(params=["tcp", "ipc"])
def peer(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Peer]:
    endpoint = "tcp://127.0.0.1:*" if request.param == "tcp" else f"ipc://{tmp_path}/s"
    context = zmq.Context()
    made = Peer(context, endpoint)
    yield made
    made.socket.close()
    context.term()


@pytest.fixture
def channel(peer: Peer) -> Iterator[ZmqChannel]:
    with ZmqChannel(peer.endpoint, timeout_s=20.0) as made:
        yield made


def _request(value: float = 1.0, elements: int = 4) -> LMHeadRequest:
    return LMHeadRequest(hidden_states=from_torch(torch.full((elements,), value)))


def _output(reply: object) -> torch.Tensor:
    assert isinstance(reply, TensorReply)
    return to_torch(reply.output)


# Below and above the size from which ZeroMQ sends without copying.
@pytest.mark.parametrize("elements", [4, 2**16])
def test_exchange_counts_every_byte(peer: Peer, channel: ZmqChannel, elements: int) -> None:
    request_id = channel.submit(_request(3.0, elements), timeout_s=7.5)
    opened = peer.receive()
    assert (opened.request_id, opened.timeout_ms) == (request_id, 7500)
    message = read_request(opened)
    assert isinstance(message, LMHeadRequest)
    assert torch.equal(to_torch(message.hidden_states), torch.full((elements,), 3.0))

    timing = Timing(queue_us=11, compute_us=22)
    peer.reply(request_id, torch.full((2,), 5.0), timing=timing)
    exchange = channel.wait(request_id)
    assert torch.equal(_output(exchange.response), torch.full((2,), 5.0))
    header = len(opened.frames[0])
    assert exchange.bytes_sent == header + 4 * elements
    assert exchange.bytes_received > 8
    assert exchange.timing == timing
    assert channel.traffic.round_trips == 1
    assert channel.traffic.bytes_sent == exchange.bytes_sent
    assert channel.traffic.bytes_received == exchange.bytes_received


def test_replies_out_of_order_reach_their_own_requests(peer: Peer, channel: ZmqChannel) -> None:
    ids = [channel.submit(_request()) for _ in range(5)]
    assert len(set(ids)) == 5
    assert [peer.receive().request_id for _ in ids] == ids
    for request_id in reversed(ids):
        peer.reply(request_id, torch.tensor([float(request_id)]))
    for request_id in (ids[2], ids[0], ids[4], ids[1], ids[3]):
        assert _output(channel.wait(request_id).response).item() == request_id
    assert channel.traffic.round_trips == 5


def test_reply_to_another_operator_is_refused(peer: Peer, channel: ZmqChannel) -> None:
    request_id = channel.submit(_request())
    peer.receive()
    peer.reply(request_id, torch.ones(1), method="Linear")
    with pytest.raises(ReplyError, match="got Linear, expected LMHead"):
        channel.wait(request_id)


@pytest.mark.parametrize("offset", [1, 1000])
def test_reply_to_an_id_never_sent_is_refused(peer: Peer, channel: ZmqChannel, offset: int) -> None:
    request_id = channel.submit(_request())
    peer.receive()
    peer.reply(request_id + offset, torch.ones(1))
    with pytest.raises(ProtocolError, match=f"got request id {request_id + offset}"):
        channel.wait(request_id)


def test_error_reply_without_an_id_names_its_code(peer: Peer, channel: ZmqChannel) -> None:
    request_id = channel.submit(_request())
    peer.receive()
    peer.reply(0, ErrorCode.UNSUPPORTED_VERSION, method="")
    with pytest.raises(ProtocolError, match="request id 0 with UNSUPPORTED_VERSION"):
        channel.wait(request_id)


@pytest.mark.parametrize("code", list(ErrorCode))
def test_error_reply_is_a_service_error(peer: Peer, channel: ZmqChannel, code: ErrorCode) -> None:
    request_id = channel.submit(_request())
    peer.receive()
    peer.reply(request_id, code)
    with pytest.raises(ServiceError, match=f"LMHead at {peer.endpoint}.*{code.value}") as info:
        channel.wait(request_id)
    assert info.value.code is code
    assert channel.traffic.round_trips == 0


@pytest.mark.parametrize(
    "frames",
    [
        [b""],
        [b"garbage"],
        [b"\x80"],
        [msgpack.packb({"status": "error", "error": "INTERNAL"})],
        [msgpack.packb({"status": "success", "response": {}}), b"x"],
        [b"", b"", b""],
    ],
)
def test_undecodable_reply_is_a_protocol_error(
    peer: Peer, channel: ZmqChannel, frames: list[bytes]
) -> None:
    request_id = channel.submit(_request())
    peer.receive()
    peer.send(*frames)
    with pytest.raises(ProtocolError):
        channel.wait(request_id)
    second = channel.submit(_request())
    peer.receive()
    peer.reply(second, torch.tensor([2.0]))
    assert _output(channel.wait(second).response).item() == 2.0


def test_silence_is_a_deadline_exceeded(peer: Peer, channel: ZmqChannel) -> None:
    request_id = channel.submit(_request(), timeout_s=TINY_S)
    with pytest.raises(DeadlineExceededError, match=r"no reply to LMHead within 0\.05 s"):
        channel.wait(request_id)


def test_nobody_there_is_a_deadline_exceeded(tmp_path: Path) -> None:
    with (
        ZmqChannel(f"ipc://{tmp_path}/nobody", timeout_s=TINY_S) as channel,
        pytest.raises(DeadlineExceededError),
    ):
        channel.call(InitRequest())


def test_late_reply_is_dropped(peer: Peer, channel: ZmqChannel) -> None:
    first = channel.submit(_request(), timeout_s=TINY_S)
    with pytest.raises(DeadlineExceededError):
        channel.wait(first)
    second = channel.submit(_request())
    assert [peer.receive().request_id for _ in range(2)] == [first, second]
    peer.reply(first, torch.tensor([1.0]))
    peer.reply(second, torch.tensor([2.0]))
    assert _output(channel.wait(second).response).item() == 2.0


def test_deadline_holds_while_stale_replies_keep_coming(peer: Peer, channel: ZmqChannel) -> None:
    first = channel.submit(_request(), timeout_s=TINY_S)
    with pytest.raises(DeadlineExceededError):
        channel.wait(first)
    second = channel.submit(_request(), timeout_s=0.2)
    assert [peer.receive().request_id for _ in range(2)] == [first, second]
    given_up, unnoticed = threading.Event(), threading.Event()
    stale = encode_reply(Form.FRAMED, first, "LMHead", ErrorCode.INTERNAL)

    def flood() -> None:
        until = time.monotonic() + 3.0  # for a client that would never end
        while not given_up.is_set() and not unnoticed.is_set():
            peer.send(*stale)
            if time.monotonic() > until:
                unnoticed.set()

    thread = threading.Thread(target=flood)
    thread.start()
    try:
        with pytest.raises(DeadlineExceededError):
            channel.wait(second)
    finally:
        given_up.set()
        thread.join()
    assert not unnoticed.is_set()


def test_too_large_request_names_the_limit(peer: Peer) -> None:
    with (
        ZmqChannel(peer.endpoint, max_message_bytes=1000) as channel,
        pytest.raises(
            ProtocolError, match=r"LMHead to .*: got \d+ bytes, expected at most 1000"
        ) as info,
    ):
        channel.submit(_request(elements=1000))
    assert info.value.code is ErrorCode.LIMIT_EXCEEDED


def test_too_large_reply_is_never_received(peer: Peer) -> None:
    with ZmqChannel(peer.endpoint, timeout_s=60, max_message_bytes=1000) as channel:
        request_id = channel.submit(_request())
        peer.receive()
        peer.reply(request_id, torch.ones(1000))
        # ZeroMQ closes the connection at the first byte too many.
        with pytest.raises(EndpointError, match="a lost connection while LMHead was waiting"):
            channel.wait(request_id)


def test_a_peer_that_dies_is_noticed_long_before_the_deadline(peer: Peer) -> None:
    with ZmqChannel(peer.endpoint, timeout_s=3600) as channel:
        request_id = channel.submit(_request())
        peer.receive()
        peer.socket.close()
        with pytest.raises(EndpointError, match="a lost connection") as info:
            channel.wait(request_id)
    assert info.value.retryable


def test_a_peer_that_died_between_requests_is_noticed_at_the_next_one(
    peer: Peer, channel: ZmqChannel
) -> None:
    _one_round_trip(peer, channel)
    peer.socket.close()
    _wait_for_an_event(channel)
    with pytest.raises(EndpointError, match="a lost connection before LMHead could be sent"):
        # It does not wait for a new connection longer than the request itself may take.
        channel.submit(_request(), timeout_s=0.1)


def test_a_peer_that_came_back_between_requests_is_used(peer: Peer, channel: ZmqChannel) -> None:
    _one_round_trip(peer, channel)
    context, endpoint = peer.socket.context, peer.endpoint
    peer.socket.close()
    _wait_for_an_event(channel)
    successor = Peer(context, endpoint)
    _one_round_trip(successor, channel)
    successor.socket.close()


def _one_round_trip(peer: Peer, channel: ZmqChannel) -> None:
    request_id = channel.submit(_request())
    peer.receive()
    peer.reply(request_id, torch.ones(1))
    channel.wait(request_id)


def _wait_for_an_event(channel: ZmqChannel) -> None:
    # The channel has read the connection's beginning; what comes next is its end.
    channel._note_events()
    assert channel._lost or channel._events.poll(10_000)


def test_full_send_queue_is_an_endpoint_error(tmp_path: Path) -> None:
    def fill(channel: ZmqChannel) -> None:
        for _ in range(5000):
            channel.submit(InitRequest())

    with ZmqChannel(f"ipc://{tmp_path}/nobody") as channel:
        with pytest.raises(EndpointError, match="got a full send queue") as info:
            fill(channel)
        assert info.value.retryable


def test_memory_is_not_reused_before_a_large_request_is_sent(
    peer: Peer, channel: ZmqChannel
) -> None:
    request_id = channel.submit(_request(9.0, elements=2**18))  # the tensor is gone already
    torch.zeros(2**18)
    message = read_request(peer.receive())
    assert isinstance(message, LMHeadRequest)
    assert torch.equal(to_torch(message.hidden_states), torch.full((2**18,), 9.0))
    peer.reply(request_id, torch.ones(1))
    channel.wait(request_id)
