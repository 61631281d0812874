"""The listening end of a stream where it differs from ZeroMQ: files, slow and wrong clients."""

from __future__ import annotations

import errno
import logging
import select
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
import torch

from gpu_side.transport import acceptor, stream_listener
from gpu_side.transport.listener import Incoming
from gpu_side.transport.stream_listener import QUEUED_REPLIES, StreamListener
from protocol.encoding import open_request
from protocol.errors import EndpointError
from protocol.messages import InitRequest
from protocol.stream import StreamChannel
from protocol.stream_wire import to_pieces
from tests.unit.protocol.streams import (
    LARGE,
    REFUSED,
    raw_socket,
    request_bytes,
    slow_reader,
    tensor_reply,
)

SLOW = 99_999


# ------------------------------------------------------------------------------ the socket's file


def test_the_file_goes_with_the_listener(endpoint: str, tmp_path: Path) -> None:
    StreamListener(endpoint).close()
    assert not (tmp_path / "s").exists()


def test_a_successors_file_stays(endpoint: str, tmp_path: Path) -> None:
    first = StreamListener(endpoint)
    (tmp_path / "s").unlink()
    second = StreamListener(endpoint)
    first.close()
    assert (tmp_path / "s").exists()
    raw_socket(endpoint).close()
    second.close()


def test_a_live_socket_is_not_taken_over(listener: StreamListener, endpoint: str) -> None:
    with pytest.raises(EndpointError, match="got Address already in use"):
        StreamListener(endpoint)
    raw_socket(endpoint).close()


def test_a_live_socket_with_a_full_backlog_is_not_taken_over(endpoint: str) -> None:
    with socket.socket(socket.AF_UNIX) as busy:
        busy.bind(endpoint.removeprefix("unix://"))
        busy.listen(0)
        with raw_socket(endpoint), pytest.raises(EndpointError, match="got Address already in use"):
            StreamListener(endpoint)


def test_the_file_of_a_dead_service_is_replaced(endpoint: str) -> None:
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(endpoint.removeprefix("unix://"))
    listener = StreamListener(endpoint)
    raw_socket(endpoint).close()
    listener.close()


def test_a_file_that_is_no_socket_stays(endpoint: str, tmp_path: Path) -> None:
    (tmp_path / "s").write_text("precious")
    with pytest.raises(EndpointError, match="got Address already in use"):
        StreamListener(endpoint)
    assert (tmp_path / "s").read_text() == "precious"


@pytest.mark.parametrize("endpoint", ["unix:///no/such/directory/s", "vsock://77:5"])
def test_an_address_that_is_not_ours_is_refused(endpoint: str) -> None:
    with pytest.raises(EndpointError, match="expected an address to bind"):
        StreamListener(endpoint)


@pytest.mark.parametrize("endpoint", ["tcp://127.0.0.1:5", "ipc:///tmp/s"])
def test_what_is_no_stream_is_refused(endpoint: str) -> None:
    with pytest.raises(EndpointError, match="got no stream"):
        StreamListener(endpoint)


# ---------------------------------------------------------------------------------------- clients


@pytest.mark.parametrize("slices", [1, 7])
def test_a_slow_sender_is_served_and_does_not_stop_the_others(
    listener: StreamListener, endpoint: str, channel: StreamChannel, slices: int
) -> None:
    data = request_bytes(SLOW)
    with raw_socket(endpoint) as slow:
        for n in range(0, len(data), slices):
            assert listener.receive() is None
            slow.sendall(data[n : n + slices])
            request_id = channel.submit(InitRequest())
            assert listener.wait(timeout_ms=10_000)
            # It may be the last slice that completes the slow one's message.
            received = []
            while (incoming := listener.receive()) is not None:
                received.append(open_request(incoming.frames, 1000).request_id)
                if received[-1] == SLOW:
                    listener.send(incoming.route, REFUSED)
            assert request_id in received
            assert (SLOW in received) == (n + slices >= len(data))
            channel.abandon(request_id)
        assert slow.recv(10_000) == b"".join(to_pieces(REFUSED)[0])


