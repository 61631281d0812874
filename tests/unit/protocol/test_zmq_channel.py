"""What is ZeroMQ's own, at both ends, against sockets that the test itself plays.

What it has in common with the other transports is in `tests/contract/test_transports.py`.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import torch
import zmq

from gpu_side.encoding import open_request
from gpu_side.transport.zmq_listener import Unread, ZmqListener
from protocol.curve import ClientKeys
from protocol.encoding import MAX_REPLY_FRAMES
from protocol.errors import EndpointError, ErrorCode, ProtocolError
from protocol.messages import InitRequest, LMHeadRequest
from protocol.tensors import Buffer, from_torch
from protocol.zmq_channel import ZmqChannel
from protocol.zmq_sockets import QUEUED_MESSAGES
from tests.kit.wire import connected, tensor_reply

REQUEST = LMHeadRequest(hidden_states=from_torch(torch.ones(4)))
LOST = "a lost connection while LMHead was waiting"
TOO_MANY = [b""] * (MAX_REPLY_FRAMES + 1)


class Peer:
    """A service that answers what the test tells it to."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], endpoint: str) -> None:
        self.socket = context.socket(zmq.ROUTER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.bind(endpoint)
        self.endpoint = self.socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self.identity = b""

    def receive(self) -> int:
        """Return the id of the next request."""
        assert self.socket.poll(10_000), "no request came"
        self.identity, *frames = self.socket.recv_multipart()
        return open_request(frames, 2**30).request_id

    def send(self, *frames: Buffer) -> None:
        self.socket.send_multipart([self.identity, *frames])

    def reply(self, request_id: int, elements: int = 1) -> None:
        self.send(*tensor_reply(request_id, torch.ones(elements)))

    def leave(self) -> None:
        """Close, once what was sent is read."""
        self.socket.setsockopt(zmq.LINGER, 10_000)
        self.socket.close()


@pytest.fixture
def peer() -> Iterator[Peer]:
    context = zmq.Context()
    made = Peer(context, "tcp://127.0.0.1:*")
    yield made
    made.socket.close()
    context.term()


@pytest.fixture
def channel(peer: Peer) -> Iterator[ZmqChannel]:
    with ZmqChannel(peer.endpoint, timeout_s=20.0, heartbeat_timeout_s=0) as made:
        yield made


def _asked(peer: Peer, channel: ZmqChannel, count: int = 1) -> list[int]:
    """Have so many requests come to the peer."""
    ids = [channel.submit(REQUEST) for _ in range(count)]
    assert [peer.receive() for _ in ids] == ids
    return ids


def _one_round_trip(peer: Peer, channel: ZmqChannel) -> None:
    (request_id,) = _asked(peer, channel)
    peer.reply(request_id)
    channel.wait(request_id)


def _wait_for_an_event(channel: ZmqChannel) -> None:
    # The channel has read the connection's beginning; what comes next is its end.
    channel._note_events()
    assert channel._lost or channel._events.poll(10_000)


# ----------------------------------------------------------------------------- replies too large


@pytest.mark.parametrize("of_replies", [False, True])
def test_a_reply_that_is_too_large_ends_its_connection_alone(peer: Peer, of_replies: bool) -> None:
    limit = {} if of_replies else {"max_message_bytes": 1000}
    with ZmqChannel(peer.endpoint, timeout_s=60, **limit) as channel:
        if of_replies:
            channel.limit_replies(1000)
            channel.limit_replies(2000)  # a higher one is ignored
        _one_round_trip(peer, channel)
        (request_id,) = _asked(peer, channel)
        peer.reply(request_id, 1000)
        # ZeroMQ closes the connection at the first byte too many, and would not make another.
        with pytest.raises(EndpointError, match=LOST):
            channel.wait(request_id)
        _one_round_trip(peer, channel)


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


@pytest.mark.parametrize("spin_us", [0.0, 1000.0])
def test_a_reply_of_too_many_frames_ends_the_connection(peer: Peer, spin_us: float) -> None:
    with ZmqChannel(peer.endpoint, timeout_s=60, spin_us=spin_us) as channel:
        _one_round_trip(peer, channel)
        before = channel._socket
        # As many as a reply may have keep it.
        (request_id,) = _asked(peer, channel)
        peer.send(*[b"\xc1"] * MAX_REPLY_FRAMES)
        with pytest.raises(ProtocolError) as info:
            channel.wait(request_id)
        assert info.value.code == ErrorCode.MALFORMED_MESSAGE
        assert channel._socket is before
        other, request_id = _asked(peer, channel, 2)
        peer.send(*TOO_MANY)
        peer.reply(other)  # what comes after it is lost with it
        with pytest.raises(ProtocolError, match="got more than 8196 frames") as info:
            channel.wait(request_id)
        assert info.value.code == ErrorCode.LIMIT_EXCEEDED
        assert before.closed
        with pytest.raises(EndpointError, match=LOST):
            channel.wait(other)
        _one_round_trip(peer, channel)


# -------------------------------------------------------------------- a socket that is replaced


def test_too_many_frames_where_a_socket_is_replaced_are_dropped_with_it(
    peer: Peer, channel: ZmqChannel
) -> None:
    first, second = _asked(peer, channel, 2)
    peer.reply(first)
    peer.send(*TOO_MANY)
    peer.reply(second)
    peer.leave()
    while not channel._lost:
        _wait_for_an_event(channel)
        channel._note_events()
    channel._replace_socket(keep_until=time.monotonic() + 60)
    channel.wait(first)
    with pytest.raises(EndpointError, match=LOST):
        channel.wait(second)


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


def test_what_is_queued_for_the_only_connection_goes_over_no_other(
    peer: Peer, channel: ZmqChannel
) -> None:
    channel.use_one_connection()
    _asked(peer, channel)
    context, endpoint = peer.socket.context, peer.endpoint
    peer.socket.close()
    _wait_for_an_event(channel)
    with suppress(zmq.Again):
        # As if the loss had not been noticed yet.
        channel._socket.send(b"queued", zmq.DONTWAIT)
    peer.socket = Peer(context, endpoint).socket
    assert not peer.socket.poll(400)


@pytest.mark.parametrize("one_connection", [False, True])
def test_a_late_reply_after_a_loss_is_taken_where_any_connection_will_do(
    peer: Peer, channel: ZmqChannel, one_connection: bool
) -> None:
    """ZeroMQ does not say which one it came over, and tells of the loss only who looks."""
    if one_connection:
        channel.use_one_connection()
    ids = _asked(peer, channel, 2)
    for request_id in ids:
        channel._pending[request_id].sent_ns -= 10**9
    channel._note_events()
    for request_id in reversed(ids):
        peer.reply(request_id)
    peer.leave()
    assert channel._events.poll(10_000)
    for request_id in ids:
        if not one_connection:
            channel.wait(request_id)
            continue
        with pytest.raises(EndpointError, match=LOST):
            channel.wait(request_id)


def test_a_peer_that_died_between_requests_is_noticed_at_the_next_one(
    peer: Peer, channel: ZmqChannel
) -> None:
    _one_round_trip(peer, channel)
    peer.socket.close()
    _wait_for_an_event(channel)
    with pytest.raises(EndpointError, match="a lost connection before LMHead could be sent"):
        # It does not wait for a new connection longer than the request itself may take.
        channel.submit(REQUEST, timeout_s=0.1)


# ------------------------------------------------------------------------- before anything is sent


@pytest.mark.timeout(60)
def test_a_full_send_queue_is_an_endpoint_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Within the request's own time, however long a handshake that failed may be waited for."""
    monkeypatch.setattr("protocol.zmq_channel._NOTICE_S", 3600.0)

    def fill(channel: ZmqChannel) -> None:
        for _ in range(QUEUED_MESSAGES + 1):
            channel.submit(InitRequest(), timeout_s=0.1)

    with ZmqChannel(f"ipc://{tmp_path}/nobody") as channel:
        options = (zmq.SNDHWM, zmq.RCVHWM)
        assert [channel._socket.getsockopt(one) for one in options] == [QUEUED_MESSAGES] * 2
        with pytest.raises(EndpointError, match="got a full send queue") as info:
            fill(channel)
        assert info.value.retryable
        channel.close()
        channel.close()
    assert channel._socket.closed
    assert channel._events.closed
    assert channel._context.closed


def test_a_handshake_that_fails_before_a_request_leaves_is_no_full_queue(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ZeroMQ takes the queue away with the connection, and says why a moment later.

    It names the other mechanism unless the service had closed the connection before.
    """

    def no_queue(*_: object) -> None:
        raise zmq.Again

    monkeypatch.setattr("protocol.zmq_channel.send_frames", no_queue)
    monkeypatch.setattr("protocol.zmq_channel._NOTICE_S", 60.0)
    keys = ClientKeys(secret=zmq.curve_keypair()[1], service=zmq.curve_keypair()[0])
    with (
        _listening(f"ipc://{tmp_path}/without-keys"),
        ZmqChannel(f"ipc://{tmp_path}/without-keys", keys=keys) as channel,
        pytest.raises(
            EndpointError,
            match=r"got a (service without keys|handshake that failed) before Init could be sent",
        ),
    ):
        channel.submit(InitRequest())


# ------------------------------------------------------------------------------- the listener


@contextmanager
def _listening(endpoint: str, max_message_bytes: int = 2**29) -> Iterator[ZmqListener]:
    listener = ZmqListener(endpoint, max_message_bytes=max_message_bytes)
    try:
        yield listener
    finally:
        listener.close()


def _taken(listener: ZmqListener) -> tuple[bytes, ...]:
    assert listener.wait(timeout_ms=10_000)
    incoming = listener.receive()
    assert incoming is not None
    return tuple(incoming.route)


def test_an_address_that_is_taken_or_not_ours_is_refused(tmp_path: Path) -> None:
    for endpoint in ("ipc:///no/such/directory/s", "tcp://192.0.2.1:5555"):
        with pytest.raises(EndpointError, match="expected an address to bind"):
            ZmqListener(endpoint)
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(f"{tmp_path}/s")  # a file that is left over is replaced
    for endpoint in ("tcp://127.0.0.1:*", f"ipc://{tmp_path}/s"):
        with _listening(endpoint) as first:
            with pytest.raises(EndpointError, match="got Address already in use") as info:
                ZmqListener(first.endpoint)
            assert info.value.where == first.endpoint
            assert info.value.retryable
            with ZmqChannel(first.endpoint) as channel:
                channel.submit(InitRequest())
                assert _taken(first)


def test_large_replies_that_nobody_reads_are_bounded_in_bytes(tmp_path: Path) -> None:
    """ZeroMQ alone would take 128 of them."""
    context = zmq.Context()
    reply, small = bytes(2**19), bytes(1000)
    with (
        _listening(f"ipc://{tmp_path}/s", max_message_bytes=2**20) as listener,
        context.socket(zmq.DEALER) as client,
    ):
        client.setsockopt(zmq.LINGER, 0)
        client.setsockopt(zmq.RCVHWM, 1)
        client.connect(listener.endpoint)
        client.send(b"x")
        route = _taken(listener)
        sent = 0
        while listener.send(route, [small, reply]):
            sent += 1
            assert sent < 64
        # Two of them, and one more; and what ZeroMQ and the kernel take at the other end.
        assert sent >= 3
        # Whoever reads gets all of them, and more after that.
        for _ in range(sent):
            assert client.poll(10_000)
            assert client.recv_multipart() == [small, reply]
        until = time.monotonic() + 30
        while not listener.send(route, [small]):
            assert time.monotonic() < until
        assert client.poll(10_000)
        assert client.recv() == small
    context.term()


class Tracker:
    """Of a frame that is sent when a test says so."""

    done = False


def test_a_client_with_too_much_to_read_gets_no_small_reply_either(tmp_path: Path) -> None:
    with (
        _listening(f"ipc://{tmp_path}/s", max_message_bytes=2**20) as listener,
        connected(zmq.DEALER, listener.endpoint) as client,
        connected(zmq.DEALER, listener.endpoint) as other,
    ):
        client.send(b"x")
        route = _taken(listener)
        waiting = Tracker()
        listener._unread.add(route[0], [(waiting, 2**20)])
        assert listener.send(route, [b"1"])
        listener._unread.add(route[0], [(waiting, 1)])
        assert not listener.send(route, [b"2"])
        other.send(b"x")
        assert listener.send(_taken(listener), [b"3"])
        waiting.done = True
        assert listener.send(route, [b"4"])
        assert [one.recv() for one in (client, client, other)] == [b"1", b"4", b"3"]


def test_bytes_count_until_they_are_sent_and_for_their_client_only() -> None:
    unread = Unread()
    trackers = [Tracker() for _ in range(3)]
    unread.add(b"a", [(trackers[0], 10), (trackers[1], 5)])
    unread.add(b"b", [(trackers[2], 7)])
    unread.add(b"c", [])
    assert [unread.bytes_of(name) for name in (b"a", b"b", b"c")] == [15, 7, 0]
    trackers[0].done = True
    assert unread.bytes_of(b"a") == 5
    trackers[1].done = True
    assert [unread.bytes_of(name) for name in (b"a", b"b")] == [0, 7]
    # Clients that have gone are forgotten.
    for n in range(10_000):
        unread.add(b"gone %d" % n, [(trackers[0], 1)])
        assert unread.clients <= 300
    assert unread.bytes_of(b"b") == 7
