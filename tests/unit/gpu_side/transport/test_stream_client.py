"""The listening end of a stream and its clients: slow ones, wrong ones, and too many."""

from __future__ import annotations

import errno
import logging
import select
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from gpu_side.encoding import open_request
from gpu_side.transport import acceptor, stream_client, stream_listener
from gpu_side.transport.stream_listener import QUEUED_REPLIES, StreamListener
from protocol.errors import EndpointError
from protocol.liveness import PROBE
from protocol.messages import InitRequest
from protocol.stream import StreamChannel
from protocol.stream_wire import to_pieces
from tests.kit.wire import (
    LARGE,
    REFUSED,
    look_until_refused,
    raw_socket,
    request_bytes,
    request_of,
    slow_reader,
    tensor_reply,
    wait_and_take,
)

SLOW = 99_999


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


def test_bytes_of_replies_that_nobody_reads_are_bounded(endpoint: str) -> None:
    frames, limit = tensor_reply(1, torch.zeros(LARGE)), 2 * 4 * LARGE
    size = to_pieces(frames)[1]
    listener = StreamListener(endpoint, max_message_bytes=limit)
    with raw_socket(endpoint) as lazy:
        route = request_of(listener, lazy)
        while listener.send(route, frames):
            pass
        writer = listener._clients[route[0]].writer
        # One more than is too much already may be on its way.
        assert limit < writer.unsent_bytes <= limit + size
        assert len(writer.unsent) < QUEUED_REPLIES
    listener.close()


# ------------------------------------------------------------ clients that take or give little


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
        route = request_of(listener, raw)
        reader, received = slow_reader(raw)
        reader.start()
        # To read it all takes two seconds at this pace, and what is left by now goes on waiting.
        assert listener.send(route, HUGE)
        assert len(listener._clients[route[0]].writer.unsent) == 1
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
        assert listener.send(request_of(listener, raw), HUGE)
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
            assert listener.send(request_of(listener, raw), HUGE)
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


def test_closing_while_a_wakeup_is_readable_still_sends(
    endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream_listener, "_CLOSING_S", 60.0)
    listener = StreamListener(endpoint)
    reader, writer = socket.socketpair()
    with raw_socket(endpoint) as raw, reader, writer:
        assert listener.send(request_of(listener, raw), HUGE)
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
    monkeypatch.setattr(stream_client, "_PATIENCE_S", 1000.0)
    monkeypatch.setattr(stream_listener, "patience_s", lambda size: 1000.0)
    listener._patience = stream_client.Patience()
    with raw_socket(endpoint) as lazy:
        # It would take a quarter of an hour if it waited for as long as it may.
        assert listener.send(request_of(listener, lazy), HUGE)
        assert listener._patience._left_s < 1000.0


def test_patience_is_one_for_all_connections(
    listener: StreamListener, endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream_client, "_PATIENCE_SHARE", 0.0)
    monkeypatch.setattr(stream_listener, "_PAUSE_S", 1.0)
    monkeypatch.setattr(listener._patience, "_left_s", 0.01)
    for _ in range(2):
        with raw_socket(endpoint) as lazy:
            assert listener.send(request_of(listener, lazy), HUGE)
    assert listener._patience.left_s(0.0) <= 0

    with raw_socket(endpoint) as again:
        route = request_of(listener, again)
        monkeypatch.setattr(listener, "_epoll", Never(listener._epoll))
        assert listener.send(route, HUGE)


def test_patience_comes_back_with_time() -> None:
    patience = stream_client.Patience()
    full = stream_client._PATIENCE_S
    assert patience.left_s(1000.0) == full
    patience.spend(2 * full)
    assert patience.left_s(1000.0) == -full
    later = 1000.0 + 1.5 * full / stream_client._PATIENCE_SHARE
    assert patience.left_s(later) == pytest.approx(full / 2)
    assert patience.left_s(later + 3600) == full


@pytest.mark.parametrize("received", [True, False])
def test_nobody_is_waited_for_while_another_wants_something(
    listener: StreamListener, endpoint: str, monkeypatch: pytest.MonkeyPatch, received: bool
) -> None:
    """Otherwise this would not end in the time that a test has."""
    monkeypatch.setattr(stream_listener, "patience_s", lambda _: 3600.0)
    monkeypatch.setattr(listener._patience, "_left_s", 3600.0)
    monkeypatch.setattr(stream_client, "_PATIENCE_S", 3600.0)
    with raw_socket(endpoint) as lazy, raw_socket(endpoint) as other:
        route = request_of(listener, lazy)
        request_of(listener, other)
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
    monkeypatch.setattr(stream_client, "_PATIENCE_S", 60.0)
    with raw_socket(endpoint) as raw:
        route = request_of(listener, raw)
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
        assert len(listener._clients[route[0]].writer.unsent) == 0
        thread.join()
        assert listener.wait(timeout_ms=10_000)


