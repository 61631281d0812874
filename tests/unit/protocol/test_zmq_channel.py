"""What is ZeroMQ's own, at both ends, against sockets that the test itself plays.

What it has in common with the other transports is in `tests/contract/test_transports.py`.
"""

import socket
import threading
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path

import pytest
import torch
import zmq

from gpu_side.transport.zmq_listener import ZmqListener
from protocol.encoding import MAX_REPLY_FRAMES
from protocol.errors import EndpointError, ErrorCode, ProtocolError
from protocol.messages import InitRequest, LMHeadRequest
from protocol.tensors import from_torch
from protocol.zmq_channel import QUEUED_MESSAGES, ZmqChannel
from tests.kit.rows import each_row
from tests.kit.wire import connected, take, tensor_reply

REQUEST = LMHeadRequest(hidden_states=from_torch(torch.ones(4)))


@pytest.fixture
def listener() -> Iterator[ZmqListener]:
    with closing(ZmqListener("tcp://127.0.0.1:*")) as made:
        yield made


@pytest.fixture
def channel(listener: ZmqListener) -> Iterator[ZmqChannel]:
    with ZmqChannel(listener.endpoint, timeout_s=20.0, heartbeat_timeout_s=0) as made:
        yield made


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
                answered += (received := connection.recv(4096))
                if not received:
                    return
            while True:
                connection.sendall(MORE_TO_COME)
                sent += len(MORE_TO_COME)

    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=flood, args=(listening,))
        thread.start()
        endpoint = f"tcp://127.0.0.1:{listening.getsockname()[1]}"
        # Without heartbeats, which it does not answer.
        channel = ZmqChannel(
            endpoint, timeout_s=3600, max_message_bytes=2**16, heartbeat_timeout_s=0
        )
        with channel:
            with pytest.raises(ProtocolError, match="bytes of a message without its end") as info:
                channel.call(REQUEST)
            assert info.value.code == ErrorCode.LIMIT_EXCEEDED
            thread.join()  # the connection is closed: it could not go on
    assert sent > 2**20


@each_row("spin_us", [0.0, 1000.0])
def test_a_reply_of_too_many_frames_ends_the_connection(
    listener: ZmqListener, spin_us: float
) -> None:
    with ZmqChannel(listener.endpoint, timeout_s=60, spin_us=spin_us) as channel:
        before = channel._socket
        other, request_id = channel.submit(REQUEST), channel.submit(REQUEST)
        _, route = (take(listener).route for _ in range(2))
        listener.send(route, [b""] * (MAX_REPLY_FRAMES + 1))
        listener.send(route, tensor_reply(other, torch.ones(1)))  # is lost with the connection
        with pytest.raises(ProtocolError, match="got more than 8196 frames") as info:
            channel.wait(request_id)
        assert info.value.code == ErrorCode.LIMIT_EXCEEDED
        assert before.closed
        with pytest.raises(EndpointError, match="a lost connection while LMHead was waiting"):
            channel.wait(other)


@pytest.mark.parametrize("seconds", [3600, 5])
def test_where_a_socket_is_replaced_what_is_kept_is_bounded(
    channel: ZmqChannel, monkeypatch: pytest.MonkeyPatch, seconds: int
) -> None:
    """By what a socket may hold itself, and by the deadline; its peer sends without an end."""
    channel.submit(REQUEST)
    taken: list[int] = []

    def next_message(_: int) -> list[memoryview]:
        taken.append(len(taken))
        assert len(taken) < 10_000, "it goes on for ever"
        return [memoryview(b"small")]

    monkeypatch.setattr(channel, "_next_message", next_message)
    monkeypatch.setattr("protocol.zmq_channel.time.monotonic", lambda: 1000.0 + len(taken))
    for _ in range(3):  # nor by doing so again and again
        channel._replace_socket(keep_until=1000.0 + seconds)
        assert len(taken) == len(channel._kept) == min(seconds, QUEUED_MESSAGES)
    assert channel._receive(0.0) is not None
    assert len(channel._kept) == len(taken) - 1


def test_what_is_queued_for_the_only_connection_goes_over_no_other(tmp_path: Path) -> None:
    first = ZmqListener(f"ipc://{tmp_path}/s")
    with ZmqChannel(first.endpoint, timeout_s=20.0, heartbeat_timeout_s=0) as channel:
        channel.use_one_connection()
        channel.submit(REQUEST)
        take(first)
        first.close()
        # The channel has read the connection's beginning; what comes next is its end.
        channel._note_events()
        assert channel._lost or channel._events.poll(10_000)
        with suppress(zmq.Again):
            # As if the loss had not been noticed yet.
            channel._socket.send(b"queued", zmq.DONTWAIT)
        with closing(ZmqListener(first.endpoint)) as second:
            assert not second.wait(timeout_ms=400)


@pytest.mark.timeout(60)
def test_a_full_send_queue_is_an_endpoint_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Within the request's own time, however long a handshake that failed may be waited for."""
    monkeypatch.setattr("protocol.zmq_channel._NOTICE_S", 3600.0)
    with ZmqChannel(f"ipc://{tmp_path}/nobody") as channel:
        with pytest.raises(EndpointError, match="got a full send queue") as info:  # noqa: PT012
            for _ in range(QUEUED_MESSAGES + 1):
                channel.submit(InitRequest(), timeout_s=0.1)
        assert info.value.retryable
        channel.close()
    assert channel._context.closed


def test_large_replies_that_nobody_reads_are_bounded_in_bytes(tmp_path: Path) -> None:
    """ZeroMQ alone would take 128 of them."""
    reply, small = bytes(2**19), bytes(1000)
    listener = ZmqListener(f"ipc://{tmp_path}/s", max_message_bytes=2**20)
    with closing(listener), connected(zmq.DEALER, listener.endpoint) as client:
        client.setsockopt(zmq.RCVHWM, 1)
        client.send(b"x")
        incoming = take(listener)
        sent = 0
        while listener.send(incoming.route, [small, reply]):
            sent += 1
            assert sent < 64
        assert sent >= 3
        # Whoever reads gets all of them.
        for _ in range(sent):
            assert client.recv_multipart() == [small, reply]
