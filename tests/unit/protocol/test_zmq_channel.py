"""Tests of what is ZeroMQ's own, against sockets that the test itself plays.

What it has in common with the other transports is in `tests/contract/test_transports.py`.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import torch
import zmq

from protocol.encoding import Form, OpenedRequest, encode_reply, open_request, read_request
from protocol.endpoint import parse_endpoint
from protocol.errors import EndpointError, ErrorCode, ProtocolError
from protocol.messages import InitRequest, LMHeadRequest, TensorReply, Timing
from protocol.tensors import Buffer, from_torch, to_torch
from protocol.zmq_channel import ZmqChannel
from protocol.zmq_listener import ZmqListener


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


def test_too_large_reply_is_never_received(peer: Peer) -> None:
    with ZmqChannel(peer.endpoint, timeout_s=60, max_message_bytes=1000) as channel:
        request_id = channel.submit(_request())
        peer.receive()
        peer.reply(request_id, torch.ones(1000))
        # ZeroMQ closes the connection at the first byte too many, and would not make another.
        with pytest.raises(EndpointError, match="a lost connection while LMHead was waiting"):
            channel.wait(request_id)
        _one_round_trip(peer, channel)


def test_a_limit_for_replies_counts_from_the_first_connection_on(peer: Peer) -> None:
    with ZmqChannel(peer.endpoint, timeout_s=60) as channel:
        channel.limit_replies(1000)
        channel.limit_replies(2000)  # a higher one is ignored
        _one_round_trip(peer, channel)
        request_id = channel.submit(_request())
        peer.receive()
        peer.reply(request_id, torch.ones(1000))
        with pytest.raises(EndpointError, match="a lost connection while LMHead was waiting"):
            channel.wait(request_id)


# A service that speaks ZMTP 3.0 and sends frame after frame of one message.
GREETING = b"\xff\0\0\0\0\0\0\0\x01\x7f\x03\0NULL" + bytes(16) + b"\0" + bytes(31)
READY = b"\x05READY\x0bSocket-Type\0\0\0\x06ROUTER"
MORE_TO_COME = b"\x03" + (2**16).to_bytes(8, "big") + bytes(2**16)


def test_a_reply_without_an_end_is_not_gathered_until_memory_ends() -> None:
    sent = 0

    def flood(listening: socket.socket) -> None:
        nonlocal sent
        connection, _ = listening.accept()
        with connection, suppress(ConnectionError):
            connection.sendall(GREETING + b"\x04" + bytes([len(READY)]) + READY)
            answered = b""
            while b"LMHead" not in answered:
                answered += connection.recv(4096)
            while True:
                connection.sendall(MORE_TO_COME)
                sent += len(MORE_TO_COME)

    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=flood, args=(listening,))
        thread.start()
        endpoint = f"tcp://127.0.0.1:{listening.getsockname()[1]}"
        with ZmqChannel(endpoint, timeout_s=3600, max_message_bytes=2**16) as channel:
            with pytest.raises(ProtocolError, match="bytes of a message without its end") as info:
                channel.call(_request())
            assert info.value.code == ErrorCode.LIMIT_EXCEEDED
            thread.join()  # the connection is closed: it could not go on
    assert sent > 2**20


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


@contextmanager
def _listening(endpoint: str) -> Iterator[ZmqListener]:
    listener = ZmqListener(endpoint)
    try:
        yield listener
    finally:
        listener.close()


def test_wildcard_port_becomes_a_real_one() -> None:
    with _listening("tcp://127.0.0.1:*") as listener:
        assert int(listener.endpoint.rpartition(":")[2]) > 0
        parse_endpoint(listener.endpoint)


def test_taken_tcp_port_is_refused() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        endpoint = f"tcp://127.0.0.1:{other.getsockname()[1]}"
        with pytest.raises(EndpointError, match="got Address already in use") as info:
            ZmqListener(endpoint)
        assert info.value.where == endpoint
        assert info.value.retryable


def test_live_ipc_socket_is_not_taken_over(tmp_path: Path) -> None:
    endpoint = f"ipc://{tmp_path}/s"
    wakeup, writer = socket.socketpair()
    with wakeup, writer, _listening(endpoint) as first:
        with pytest.raises(EndpointError, match="got Address already in use"):
            ZmqListener(endpoint)
        with ZmqChannel(endpoint) as channel:
            channel.submit(InitRequest())
            assert first.wait(wakeup=wakeup, timeout_ms=10_000)


def test_stale_ipc_socket_file_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    assert path.exists()
    with _listening(f"ipc://{path}") as listener:
        assert listener.endpoint == f"ipc://{path}"


@pytest.mark.parametrize("endpoint", ["ipc:///no/such/directory/s", "tcp://192.0.2.1:5555"])
def test_address_that_is_not_ours_is_refused(endpoint: str) -> None:
    with pytest.raises(EndpointError, match="expected an address to bind"):
        ZmqListener(endpoint)


@pytest.mark.parametrize("kind", [zmq.REQ, zmq.DEALER])
def test_reply_finds_its_way_to_both_kinds_of_client(kind: int) -> None:
    reader, writer = socket.socketpair()
    context = zmq.Context()
    with reader, writer, _listening("tcp://127.0.0.1:*") as listener:
        with context.socket(kind) as client:
            client.setsockopt(zmq.LINGER, 0)
            client.connect(listener.endpoint)
            client.send_multipart([b"a", b"b"])
            assert listener.wait(wakeup=reader, timeout_ms=10_000)
            incoming = listener.receive()
            assert incoming is not None
            assert [bytes(frame) for frame in incoming.frames] == [b"a", b"b"]
            assert len(incoming.route) == (2 if kind == zmq.REQ else 1)
            assert listener.send(incoming.route, [b"c", memoryview(b"d")])
            assert client.poll(10_000)
            assert client.recv_multipart() == [b"c", b"d"]
        assert not listener.send((b"nobody",), [b"x"])
    context.term()


@pytest.mark.parametrize("endpoint", ["unix:///tmp/s", "vsock://2:5"])
def test_streams_are_refused(endpoint: str) -> None:
    with pytest.raises(EndpointError, match="got a stream"):
        ZmqChannel(endpoint)
    with pytest.raises(EndpointError, match="got a stream"):
        ZmqListener(endpoint)