def test_a_large_request_that_stops_half_way_does_not_stop_the_others(
    listener: StreamListener, endpoint: str, channel: StreamChannel
) -> None:
    with raw_socket(endpoint) as slow:
        slow.settimeout(None)
        slow.sendall(struct.pack("<IQ", 1, 2**28) + bytes(100_000))
        for _ in range(20):
            slow.sendall(bytes(1000))
            request_id = channel.submit(InitRequest())
            assert listener.wait(timeout_ms=10_000)
            incoming = listener.receive()
            assert incoming is not None
            assert open_request(incoming.frames, 1000).request_id == request_id


def test_replies_that_nobody_reads_are_bounded(listener: StreamListener, endpoint: str) -> None:
    frames = tensor_reply(1, torch.zeros(LARGE))
    with raw_socket(endpoint) as lazy:
        lazy.sendall(request_bytes())
        assert listener.wait(timeout_ms=10_000)
        incoming = listener.receive()
        assert incoming is not None
        taken = 0
        while listener.send(incoming.route, frames):
            taken += 1
        assert QUEUED_REPLIES <= taken < QUEUED_REPLIES + 10
        # What was taken comes as soon as it is read.
        left = taken * len(b"".join(to_pieces(frames)[0]))
        while left:
            listener.wait(timeout_ms=0)
            left -= len(lazy.recv(min(left, 2**20)))
        assert listener.send(incoming.route, frames)


# ------------------------------------------------------------ clients that take or give little


def _request_of(listener: StreamListener, raw: socket.socket) -> tuple[bytes, ...]:
    raw.sendall(request_bytes())
    assert listener.wait(timeout_ms=10_000)
    incoming = listener.receive()
    assert incoming is not None
    return incoming.route


HUGE = tensor_reply(1, torch.zeros(16 * LARGE))


HUGE_BYTES = to_pieces(HUGE)[1]


class Never:
    """An epoll set that must not be asked."""

    def __init__(self, real: select.epoll) -> None:
        self.modify, self.register, self.close = real.modify, real.register, real.close

    def poll(self, *_: object) -> list[tuple[int, int]]:
        raise AssertionError("nobody is to be waited for")


def test_a_client_that_reads_a_little_at_a_time_does_not_hold_the_service(
    listener: StreamListener, endpoint: str, channel: StreamChannel
) -> None:
    with raw_socket(endpoint) as raw:
        route = _request_of(listener, raw)
        reader, received = slow_reader(raw)
        reader.start()
        # To read it all takes two seconds at this pace, and what is left by now goes on waiting.
        assert listener.send(route, HUGE)
        assert listener._clients[route[0]].writer.unsent_messages == 1
        assert len(received) < HUGE_BYTES // 2
        request_id = channel.submit(InitRequest())
        assert listener.wait(timeout_ms=10_000)
        incoming = listener.receive()
        assert incoming is not None
        assert open_request(incoming.frames, 1000).request_id == request_id
        raw.shutdown(socket.SHUT_RDWR)
        reader.join()


def test_closing_does_not_wait_for_a_client_that_reads_a_little_at_a_time(
    endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream_listener, "_CLOSING_S", 0.05)
    listener = StreamListener(endpoint)
    with raw_socket(endpoint) as raw:
        assert listener.send(_request_of(listener, raw), HUGE)
        reader, received = slow_reader(raw)
        reader.start()
        listener.close()
        assert len(received) < HUGE_BYTES // 2
        raw.shutdown(socket.SHUT_RDWR)
        reader.join()


def test_closing_serves_who_reads_beside_who_does_not(
    endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream_listener, "_CLOSING_S", 60.0)
    listener = StreamListener(endpoint)
    with raw_socket(endpoint) as lazy, raw_socket(endpoint) as eager:
        for raw in (lazy, eager):
            assert listener.send(_request_of(listener, raw), HUGE)
        received = 0

        def read() -> None:
            nonlocal received
            while data := eager.recv(2**20):
                received += len(data)
            lazy.close()  # or we would wait for it

        thread = threading.Thread(target=read)
        thread.start()
        listener.close()
        thread.join()
    assert received == HUGE_BYTES


