"""Tests of stream sockets where they differ from ZeroMQ: files, buffers, slow and wrong peers."""

from __future__ import annotations

import errno
import logging
import os
import socket
import struct
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from protocol import stream, stream_listener
from protocol.encoding import Form, encode_reply, encode_request, open_request
from protocol.errors import EndpointError, ErrorCode, ProtocolError
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


def test_without_file_descriptors_clients_wait_until_one_leaves(
    listener: StreamListener, endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = listener._socket

    class Exhausted:
        def accept(self) -> tuple[socket.socket, object]:
            raise OSError(errno.EMFILE, "Too many open files")

        def fileno(self) -> int:
            return real.fileno()

    with _raw(endpoint) as first:
        first.sendall(_message())
        assert listener.wait(timeout_ms=10_000)
        assert listener.receive() is not None
        with _raw(endpoint) as second, monkeypatch.context() as patched:
            second.sendall(_message())
            patched.setattr(listener, "_socket", Exhausted())
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
