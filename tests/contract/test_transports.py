"""What every transport does, however it carries the bytes: a real channel to a real listener."""

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from itertools import product
from pathlib import Path
from typing import Any

import msgpack
import pytest
import torch

from gpu_side.access import ServiceKeys
from gpu_side.encoding import OpenedRequest, encode_reply, open_request, read_request
from gpu_side.service import open_listener
from gpu_side.transport.listener import Incoming
from protocol.channel import PendingChannel
from protocol.curve import ClientKeys
from protocol.errors import (
    DeadlineExceededError,
    EndpointError,
    ErrorCode,
    ProtocolError,
    ReplyError,
    ServiceError,
    SettingsError,
    TsqpError,
)
from protocol.messages import LMHeadRequest, TensorReply, Timing
from protocol.tensors import from_torch, to_torch
from protocol.transport import open_channel
from tests.kit.rows import each_row
from tests.kit.wire import raw_socket

TINY_S = 0.05
LARGE = 2**20  # elements: four times what a socket of this machine may hold by default


def _vsock_loopback() -> bool:
    try:
        with socket.socket(socket.AF_VSOCK, socket.SOCK_STREAM) as probe:
            probe.bind((socket.VMADDR_CID_LOCAL, socket.VMADDR_PORT_ANY))
    except (AttributeError, OSError):
        return False
    return True


TRANSPORTS = ["tcp", "ipc", "unix", "shm", "ivshmem", "http"]
if _vsock_loopback():
    TRANSPORTS.append("vsock")
# Requests in flight have a connection each: the order of their arrival is not that of sending, and
# what is given up is gone.
for_one_connection = pytest.mark.parametrize(
    "address", [name for name in TRANSPORTS if name != "http"], indirect=True
)
# The memory of a device is one client's at a time.
for_many_clients = pytest.mark.parametrize(
    "address", [name for name in TRANSPORTS if name != "ivshmem"], indirect=True
)


class Peer:
    """A service on a listener, that answers what the test tells it to."""

    def __init__(self, endpoint: str, **settings: Any) -> None:
        self.listener = open_listener(endpoint, **{"max_message_bytes": 2**30} | settings)
        self.endpoint = self.listener.endpoint.replace("vsock://any:", "vsock://1:")
        self.route: tuple[bytes, ...] = ()
        self._routes: dict[int, tuple[bytes, ...]] = {}

    def incoming(self) -> Incoming:
        assert self.listener.wait(timeout_ms=10_000), "no request came"
        incoming = self.listener.receive()
        assert incoming is not None
        self.route = incoming.route
        return incoming

    def receive(self) -> OpenedRequest:
        opened = open_request(self.incoming().frames, 2**30)
        self._routes[opened.request_id] = self.route
        return opened

    def receive_ids(self, count: int) -> list[int]:
        """Return the ids of requests as they come, or where no order is promised, sorted."""
        ids = [self.receive().request_id for _ in range(count)]
        return sorted(ids) if self.endpoint.startswith("http") else ids

    def reply(
        self,
        request_id: int,
        result: torch.Tensor | ErrorCode,
        method: str = "LMHead",
        timing: Timing | None = None,
    ) -> None:
        good = TensorReply(output=from_torch(result)) if isinstance(result, torch.Tensor) else None
        frames = encode_reply("framed", request_id, method, good or ErrorCode(result), timing)
        assert self.listener.send(self._routes.get(request_id, self.route), frames)

    def close(self) -> None:
        self.listener.close()


# What is promised of a peer that gives no sign of life is tested beside each kind of transport.
pytestmark = pytest.mark.usefixtures("patient_streams")