def test_closing_while_a_wakeup_is_readable_still_sends(endpoint: str) -> None:
    listener = StreamListener(endpoint)
    reader, writer = socket.socketpair()
    with raw_socket(endpoint) as raw, reader, writer:
        assert listener.send(_request_of(listener, raw), HUGE)
        writer.send(b"x")
        assert not listener.wait(wakeup=reader, timeout_ms=0)
        received = 0

        def read() -> None:
            nonlocal received
            while data := raw.recv(2**20):
                received += len(data)

        thread = threading.Thread(target=read)
        thread.start()
        listener.close()
        thread.join()
    assert received == HUGE_BYTES


def test_a_client_that_takes_nothing_is_left_alone_after_a_moment(
    listener: StreamListener, endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream_listener, "_PATIENCE_S", 1000.0)
    monkeypatch.setattr(stream_listener, "patience_s", lambda size: 1000.0)
    listener._patience = stream_listener._Patience()
    with raw_socket(endpoint) as lazy:
        # It would take a quarter of an hour if it waited for as long as it may.
        assert listener.send(_request_of(listener, lazy), HUGE)
        assert listener._patience._left_s < 1000.0


def test_patience_is_one_for_all_connections(
    listener: StreamListener, endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream_listener, "_PATIENCE_SHARE", 0.0)
    monkeypatch.setattr(stream_listener, "_PAUSE_S", 1.0)
    monkeypatch.setattr(listener._patience, "_left_s", 0.01)
    for _ in range(2):
        with raw_socket(endpoint) as lazy:
            assert listener.send(_request_of(listener, lazy), HUGE)
    assert listener._patience.left_s(0.0) <= 0

    with raw_socket(endpoint) as again:
        route = _request_of(listener, again)
        monkeypatch.setattr(listener, "_epoll", Never(listener._epoll))
        assert listener.send(route, HUGE)


def test_patience_comes_back_with_time() -> None:
    patience = stream_listener._Patience()
    full = stream_listener._PATIENCE_S
    assert patience.left_s(1000.0) == full
    patience.spend(2 * full)
    assert patience.left_s(1000.0) == -full
    later = 1000.0 + 1.5 * full / stream_listener._PATIENCE_SHARE
    assert patience.left_s(later) == pytest.approx(full / 2)
    assert patience.left_s(later + 3600) == full


@pytest.mark.parametrize("received", [True, False])
def test_nobody_is_waited_for_while_another_wants_something(
    listener: StreamListener, endpoint: str, monkeypatch: pytest.MonkeyPatch, received: bool
) -> None:
    """Otherwise this would not end in the time that a test has."""
    monkeypatch.setattr(stream_listener, "patience_s", lambda _: 3600.0)
    monkeypatch.setattr(listener._patience, "_left_s", 3600.0)
    monkeypatch.setattr(stream_listener, "_PATIENCE_S", 3600.0)
    with raw_socket(endpoint) as lazy, raw_socket(endpoint) as other:
        route = _request_of(listener, lazy)
        _request_of(listener, other)
        other.sendall(request_bytes())
        if received:
            assert listener.wait(timeout_ms=10_000)
        assert listener.send(route, HUGE)
        assert listener.wait(timeout_ms=10_000)
        incoming = listener.receive()
        assert incoming is not None
        assert incoming.route != route


def test_a_client_that_reads_is_waited_for(
    listener: StreamListener, endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream_listener, "patience_s", lambda _: 60.0)
    monkeypatch.setattr(stream_listener, "_PAUSE_S", 60.0)
    monkeypatch.setattr(listener._patience, "_left_s", 60.0)
    monkeypatch.setattr(stream_listener, "_PATIENCE_S", 60.0)
    with raw_socket(endpoint) as raw:
        route = _request_of(listener, raw)
        # Its own next request is no reason to leave it.
        raw.sendall(request_bytes())
        left = HUGE_BYTES

        def read() -> None:
            nonlocal left
            while left:
                left -= len(raw.recv(min(left, 2**20)))

        thread = threading.Thread(target=read)
        thread.start()
        assert listener.send(route, HUGE)
        assert listener._clients[route[0]].writer.unsent_messages == 0
        thread.join()
        assert listener.wait(timeout_ms=10_000)


