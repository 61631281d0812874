"""Tests of stream sockets where they differ from ZeroMQ: files, buffers, slow and wrong peers."""

from __future__ import annotations

import errno
import logging
import os
import select
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from protocol import memory_pool, stream, stream_listener
from protocol.encoding import Form, encode_reply, encode_request, open_request
from protocol.errors import DeadlineExceededError, EndpointError, ErrorCode, ProtocolError
from protocol.messages import InitRequest, LMHeadRequest, TensorReply
from protocol.stream import StreamChannel
from protocol.stream_listener import QUEUED_REPLIES, StreamListener
from protocol.stream_wire import to_pieces
from protocol.tensors import from_torch, to_torch

LARGE = 2**20
SLOW = 99_999
REFUSED = encode_reply(Form.FRAMED, 1, "Init", ErrorCode.INTERNAL)


@pytest.fixture
def endpoint(tmp_path: Path) -> str:
    return f"unix://{tmp_path}/s"


@pytest.fixture
def listener(endpoint: str) -> Iterator[StreamListener]:
    made = StreamListener(endpoint)
    yield made
    made.close()


@pytest.fixture
def channel(endpoint: str) -> Iterator[StreamChannel]:
    with StreamChannel(endpoint, timeout_s=20) as made:
        yield made


def _raw(endpoint: str) -> socket.socket:
    raw = socket.socket(socket.AF_UNIX)
    raw.settimeout(10)
    raw.connect(endpoint.removeprefix("unix://"))
    return raw


def _message(request_id: int = 1) -> bytes:
    return b"".join(to_pieces(encode_request(InitRequest(), request_id, 1000))[0])


def _tensor_reply(request_id: int, value: torch.Tensor) -> list[bytes | bytearray | memoryview]:
    reply = TensorReply(output=from_torch(value))
    return encode_reply(Form.FRAMED, request_id, "LMHead", reply)


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
    _raw(endpoint).close()
    second.close()


def test_a_live_socket_is_not_taken_over(listener: StreamListener, endpoint: str) -> None:
    with pytest.raises(EndpointError, match="got Address already in use"):
        StreamListener(endpoint)
    _raw(endpoint).close()


def test_a_live_socket_with_a_full_backlog_is_not_taken_over(endpoint: str) -> None:
    with socket.socket(socket.AF_UNIX) as busy:
        busy.bind(endpoint.removeprefix("unix://"))
        busy.listen(0)
        with _raw(endpoint), pytest.raises(EndpointError, match="got Address already in use"):
            StreamListener(endpoint)


def test_the_file_of_a_dead_service_is_replaced(endpoint: str) -> None:
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(endpoint.removeprefix("unix://"))
    listener = StreamListener(endpoint)
    _raw(endpoint).close()
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
    with pytest.raises(EndpointError, match="got no stream"):
        StreamChannel(endpoint)