def test_requests_are_taken_from_clients_in_turn(listener: StreamListener, endpoint: str) -> None:
    with raw_socket(endpoint) as greedy, raw_socket(endpoint) as modest:
        for raw in (greedy, modest):
            request_of(listener, raw)
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
    size = stream_client.QUEUED_BYTES // 3 + 1
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
        assert listener._turns[0].reader.large is None
        assert sender.is_alive()
        modest.sendall(request_bytes(5000))
        while len(listener._turns) < 2:
            listener.wait(timeout_ms=1)
        taken = [incoming for _ in range(300) if (incoming := wait_and_take(listener))]
        sender.join()
        sizes = [incoming.frames[0].nbytes for incoming in taken]
        assert sizes.count(size) == 6
        # Others are read meanwhile: they come among those that waited.
        assert max(n for n, other in enumerate(sizes) if other != size) <= 3


def test_refused_clients_are_counted(listener: StreamListener, endpoint: str) -> None:
    for count in (1, 2):
        with raw_socket(endpoint) as raw:
            raw.sendall(b"canary canary")
            look_until_refused(listener, count)
            assert raw.recv(100) == b""


@pytest.mark.usefixtures("little_memory")
def test_a_message_that_does_not_fit_into_memory_ends_its_connection_only(
    listener: StreamListener,
    endpoint: str,
    channel: StreamChannel,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with raw_socket(endpoint) as raw, caplog.at_level(logging.WARNING):
        raw.sendall(struct.pack("<IQ", 1, 500 * 2**20))
        look_until_refused(listener, 1)
        assert raw.recv(100) == b""
    assert [r.__dict__["fields"]["code"] for r in caplog.records] == ["LIMIT_EXCEEDED"]
    channel.submit(InitRequest())
    assert listener.wait(timeout_ms=10_000)


def test_garbage_is_logged_without_its_content(
    listener: StreamListener, endpoint: str, caplog: pytest.LogCaptureFixture
) -> None:
    with raw_socket(endpoint) as raw, caplog.at_level(logging.WARNING):
        raw.sendall(b"canary canary")
        look_until_refused(listener, 1)
        assert raw.recv(100) == b""
    (record,) = caplog.records
    assert record.getMessage() == "dropped"
    assert "canary" not in str(record.__dict__)


def _probe(raw: socket.socket) -> None:
    """Have the acceptor's thread look a few times: whom it would let in is in by then."""
    for _ in range(5):
        raw.sendall(PROBE)
        assert raw.recv(10) == PROBE


def test_more_clients_than_allowed_wait_until_one_leaves(
    listener: StreamListener,
    endpoint: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(listener._acceptor, "_max_clients", 2)
    probing = raw_socket(endpoint)
    _probe(probing)
    first, second, third = (raw_socket(endpoint) for _ in range(3))
    with probing, first, second, third, caplog.at_level(logging.WARNING):
        for raw in (first, second, third):
            raw.sendall(request_bytes())
        for _ in range(2):
            assert listener.wait(timeout_ms=10_000)
            assert listener.receive() is not None
        _probe(probing)
        assert not listener.wait(timeout_ms=0)
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
        patched.setattr(stream_listener, "Client", exhausted)
        unlucky.sendall(request_bytes())
        look_until_refused(listener, 1)
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
    with raw_socket(endpoint) as first, raw_socket(endpoint) as probing:
        request_of(listener, first)
        _probe(probing)
        with _exhausted(listener._acceptor, monkeypatch) as noticed:
            second = raw_socket(endpoint)
            second.sendall(request_bytes())
            assert noticed.wait(10)
        with second:
            # It has stopped looking, or the poll would say for ever that somebody wants in.
            _probe(probing)
            assert not listener.wait(timeout_ms=0)
            first.close()
            assert listener.wait(timeout_ms=10_000)
            assert listener.receive() is not None


def test_where_nobody_is_let_in_any_more_the_listener_says_so(
    listener: StreamListener,
    endpoint: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Also to who waits without an end; what had come by then was handed out."""

    def fail(_: int) -> None:
        raise RuntimeError("a bug")

    with raw_socket(endpoint) as client, raw_socket(endpoint) as probing:
        request_of(listener, client)
        monkeypatch.setattr(listener._acceptor, "_classify", fail)
        probing.sendall(PROBE)
        with pytest.raises(EndpointError, match="got no thread that lets clients in"):
            listener.wait()
    assert caplog.messages == ["acceptor_failed"]