def test_requests_are_taken_from_clients_in_turn(listener: StreamListener, endpoint: str) -> None:
    with raw_socket(endpoint) as greedy, raw_socket(endpoint) as modest:
        for raw in (greedy, modest):
            _request_of(listener, raw)
        greedy.sendall(b"".join(request_bytes(n) for n in range(1, 1001)))
        modest.sendall(request_bytes(5000) + request_bytes(5001))
        assert listener.wait(timeout_ms=10_000)
        ids = []
        while (incoming := listener.receive()) is not None:
            ids.append(open_request(incoming.frames, 1000).request_id)
            if len(ids) == 100:
                # Also who comes while there is plenty to do.
                modest.sendall(request_bytes(5002))
        assert {5000, 5001} < set(ids[:4])
        assert 5002 in ids[100:120]
        assert [n for n in ids if n <= 1000] == list(range(1, 1001))


def test_a_client_whose_requests_nobody_takes_is_not_read_from(
    listener: StreamListener, endpoint: str
) -> None:
    burst = request_bytes() * 1000
    with raw_socket(endpoint) as greedy:
        greedy.setblocking(False)

        def flood() -> None:
            for _ in range(1000):
                greedy.send(burst)
                listener.wait(timeout_ms=0)

        with pytest.raises(BlockingIOError):
            flood()


def test_a_client_with_many_bytes_that_nobody_takes_is_not_read_from(
    listener: StreamListener, endpoint: str
) -> None:
    size = stream_listener.QUEUED_BYTES // 3 + 1
    message = struct.pack("<IQ", 1, size).ljust(64, b"\0") + bytes(size)
    with raw_socket(endpoint) as greedy, raw_socket(endpoint) as modest:
        sender = threading.Thread(target=lambda: greedy.sendall(message * 6))
        sender.start()
        while not listener._turns or len(listener._turns[0].reader.messages) < 3:
            listener.wait(timeout_ms=1)
        for _ in range(100):
            listener.wait(timeout_ms=0)
        # A third of it each: the third reaches the limit, and nothing is read behind it.
        assert len(listener._turns[0].reader.messages) == 3
        assert not listener._turns[0].reader.in_large_message
        assert sender.is_alive()
        modest.sendall(request_bytes(5000))
        taken = [incoming for _ in range(300) if (incoming := _wait_and_take(listener))]
        sender.join()
        sizes = [incoming.frames[0].nbytes for incoming in taken]
        assert sizes.count(size) == 6
        # Others are read meanwhile: they come among those that waited.
        assert max(n for n, other in enumerate(sizes) if other != size) <= 3


ALMOST = 2**20


def _announced(size: int, come: int) -> bytes:
    """Return a message of one frame of which only so much comes."""
    return struct.pack("<IQ", 1, size).ljust(64, b"\0") + bytes(come)