def test_an_address_that_can_never_answer_is_told_at_once(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with (
        StreamChannel(f"unix://{tmp_path}/file/s", timeout_s=3600) as channel,
        pytest.raises(EndpointError, match="got Not a directory"),
    ):
        channel.submit(InitRequest())


# ---------------------------------------------------------------------------------------- clients


@pytest.mark.parametrize("slices", [1, 7])
def test_a_slow_sender_is_served_and_does_not_stop_the_others(
    listener: StreamListener, endpoint: str, channel: StreamChannel, slices: int
) -> None:
    data = _message(SLOW)
    with _raw(endpoint) as slow:
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
    with _raw(endpoint) as slow:
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
    frames = _tensor_reply(1, torch.zeros(LARGE))
    with _raw(endpoint) as lazy:
        lazy.sendall(_message())
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


def _slow_reader(raw: socket.socket) -> tuple[threading.Thread, bytearray]:
    """Make a thread that reads a little every millisecond, as long as anything comes."""
    received = bytearray()

    def read() -> None:
        with suppress(OSError):
            while data := raw.recv(36_000):
                received.extend(data)
                pace.wait(0.001)

    pace = threading.Event()
    return threading.Thread(target=read), received


def _request_of(listener: StreamListener, raw: socket.socket) -> tuple[bytes, ...]:
    raw.sendall(_message())
    assert listener.wait(timeout_ms=10_000)
    incoming = listener.receive()
    assert incoming is not None
    return incoming.route


HUGE = _tensor_reply(1, torch.zeros(16 * LARGE))
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
    with _raw(endpoint) as raw:
        route = _request_of(listener, raw)
        reader, received = _slow_reader(raw)
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
    with _raw(endpoint) as raw:
        assert listener.send(_request_of(listener, raw), HUGE)
        reader, received = _slow_reader(raw)
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
    with _raw(endpoint) as lazy, _raw(endpoint) as eager:
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
    with _raw(endpoint) as raw, reader, writer:
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
    with _raw(endpoint) as lazy:
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
        with _raw(endpoint) as lazy:
            assert listener.send(_request_of(listener, lazy), HUGE)
    assert listener._patience.left_s(0.0) <= 0

    with _raw(endpoint) as again:
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
    with _raw(endpoint) as lazy, _raw(endpoint) as other:
        route = _request_of(listener, lazy)
        _request_of(listener, other)
        other.sendall(_message())
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
    with _raw(endpoint) as raw:
        route = _request_of(listener, raw)
        # Its own next request is no reason to leave it.
        raw.sendall(_message())
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
    with _raw(endpoint) as greedy, _raw(endpoint) as modest:
        while len(listener._clients) < 2:
            listener.wait(timeout_ms=0)
        greedy.sendall(b"".join(_message(n) for n in range(1, 1001)))
        modest.sendall(_message(5000) + _message(5001))
        assert listener.wait(timeout_ms=10_000)
        ids = []
        while (incoming := listener.receive()) is not None:
            ids.append(open_request(incoming.frames, 1000).request_id)
            if len(ids) == 100:
                # Also who comes while there is plenty to do.
                modest.sendall(_message(5002))
        assert {5000, 5001} < set(ids[:4])
        assert 5002 in ids[100:120]
        assert [n for n in ids if n <= 1000] == list(range(1, 1001))


def test_a_client_whose_requests_nobody_takes_is_not_read_from(
    listener: StreamListener, endpoint: str
) -> None:
    burst = _message() * 1000
    with _raw(endpoint) as greedy:
        greedy.setblocking(False)

        def flood() -> None:
            for _ in range(1000):
                greedy.send(burst)
                listener.wait(timeout_ms=0)

        with pytest.raises(BlockingIOError):
            flood()


@pytest.fixture
def _little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    real = memory_pool.numpy.empty

    def empty(size: int, dtype: type) -> object:
        if size > 2**26:
            raise MemoryError
        return real(size, dtype)

    monkeypatch.setattr(memory_pool.numpy, "empty", empty)


@pytest.mark.usefixtures("_little_memory")
def test_a_message_that_does_not_fit_into_memory_ends_its_connection_only(
    listener: StreamListener,
    endpoint: str,
    channel: StreamChannel,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with _raw(endpoint) as raw, caplog.at_level(logging.WARNING):
        raw.sendall(struct.pack("<IQ", 1, 500 * 2**20))
        assert not listener.wait(timeout_ms=100)
        assert raw.recv(100) == b""
    assert [r.__dict__["fields"]["code"] for r in caplog.records] == ["LIMIT_EXCEEDED"]
    channel.submit(InitRequest())
    assert listener.wait(timeout_ms=10_000)


@pytest.mark.usefixtures("_little_memory")
def test_a_reply_that_does_not_fit_into_memory_is_a_protocol_error(
    endpoint: str, channel: StreamChannel
) -> None:
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(endpoint.removeprefix("unix://"))
        listening.listen()
        request_id = channel.submit(InitRequest())
        served, _ = listening.accept()
        with served:
            served.sendall(struct.pack("<IQ", 1, 500 * 2**20))
            with pytest.raises(ProtocolError, match="what fits into memory") as info:
                channel.wait(request_id)
            assert info.value.code is ErrorCode.LIMIT_EXCEEDED
            assert channel._socket is None


def test_garbage_is_logged_without_its_content(
    listener: StreamListener, endpoint: str, caplog: pytest.LogCaptureFixture
) -> None:
    with _raw(endpoint) as raw, caplog.at_level(logging.WARNING):
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
    monkeypatch.setattr(stream_listener, "MAX_CLIENTS", 2)
    first, second, third = (_raw(endpoint) for _ in range(3))
    with first, second, third, caplog.at_level(logging.WARNING):
        for raw in (first, second, third):
            raw.sendall(_message())
        for _ in range(2):
            assert listener.wait(timeout_ms=10_000)
            assert listener.receive() is not None
        assert not listener.wait(timeout_ms=20)
        first.close()
        assert listener.wait(timeout_ms=10_000)
        assert listener.receive() is not None
    assert {record.getMessage() for record in caplog.records} == {"no_more_clients"}


class Exhausted:
    """A listening socket for whose clients there are no file descriptors."""

    def __init__(self, real: socket.socket) -> None:
        self.fileno = real.fileno

    def accept(self) -> tuple[socket.socket, object]:
        raise OSError(errno.EMFILE, "Too many open files")


@pytest.mark.parametrize("timeout_ms", [10_000, None])
def test_without_file_descriptors_nor_clients_it_is_tried_again(
    listener: StreamListener,
    endpoint: str,
    monkeypatch: pytest.MonkeyPatch,
    timeout_ms: int | None,
) -> None:
    monkeypatch.setattr(stream_listener, "_ACCEPT_AGAIN_S", 0.02)
    with _raw(endpoint) as raw:
        raw.sendall(_message())
        with monkeypatch.context() as patched:
            patched.setattr(listener, "_socket", Exhausted(listener._socket))
            listener._look(0)
        assert not listener.wait(timeout_ms=0)
        assert listener.wait(timeout_ms=timeout_ms)
        assert listener.receive() is not None


def test_a_client_for_which_there_is_no_memory_is_turned_away(
    listener: StreamListener, endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def exhausted(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr(stream_listener, "_ACCEPT_AGAIN_S", 0.0)
    with _raw(endpoint) as unlucky, monkeypatch.context() as patched:
        patched.setattr(stream_listener, "_Client", exhausted)
        assert not listener.wait(timeout_ms=20)
        assert unlucky.recv(100) == b""
    with _raw(endpoint) as raw:
        raw.sendall(_message())
        assert listener.wait(timeout_ms=10_000)
        assert listener.receive() is not None


def test_without_file_descriptors_clients_wait_until_one_leaves(
    listener: StreamListener, endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream_listener, "_ACCEPT_AGAIN_S", 3600.0)
    with _raw(endpoint) as first:
        first.sendall(_message())
        assert listener.wait(timeout_ms=10_000)
        assert listener.receive() is not None
        with _raw(endpoint) as second, monkeypatch.context() as patched:
            second.sendall(_message())
            patched.setattr(listener, "_socket", Exhausted(listener._socket))
            listener._look(0)
            patched.undo()
            # It has stopped looking, or the poll would say for ever that somebody wants in.
            assert not listener.wait(timeout_ms=20)
            first.close()
            assert listener.wait(timeout_ms=10_000)
            assert listener.receive() is not None


def test_closing_sends_what_is_on_its_way(endpoint: str) -> None:
    listener = StreamListener(endpoint)
    frames = _tensor_reply(1, torch.zeros(4 * LARGE))
    total = len(b"".join(to_pieces(frames)[0]))
    with _raw(endpoint) as raw:
        raw.sendall(_message())
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


# ----------------------------------------------------------------------------------- the channel


@pytest.fixture
def _small_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "SOCKET_BUFFER_BYTES", 4096)


@pytest.mark.usefixtures("_small_buffers")
def test_both_sides_write_large_messages_at_once(
    listener: StreamListener, channel: StreamChannel
) -> None:
    """With buffers that hold nothing, a side that only writes would wait for ever for the other."""
    reader, writer = socket.socketpair()

    def serve() -> None:
        while listener.wait(wakeup=reader):
            while (incoming := listener.receive()) is not None:
                opened = open_request(incoming.frames, 2**30)
                reply = _tensor_reply(opened.request_id, torch.full((LARGE,), opened.request_id))
                assert listener.send(incoming.route, reply)

    thread = threading.Thread(target=serve)
    thread.start()
    request = LMHeadRequest(hidden_states=from_torch(torch.zeros(LARGE)))
    ids = [channel.submit(request) for _ in range(12)]
    replies = [channel.wait(request_id).response for request_id in ids]
    writer.send(b"x")
    thread.join()
    reader.close()
    writer.close()
    for request_id, reply in zip(ids, replies, strict=True):
        assert isinstance(reply, TensorReply)
        assert torch.equal(to_torch(reply.output), torch.full((LARGE,), request_id))


@pytest.mark.usefixtures("_small_buffers")
def test_full_send_queue_is_an_endpoint_error(listener: StreamListener, endpoint: str) -> None:
    request = LMHeadRequest(hidden_states=from_torch(torch.zeros(1000)))

    def fill(channel: StreamChannel) -> None:
        for _ in range(10_000):
            channel.submit(request, timeout_s=0.05)

    with StreamChannel(endpoint) as channel:
        with pytest.raises(EndpointError, match="got a full send queue") as info:
            fill(channel)
        assert info.value.retryable
        # The service reads again: what waited goes out, and new requests too.
        while listener.wait(timeout_ms=100):
            while listener.receive() is not None:
                pass
            channel._read_and_write(0.0, reading=True)
        assert channel._writer.unsent_messages == 0
        channel.submit(request)


def test_a_reply_that_came_before_the_connection_was_lost_counts(
    endpoint: str, channel: StreamChannel
) -> None:
    listener = StreamListener(endpoint)
    ids = [channel.submit(InitRequest()) for _ in range(2)]
    for _ in ids:
        listener.wait(timeout_ms=10_000)
    incoming = listener.receive()
    assert incoming is not None
    listener.send(incoming.route, encode_reply(Form.FRAMED, ids[0], "Init", ErrorCode.INTERNAL))
    listener.close()
    with pytest.raises(EndpointError, match="a lost connection while Init"):
        channel.wait(ids[1])
    with pytest.raises(Exception, match="error reply INTERNAL"):
        channel.wait(ids[0])


def test_a_service_that_hangs_up_is_given_up_in_time(endpoint: str) -> None:
    listener = StreamListener(endpoint)
    with StreamChannel(endpoint) as channel:
        request_id = channel.submit(InitRequest())
        listener.wait(timeout_ms=10_000)
        listener.close()
        with pytest.raises(EndpointError):
            channel.wait(request_id)
        with pytest.raises(EndpointError, match="a lost connection before Init could be sent"):
            channel.submit(InitRequest(), timeout_s=0.1)


def test_garbage_from_the_service_ends_the_connection(
    endpoint: str, channel: StreamChannel
) -> None:
    path = endpoint.removeprefix("unix://")
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(path)
        listening.listen()
        first, second = channel.submit(InitRequest()), channel.submit(InitRequest())
        served, _ = listening.accept()
        with served:
            served.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
            with pytest.raises(ProtocolError, match=f"message from {endpoint}: got 1347703880 fra"):
                channel.wait(first)
            with pytest.raises(EndpointError, match="a lost connection while Init"):
                channel.wait(second)
            # It does not go on reading in the middle of something.
            third = channel.submit(InitRequest())
            again, _ = listening.accept()
            with again:
                again.sendall(b"".join(to_pieces(REFUSED)[0]))
                channel.abandon(third)
    os.unlink(path)


def test_deadline_holds_in_the_middle_of_a_large_reply(
    endpoint: str, channel: StreamChannel
) -> None:
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(endpoint.removeprefix("unix://"))
        listening.listen()
        request_id = channel.submit(InitRequest(), timeout_s=0.1)
        served, _ = listening.accept()
        with served:
            served.sendall(struct.pack("<IQ", 1, 2**20) + bytes(1000))
            with pytest.raises(Exception, match=r"no reply to Init within 0\.1 s"):
                channel.wait(request_id)


def test_deadline_holds_while_a_large_reply_comes_a_little_at_a_time(
    endpoint: str, channel: StreamChannel
) -> None:
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(endpoint.removeprefix("unix://"))
        listening.listen()
        request_id = channel.submit(InitRequest(), timeout_s=0.1)
        served, _ = listening.accept()
        given_up, unnoticed = threading.Event(), threading.Event()

        def drip() -> None:
            for _ in range(3000):
                served.sendall(b"x")
                if given_up.wait(0.001):
                    return
            unnoticed.set()
            served.close()

        with served:
            served.sendall(struct.pack("<IQ", 1, 2**20))
            thread = threading.Thread(target=drip)
            thread.start()
            try:
                with pytest.raises(DeadlineExceededError):
                    channel.wait(request_id)
            finally:
                given_up.set()
                thread.join()
        assert not unnoticed.is_set()


def test_deadline_holds_while_a_large_request_is_read_a_little_at_a_time(
    endpoint: str, channel: StreamChannel
) -> None:
    request = LMHeadRequest(hidden_states=from_torch(torch.zeros(32 * LARGE)))
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(endpoint.removeprefix("unix://"))
        listening.listen()
        first = channel.submit(InitRequest())
        served, _ = listening.accept()
        with served:
            reader, received = _slow_reader(served)
            reader.start()
            request_id = channel.submit(request, timeout_s=0.05)
            # To read it all takes four seconds at this pace.
            assert len(received) < 64 * LARGE
            with pytest.raises(DeadlineExceededError, match=r"no reply to LMHead within 0\.05 s"):
                channel.wait(request_id)
            assert len(received) < 64 * LARGE
            channel.abandon(first)
            channel.close()
            reader.join()


@pytest.mark.usefixtures("_small_buffers")
def test_garbage_while_a_request_waits_to_be_sent_ends_the_connection(
    endpoint: str, channel: StreamChannel
) -> None:
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(endpoint.removeprefix("unix://"))
        listening.listen()
        channel.submit(LMHeadRequest(hidden_states=from_torch(torch.zeros(LARGE))))
        served, _ = listening.accept()
        with served:
            served.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
            with pytest.raises(ProtocolError, match="got 1347703880 frames"):
                channel.submit(InitRequest())
        channel.submit(InitRequest(), timeout_s=1.0)
        again, _ = listening.accept()
        with again:
            again.settimeout(10)
            # A whole message, from its beginning.
            assert again.recv(2**16) == _message(channel._last_id)


def test_an_interrupt_while_a_request_is_written_ends_the_connection(
    listener: StreamListener, channel: StreamChannel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """How much of it the service has got is not known: nothing may follow it."""
    channel.submit(InitRequest())

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(channel._writer, "send", interrupted)
        with pytest.raises(KeyboardInterrupt):
            channel.submit(InitRequest())
    assert channel._socket is None
    request_id = channel.submit(InitRequest())
    received = []
    while request_id not in received:
        assert listener.wait(timeout_ms=10_000)
        while (incoming := listener.receive()) is not None:
            received.append(open_request(incoming.frames, 1000).request_id)