@contextmanager
def _echoing(peer: Peer) -> Iterator[None]:
    """Answer every request of a peer with its own tensor, on a thread."""
    reader, writer = socket.socketpair()

    def serve() -> None:
        while peer.listener.wait(wakeup=reader):
            while (incoming := peer.listener.receive()) is not None:
                opened = open_request(incoming.frames, 2**30)
                message = read_request(opened)
                assert isinstance(message, LMHeadRequest)
                output = TensorReply(output=from_torch(to_torch(message.hidden_states)))
                frames = encode_reply(opened.form, opened.request_id, opened.method, output)
                peer.listener.send(incoming.route, frames)

    thread = threading.Thread(target=serve)
    thread.start()
    with reader, writer:
        try:
            yield
        finally:
            writer.send(b"x")
            thread.join()


@pytest.fixture(params=TRANSPORTS)
def address(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    # Areas of 124 KiB: some messages lie in them, and some do not.
    (tmp_path / "memory").write_bytes(bytes(2**21))
    return {
        "tcp": "tcp://127.0.0.1:*",
        "ipc": f"ipc://{tmp_path}/s",
        "unix": f"unix://{tmp_path}/s",
        "shm": f"shm://{tmp_path}/s",
        "ivshmem": f"ivshmem://{tmp_path}/memory,{tmp_path}/s",
        "vsock": "vsock://any:*",
        "http": "http://127.0.0.1:*",
    }[request.param]


@pytest.fixture
def peer(address: str) -> Iterator[Peer]:
    made = Peer(address)
    yield made
    made.close()


@pytest.fixture
def channel(peer: Peer) -> Iterator[PendingChannel]:
    with _connected(peer) as made:
        yield made


@contextmanager
def _connected(
    peer: Peer, timeout_s: float = 20.0, max_message_bytes: int = 2**30, spin_us: float = 0.0
) -> Iterator[PendingChannel]:
    made = open_channel(
        peer.endpoint,
        timeout_s=timeout_s,
        max_message_bytes=max_message_bytes,
        spin_us=spin_us,
        heartbeat_timeout_s=0,
    )
    try:
        yield made
    finally:
        made.close()


def _request(value: float = 1.0, elements: int = 4) -> LMHeadRequest:
    return LMHeadRequest(hidden_states=from_torch(torch.full((elements,), value)))


def _output(reply: object) -> torch.Tensor:
    assert isinstance(reply, TensorReply)
    return to_torch(reply.output)


def _one_round_trip(peer: Peer, channel: PendingChannel) -> None:
    request_id = channel.submit(_request())
    peer.receive()
    peer.reply(request_id, torch.ones(1))
    channel.wait(request_id)


# Around the sizes from which a transport copies less, and beyond every buffer. `spin_us`: of both.
@each_row(
    ("elements", "spin_us"),
    [*product((1, 8200, 16_350, 32_800, LARGE + 1), (0.0,)), (4000, 500.0), (LARGE, 500.0)],
)
def test_what_is_sent_comes_back(address: str, elements: int, spin_us: float) -> None:
    sent = torch.arange(elements, dtype=torch.float32)
    kept: list[torch.Tensor] = []
    with (
        closing(Peer(address, spin_us=spin_us)) as peer,
        _echoing(peer),
        _connected(peer, spin_us=spin_us) as channel,
    ):
        for count in range(1, 4):
            exchange = channel.call(LMHeadRequest(hidden_states=from_torch(sent)))
            received = _output(exchange.response)
            assert torch.equal(received, sent)
            received.add_(count)  # its memory is ours, and outlives the next messages
            kept.append(received)
            assert torch.equal(sent, torch.arange(elements, dtype=torch.float32))
            assert exchange.bytes_sent > 4 * elements
            assert exchange.bytes_received > 4 * elements
            assert channel.traffic.round_trips == count
    assert channel.traffic.bytes_sent == 3 * exchange.bytes_sent
    assert all(torch.equal(one, sent + n) for n, one in enumerate(kept, start=1))


def test_an_exchange_says_what_it_cost(peer: Peer, channel: PendingChannel) -> None:
    before_ns = time.perf_counter_ns()
    request_id = channel.submit(_request(3.0, 2**16), timeout_s=7.5)
    opened = peer.receive()
    assert (opened.request_id, opened.timeout_ms) == (request_id, 7500)
    timing = Timing(queue_us=11, compute_us=22)
    peer.reply(request_id, torch.full((2,), 5.0), timing=timing)
    exchange = channel.wait(request_id)
    assert exchange.bytes_sent == sum(map(len, opened.frames))
    assert exchange.timing == timing
    assert before_ns + exchange.encode_ns <= exchange.sent_ns
    assert exchange.sent_ns + exchange.elapsed_ns <= time.perf_counter_ns()
    assert channel.traffic.bytes_sent == exchange.bytes_sent
    assert channel.traffic.bytes_received == exchange.bytes_received


def test_a_limit_can_only_be_lowered(peer: Peer, channel: PendingChannel) -> None:
    channel.limit_messages(1000)
    channel.limit_messages(2000)
    with pytest.raises(ProtocolError, match=r"got \d+ bytes, expected at most 1000") as caught:
        channel.submit(_request(elements=300))
    assert caught.value.code is ErrorCode.LIMIT_EXCEEDED
    # It is a limit for what is sent: a reply may be as large as the channel was made for.
    request_id = channel.submit(_request())
    peer.receive()
    peer.reply(request_id, torch.ones(1000))
    assert _output(channel.wait(request_id).response).numel() == 1000


def test_replies_out_of_order_reach_their_own_requests(peer: Peer, channel: PendingChannel) -> None:
    ids = [channel.submit(_request()) for _ in range(5)]
    assert len(set(ids)) == 5
    assert peer.receive_ids(5) == ids
    for request_id in reversed(ids):
        peer.reply(request_id, torch.tensor([float(request_id - ids[0])]))
    for request_id in (ids[2], ids[0], ids[4], ids[1], ids[3]):
        assert _output(channel.wait(request_id).response).item() == request_id - ids[0]
    assert channel.traffic.round_trips == 5


def test_many_in_flight_are_all_answered(peer: Peer, channel: PendingChannel) -> None:
    # Nobody reads yet, and the tensors are gone at once: their memory is not used again.
    ids = [channel.submit(_request(float(n), LARGE)) for n in range(4)]
    torch.zeros(LARGE)
    with _echoing(peer):
        # They fill every buffer in both directions: nobody may wait for the other to read.
        ids += [channel.submit(_request(float(n), LARGE)) for n in range(4, 8)]
        for n, request_id in reversed(list(enumerate(ids))):
            received = _output(channel.wait(request_id).response)
            assert torch.equal(received, torch.full((LARGE,), float(n)))


@for_one_connection
def test_abandoned_request_is_forgotten(peer: Peer, channel: PendingChannel) -> None:
    first, second, third = (channel.submit(_request()) for _ in range(3))
    channel.abandon(first)
    for _ in range(3):
        peer.receive()
    for request_id in (first, second, third):
        peer.reply(request_id, torch.tensor([float(request_id - first)]))
    assert _output(channel.wait(third).response).item() == third - first
    channel.abandon(second)  # has arrived already
    channel.abandon(12345)
    _one_round_trip(peer, channel)
    with pytest.raises(KeyError):
        channel.wait(first)


@for_many_clients
def test_several_clients_get_their_own_replies(peer: Peer) -> None:
    with _connected(peer) as first, _connected(peer) as second:
        asked = []
        for client, value in ((first, 1.0), (second, 2.0)):
            asked.append((client, value, client.submit(_request()), peer.incoming().route))
        assert asked[0][-1] != asked[1][-1]
        for _, value, request_id, peer.route in reversed(asked):
            peer.reply(request_id, torch.tensor([value]))
        for client, value, request_id, _ in asked:
            assert _output(client.wait(request_id).response).item() == value


@for_many_clients
def test_a_client_that_does_not_read_does_not_stop_the_others(peer: Peer) -> None:
    output = TensorReply(output=from_torch(torch.zeros(LARGE)))
    with _connected(peer) as lazy, _connected(peer) as other:
        request_id = lazy.submit(_request())
        lazy_route = peer.incoming().route
        frames = encode_reply("framed", request_id, "LMHead", output)
        # What is not read is kept for a while, and then no more is taken.
        assert any(not peer.listener.send(lazy_route, frames) for _ in range(2000))
        with _echoing(peer):
            received = _output(other.call(_request(7.0, 100)).response)
            assert torch.equal(received, torch.full((100,), 7.0))
            # It gets the reply once it reads.
            assert _output(lazy.wait(request_id).response).numel() == LARGE


def _frames(*frames: bytes) -> Callable[[Peer, int], object]:
    return lambda peer, _: peer.listener.send(peer.route, list(frames))


@each_row(
    ("wrong", "error", "said"),
    [
        (
            lambda peer, asked: peer.reply(asked, torch.ones(1), method="Linear"),
            *(ReplyError, "got Linear, expected LMHead"),
        ),
        (
            lambda peer, asked: peer.reply(asked + 1, torch.ones(1)),
            *(ProtocolError, "got request id [0-9]+"),
        ),
        (
            lambda peer, _: peer.reply(0, ErrorCode.UNSUPPORTED_VERSION, method=""),
            *(ProtocolError, "request id 0 with UNSUPPORTED_VERSION"),
        ),
        (lambda peer, asked: peer.reply(asked, ErrorCode.INTERNAL), ServiceError, "INTERNAL"),
        (_frames(b"garbage"), ProtocolError, None),
        (_frames(msgpack.packb({"status": "error", "error": "INTERNAL"})), ProtocolError, None),
        (_frames(b"", b"", b""), ProtocolError, None),
    ],
)
def test_a_reply_that_is_none_to_what_was_asked_is_refused(
    peer: Peer, wrong: Callable[[Peer, int], object], error: type[TsqpError], said: str | None
) -> None:
    with _connected(peer) as channel:
        request_id = channel.submit(_request())
        peer.receive()
        wrong(peer, request_id)
        with pytest.raises(error, match=said) as caught:
            channel.wait(request_id)
        assert channel.traffic.round_trips == 0
        if isinstance(caught.value, ServiceError):
            assert caught.value.where == f"LMHead at {peer.endpoint}"
        if "request id" not in (said or ""):
            _one_round_trip(peer, channel)


def test_too_large_reply_is_never_received(peer: Peer) -> None:
    with _connected(peer, timeout_s=60, max_message_bytes=1000) as channel:
        request_id = channel.submit(_request())
        peer.receive()
        peer.reply(request_id, torch.ones(1000))
        # The connection is closed at the first byte too many.
        with pytest.raises(
            (EndpointError, ProtocolError), match=r"a lost connection while LMHead|at most 1000"
        ):
            channel.wait(request_id)


def test_a_service_that_starts_later_is_waited_for(peer: Peer) -> None:
    peer.close()
    with _connected(peer, timeout_s=30) as channel:
        answers = []
        thread = threading.Thread(target=lambda: answers.append(channel.call(_request(4.0))))
        thread.start()
        late = Peer(peer.endpoint.replace("vsock://1:", "vsock://any:"))
        with _echoing(late):
            thread.join()
        late.close()
    assert torch.equal(_output(answers[0].response), torch.full((4,), 4.0))


def test_deadline_holds_while_stale_replies_keep_coming(
    peer: Peer, channel: PendingChannel
) -> None:
    first = channel.submit(_request(), timeout_s=TINY_S)
    # Before it is given up: over HTTP it would not leave any more.
    assert peer.receive().request_id == first
    with pytest.raises(DeadlineExceededError, match=r"no reply to LMHead within 0\.05 s") as info:
        channel.wait(first)
    assert info.value.retryable
    with pytest.raises(KeyError):
        channel.wait(first)
    second = channel.submit(_request(), timeout_s=0.2)
    assert peer.receive().request_id == second
    given_up, unnoticed = threading.Event(), threading.Event()
    stale = encode_reply("framed", first, "LMHead", ErrorCode.INTERNAL)

    def flood() -> None:
        # For a client that would never end; of this thread's own time, which stops where it does.
        until = time.thread_time() + 3.0
        while not given_up.is_set() and not unnoticed.is_set():
            peer.listener.send(peer.route, stale)
            if time.thread_time() > until:
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


def test_a_peer_that_dies_is_noticed_and_owes_nothing_when_it_comes_back(peer: Peer) -> None:
    with _connected(peer, timeout_s=3600) as channel:
        ids = [channel.submit(_request()) for _ in range(3)]
        for _ in ids:
            peer.receive()
        peer.close()
        for request_id in ids:
            if request_id == ids[-1]:
                # Of a connection that was lost nothing is waited for on a new one.
                successor = Peer(peer.endpoint.replace("vsock://1:", "vsock://any:"))
                _one_round_trip(successor, channel)
            with pytest.raises(EndpointError, match="a lost connection while LMHead") as info:
                channel.wait(request_id)
            assert info.value.retryable
        successor.close()


def test_wakeup_ends_waiting_and_no_message_is_none(peer: Peer) -> None:
    reader, writer = socket.socketpair()
    with reader, writer:
        assert peer.listener.receive() is None
        assert not peer.listener.wait(wakeup=reader, timeout_ms=0)
        assert not peer.listener.wait(timeout_ms=0)
        writer.send(b"x")
        assert not peer.listener.wait(wakeup=reader)
        assert peer.listener.receive() is None


def test_a_reply_to_nobody_is_not_sent(peer: Peer) -> None:
    assert not peer.listener.send((b"nobody",), [b"x"])
    with _connected(peer) as channel:
        channel.submit(_request())
        peer.receive()
    # The client is gone; ZeroMQ may take a moment to know.
    until = time.monotonic() + 10
    while peer.listener.send(peer.route, [b"x"]):
        assert not peer.listener.wait(timeout_ms=1)
        assert time.monotonic() < until


def test_a_request_larger_than_the_service_takes_ends_the_connection(address: str) -> None:
    small = Peer(address, max_message_bytes=2000)
    with _connected(small, timeout_s=60) as channel:
        with _echoing(small), pytest.raises(EndpointError, match="a lost connection"):
            channel.call(_request(elements=2000))
        _one_round_trip(small, channel)
    small.close()


def test_garbage_from_one_client_leaves_the_others_alone(
    peer: Peer, channel: PendingChannel
) -> None:
    scheme, _, rest = peer.endpoint.partition("://")
    with _echoing(peer):
        for garbage in (b"GET / HTTP/1.1\r\n\r\n", bytes(64), b"\1\0\0\0" + b"\xff" * 64):
            with _raw(scheme, rest) as raw:
                channel.call(_request())
                raw.sendall(garbage)
                channel.call(_request())
                raw.settimeout(10)
                if scheme in ("unix", "vsock"):
                    assert raw.recv(100) == b"", garbage
                channel.call(_request())


def _raw(scheme: str, rest: str) -> socket.socket:
    if scheme in ("tcp", "http"):
        host, _, port = rest.rpartition(":")
        return socket.create_connection((host, int(port)))
    if scheme == "vsock":
        cid, _, number = rest.partition(":")
        raw = socket.socket(socket.AF_VSOCK, socket.SOCK_STREAM)
        raw.connect((int(cid), int(number)))
        return raw
    return raw_socket(rest.rpartition(",")[2])


def test_keys_are_refused_where_nothing_would_use_them(tmp_path: Path) -> None:
    endpoint = f"unix://{tmp_path}/s"
    with pytest.raises(SettingsError, match=r"got a plain stream, .* expected tcp"):
        open_channel(endpoint, keys=ClientKeys(b"s", b"p"))
    for bound, got in ((endpoint, "a plain stream"), ("https://127.0.0.1:0", "a URL")):
        with pytest.raises(SettingsError, match=rf"keys.*: got {got}, .* expected tcp"):
            open_listener(bound, keys=ServiceKeys(b"s", frozenset()))