@pytest.fixture
def small(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[StreamListener]:
    """Return a listener for messages of a mebibyte, of which it takes two at a time."""
    monkeypatch.setattr(stream_listener, "ALWAYS_BYTES", 0)
    made = StreamListener(endpoint, max_message_bytes=ALMOST)
    yield made
    made.close()


def _sit(listener: StreamListener, endpoint: str) -> socket.socket:
    """Send all but the last byte of the largest message, and let it be received."""
    raw = raw_socket(endpoint)
    before = listener._large_bytes
    sender = threading.Thread(target=raw.sendall, args=(_announced(ALMOST, ALMOST - 1),))
    sender.start()
    while listener._large_bytes == before or sender.is_alive():
        listener.wait(timeout_ms=1)
    sender.join()
    return raw


def test_large_messages_of_all_clients_are_bounded_together(
    small: StreamListener, endpoint: str
) -> None:
    taken: list[int] = []
    limit = stream_listener.RECEIVED_MESSAGES * ALMOST
    with _sit(small, endpoint) as first, _sit(small, endpoint), ExitStack() as stack:
        assert small._large_bytes == limit
        # Others stay in the kernel, and small messages come through.
        late = [stack.enter_context(raw_socket(endpoint)) for _ in range(5)]
        for raw in late:
            raw.sendall(_announced(ALMOST // 2, 0))
        while len(small._wanting_room) < 5:
            assert not small.wait(timeout_ms=1)
        assert small._large_bytes == limit
        assert sum(client.reader.in_large_message for client in small._clients.values()) == 2
        _request_of(small, stack.enter_context(raw_socket(endpoint)))
        # What is complete counts until it is handed out; who came first gets its room.
        first.sendall(b"x")
        assert small.wait(timeout_ms=10_000)
        assert small._large_bytes == limit
        incoming = small.receive()
        assert incoming is not None
        assert incoming.frames[0].nbytes == ALMOST
        assert not small.wait(timeout_ms=0)
        assert list(small._wanting_room) == list(small._clients)[4:7]
        senders = [
            threading.Thread(target=raw.sendall, args=(bytes(ALMOST // 2),)) for raw in late[:2]
        ]
        for sender in senders:
            sender.start()
        while len(taken) < 2:
            incoming = _wait_and_take(small)
            taken += [incoming.frames[0].nbytes] if incoming else []
            assert small._large_bytes <= limit
        assert taken == [ALMOST // 2] * 2
        for sender in senders:
            sender.join()
    # Whoever goes gives back what it had, also while it waits.
    while small._clients:
        small.wait(timeout_ms=1)
    assert (small._large_bytes, small._wanting_room) == (0, {})


def test_where_there_is_no_room_each_client_has_a_little(
    small: StreamListener, endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream_listener, "ALWAYS_BYTES", 300_000)
    with _sit(small, endpoint), _sit(small, endpoint), ExitStack() as stack:
        large, modest, greedy = (stack.enter_context(raw_socket(endpoint)) for _ in range(3))
        large.sendall(_announced(300_001, 1000))
        while not small._wanting_room:
            small.wait(timeout_ms=1)
        # It overtakes who needs more.
        sender = threading.Thread(target=modest.sendall, args=(_announced(300_000, 300_000),))
        sender.start()
        assert small.wait(timeout_ms=10_000)
        sender.join()
        # But what nobody has taken counts: each has it once.
        modest.sendall(_announced(200_000, 1000))
        greedy.sendall(_announced(200_000, 1000))
        while len(small._clients) < 5 or small._large_bytes < 2 * ALMOST + 500_000:
            small.wait(timeout_ms=1)
        while len(small._wanting_room) < 2:
            small.wait(timeout_ms=1)
        assert small._large_bytes == 2 * ALMOST + 500_000
        incoming = small.receive()
        assert incoming is not None
        assert incoming.frames[0].nbytes == 300_000
        small.wait(timeout_ms=0)
        assert small._large_bytes == 2 * ALMOST + 400_000
        (waiting,) = small._wanting_room.values()
        assert waiting.reader.wants_room == 300_001


def test_who_goes_while_it_waits_for_room_keeps_nobody_busy(
    small: StreamListener, endpoint: str
) -> None:
    with _sit(small, endpoint), _sit(small, endpoint):
        with raw_socket(endpoint) as late:
            late.sendall(_announced(ALMOST, 1000))
            while not small._wanting_room:
                small.wait(timeout_ms=1)
        while small._wanting_room:
            small.wait(timeout_ms=1)
        assert len(small._clients) == 2


@pytest.mark.parametrize("timeout_ms", [10_000, None])
def test_who_sits_on_a_large_message_makes_room(
    small: StreamListener,
    endpoint: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    timeout_ms: int | None,
) -> None:
    monkeypatch.setattr(stream_listener, "_LOOK_FOR_STALLED_S", 0.01)
    with ExitStack() as stack:
        first, second = (stack.enter_context(_sit(small, endpoint)) for _ in range(2))
        # One that waits for room is never meant, nor one that idles between two messages.
        idle, late = (stack.enter_context(raw_socket(endpoint)) for _ in range(2))
        _request_of(small, idle)
        late.sendall(_announced(ALMOST, 1000))
        while not small._wanting_room:
            small.wait(timeout_ms=1)
        sender = threading.Thread(target=late.sendall, args=(bytes(ALMOST - 1000),))
        sender.start()
        monkeypatch.setattr(stream_listener, "STALLED_S", 0.0)
        # The first has sat longest, and one is enough.
        while (incoming := small.receive()) is None:
            assert small.wait(timeout_ms=timeout_ms)
        monkeypatch.undo()
        sender.join()
        assert incoming.frames[0].nbytes == ALMOST
        assert first.recv(10) == b""
        assert small.clients_refused == 1
        _request_of(small, idle)
        second.sendall(b"x")
        assert small.wait(timeout_ms=10_000)
    fields = [vars(record)["fields"] for record in caplog.records]
    assert ["and no more for" in field["detail"] for field in fields] == [True]


def test_who_never_ends_its_first_message_makes_room_for_who_does(
    listener: StreamListener,
    endpoint: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(listener._acceptor, "_max_clients", 3)
    monkeypatch.setattr(stream_listener, "_LOOK_FOR_STALLED_S", 0.01)
    monkeypatch.setattr(stream_listener, "STALLED_S", 3600.0)
    with raw_socket(endpoint) as honest, ExitStack() as stack:
        _request_of(listener, honest)
        sitting = []
        for count in (1, 2):
            sitting.append(stack.enter_context(raw_socket(endpoint)))
            sitting[-1].sendall(b"\x01")
            while len(listener._clients) < count + 1:
                assert not listener.wait(timeout_ms=1)
        monkeypatch.setattr(stream_listener, "STALLED_S", 0.0)
        late = stack.enter_context(raw_socket(endpoint))
        _request_of(listener, late)
        assert sitting[0].recv(10) == b""
        # Who has ended its message may be silent for as long as it likes.
        _request_of(listener, honest)
    assert {vars(record)["fields"].get("code") for record in caplog.records} >= {"LIMIT_EXCEEDED"}


def test_who_goes_on_with_its_message_has_not_stalled(
    small: StreamListener, endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1000.0
    monkeypatch.setattr("gpu_side.transport.stream_listener.time.monotonic", lambda: now)
    with _sit_at(small, endpoint, 200_000) as raw:
        (client,) = small._clients.values()

        def send(count: int) -> None:
            raw.sendall(bytes(count))
            expected = client.reader.unfinished_bytes + count
            while client.reader.unfinished_bytes < expected:
                small._look(1)

        assert [client.has_stalled(at) for at in (1000.0, 1001.9, 1002.0)] == [False, False, True]
        now = 1001.0
        # A byte now and then is not enough.
        send(1)
        assert client.has_stalled(1002.0)
        send(stream_listener.STALLED_BYTES)
        assert not client.has_stalled(1002.9)
        assert client.has_stalled(1003.0)


def _sit_at(listener: StreamListener, endpoint: str, come: int) -> socket.socket:
    raw = raw_socket(endpoint)
    raw.sendall(_announced(ALMOST, come))
    while not any(
        client.reader.unfinished_bytes == come + 64 for client in listener._clients.values()
    ):
        listener._look(1)
    return raw


def _wait_and_take(listener: StreamListener) -> Incoming | None:
    listener.wait(timeout_ms=10)
    return listener.receive()


def test_refused_clients_are_counted(listener: StreamListener, endpoint: str) -> None:
    for count in (1, 2):
        with raw_socket(endpoint) as raw:
            raw.sendall(b"canary canary")
            assert not listener.wait(timeout_ms=100)
            assert raw.recv(100) == b""
        assert listener.clients_refused == count


@pytest.mark.usefixtures("little_memory")
def test_a_message_that_does_not_fit_into_memory_ends_its_connection_only(
    listener: StreamListener,
    endpoint: str,
    channel: StreamChannel,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with raw_socket(endpoint) as raw, caplog.at_level(logging.WARNING):
        raw.sendall(struct.pack("<IQ", 1, 500 * 2**20))
        assert not listener.wait(timeout_ms=100)
        assert raw.recv(100) == b""
    assert [r.__dict__["fields"]["code"] for r in caplog.records] == ["LIMIT_EXCEEDED"]
    channel.submit(InitRequest())
    assert listener.wait(timeout_ms=10_000)


def test_garbage_is_logged_without_its_content(
    listener: StreamListener, endpoint: str, caplog: pytest.LogCaptureFixture
) -> None:
    with raw_socket(endpoint) as raw, caplog.at_level(logging.WARNING):
        raw.sendall(b"canary canary")
        assert not listener.wait(timeout_ms=100)
        assert raw.recv(100) == b""
    (record,) = caplog.records
    assert record.getMessage() == "dropped"
    assert "canary" not in str(record.__dict__)


def test_more_clients_than_allowed_wait_until_one_leaves(
    listener: StreamListener,
    endpoint: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(listener._acceptor, "_max_clients", 2)
    first, second, third = (raw_socket(endpoint) for _ in range(3))
    with first, second, third, caplog.at_level(logging.WARNING):
        for raw in (first, second, third):
            raw.sendall(request_bytes())
        for _ in range(2):
            assert listener.wait(timeout_ms=10_000)
            assert listener.receive() is not None
        assert not listener.wait(timeout_ms=20)
        first.close()
        assert listener.wait(timeout_ms=10_000)
        assert listener.receive() is not None
    assert {record.getMessage() for record in caplog.records} == {"no_more_clients"}


@contextmanager
def _exhausted(
    made: acceptor.Acceptor, monkeypatch: pytest.MonkeyPatch
) -> Iterator[threading.Event]:
    """Let there be no file descriptors for clients; the event says that this was noticed."""
    noticed, pause = threading.Event(), made.pause_accepting

    class Exhausted:
        def accept(self) -> tuple[socket.socket, object]:
            raise OSError(errno.EMFILE, "Too many open files")

    def notice() -> None:
        pause()
        noticed.set()

    with monkeypatch.context() as patched:
        patched.setattr(made, "pause_accepting", notice)
        patched.setattr(made, "_listening", Exhausted())
        yield noticed


@pytest.mark.parametrize("timeout_ms", [10_000, None])
def test_without_file_descriptors_nor_clients_it_is_tried_again(
    listener: StreamListener,
    endpoint: str,
    monkeypatch: pytest.MonkeyPatch,
    timeout_ms: int | None,
) -> None:
    monkeypatch.setattr(acceptor, "_ACCEPT_AGAIN_S", 0.02)
    with _exhausted(listener._acceptor, monkeypatch) as noticed:
        raw = raw_socket(endpoint)
        raw.sendall(request_bytes())
        assert noticed.wait(10)
        assert not listener.wait(timeout_ms=0)
    with raw:
        assert listener.wait(timeout_ms=timeout_ms)
        assert listener.receive() is not None


def test_a_client_for_which_there_is_no_memory_is_turned_away(
    listener: StreamListener,
    endpoint: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def exhausted(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr(acceptor, "_ACCEPT_AGAIN_S", 0.0)
    # It has left: there is room for another one.
    monkeypatch.setattr(listener._acceptor, "_max_clients", 1)
    with raw_socket(endpoint) as unlucky, monkeypatch.context() as patched:
        patched.setattr(stream_listener, "_Client", exhausted)
        unlucky.sendall(request_bytes())
        while not listener.clients_refused:
            assert not listener.wait(timeout_ms=20)
        with pytest.raises(ConnectionResetError):
            unlucky.recv(100)
    assert {record.__dict__["fields"]["clients"] for record in caplog.records} == {0, 1}
    with raw_socket(endpoint) as raw:
        raw.sendall(request_bytes())
        assert listener.wait(timeout_ms=10_000)
        assert listener.receive() is not None


def test_without_file_descriptors_clients_wait_until_one_leaves(
    listener: StreamListener, endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(acceptor, "_ACCEPT_AGAIN_S", 3600.0)
    with raw_socket(endpoint) as first:
        _request_of(listener, first)
        with _exhausted(listener._acceptor, monkeypatch) as noticed:
            second = raw_socket(endpoint)
            second.sendall(request_bytes())
            assert noticed.wait(10)
        with second:
            # It has stopped looking, or the poll would say for ever that somebody wants in.
            assert not listener.wait(timeout_ms=20)
            first.close()
            assert listener.wait(timeout_ms=10_000)
            assert listener.receive() is not None


def test_closing_sends_what_is_on_its_way(endpoint: str) -> None:
    listener = StreamListener(endpoint)
    frames = tensor_reply(1, torch.zeros(4 * LARGE))
    total = len(b"".join(to_pieces(frames)[0]))
    with raw_socket(endpoint) as raw:
        raw.sendall(request_bytes())
        assert listener.wait(timeout_ms=10_000)
        incoming = listener.receive()
        assert incoming is not None
        assert listener.send(incoming.route, frames)
        received = bytearray()

        def read() -> None:
            while data := raw.recv(2**20):
                received.extend(data)

        thread = threading.Thread(target=read)
        thread.start()
        listener.close()
        thread.join()
    assert len(received) == total
