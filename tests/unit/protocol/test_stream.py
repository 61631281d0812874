"""A channel over a stream where it differs from ZeroMQ: buffers, slow and wrong services."""

from __future__ import annotations

import os
import socket
import struct
import threading
import time
from pathlib import Path

import pytest
import torch

from gpu_side.encoding import Form, encode_reply, open_request
from gpu_side.transport.stream_listener import StreamListener
from protocol import stream, stream_wire
from protocol.errors import (
    DeadlineExceededError,
    EndpointError,
    ErrorCode,
    ProtocolError,
    ServiceError,
)
from protocol.messages import InitRequest, LMHeadRequest, TensorReply
from protocol.stream import StreamChannel
from protocol.stream_wire import to_pieces
from protocol.tensors import from_torch, to_torch
from tests.kit.wire import (
    LARGE,
    REFUSED,
    accepted,
    request_bytes,
    slow_reader,
    tensor_reply,
)


@pytest.mark.parametrize("endpoint", ["tcp://127.0.0.1:5", "ipc:///tmp/s"])
def test_what_is_no_stream_is_refused(endpoint: str) -> None:
    with pytest.raises(EndpointError, match="got no stream"):
        StreamChannel(endpoint)


def test_an_address_that_can_never_answer_is_told_at_once(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with (
        StreamChannel(f"unix://{tmp_path}/file/s", timeout_s=3600) as channel,
        pytest.raises(EndpointError, match="got Not a directory"),
    ):
        channel.submit(InitRequest())


def test_a_socket_of_vsock_gets_its_timeout(channel: StreamChannel) -> None:
    """Python gives options of that family numbers alone."""
    try:
        vsock = socket.socket(socket.AF_VSOCK, socket.SOCK_STREAM)
    except OSError as error:
        pytest.skip(f"no vsock here: {error}")
    with vsock, socket.socket(socket.AF_UNIX, fileno=os.dup(vsock.fileno())) as same:
        channel._socket = vsock
        channel._set_read_timeout(1.5)
        channel._socket = None
        value = same.getsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, 16)
    assert struct.unpack("@ll", value) == (1, 500_000)


@pytest.fixture
def _small_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_wire, "SOCKET_BUFFER_BYTES", 4096)


@pytest.mark.usefixtures("_small_buffers", "patient_streams")
def test_both_sides_write_large_messages_at_once(
    listener: StreamListener, channel: StreamChannel
) -> None:
    """With buffers that hold nothing, a side that only writes would wait for ever for the other."""
    reader, writer = socket.socketpair()

    def serve() -> None:
        while listener.wait(wakeup=reader):
            while (incoming := listener.receive()) is not None:
                opened = open_request(incoming.frames, 2**30)
                reply = tensor_reply(opened.request_id, torch.full((LARGE,), opened.request_id))
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
        until = time.monotonic() + 30
        while channel._writer.unsent:
            assert time.monotonic() < until
            listener.wait(timeout_ms=100)
            while listener.receive() is not None:
                pass
            channel._read_and_write(0.0, reading=True)
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
    with pytest.raises(ServiceError, match="error reply INTERNAL"):
        channel.wait(ids[0])


def test_with_one_connection_nothing_goes_to_who_listens_there_next(
    endpoint: str, channel: StreamChannel
) -> None:
    """Somebody else, perhaps, with whom nothing was agreed."""
    first = StreamListener(endpoint)
    channel.use_one_connection()
    request_id = channel.submit(InitRequest())
    assert first.wait(timeout_ms=10_000)
    first.close()
    second = StreamListener(endpoint)
    with pytest.raises(EndpointError, match="a lost connection while Init"):
        channel.wait(request_id)
    for _ in range(2):
        with pytest.raises(EndpointError, match="a lost connection before Init could be sent"):
            channel.submit(InitRequest())
    assert channel._socket is None
    assert not second.wait(timeout_ms=0)
    second.close()


@pytest.mark.usefixtures("_small_buffers", "listener")
def test_replies_that_nobody_asked_for_are_not_read_without_an_end(
    channel: StreamChannel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While a request waits to be sent: who reads none must not fill our memory meanwhile."""
    large = LMHeadRequest(hidden_states=from_torch(torch.zeros(LARGE)))
    channel.submit(large, timeout_s=0.05)
    assert channel._writer.unsent
    most = stream.QUEUED_REQUESTS + len(channel._pending)
    read, was_reading = channel._read_and_write, []

    def noting(timeout_s: float, *, reading: bool) -> None:
        was_reading.append(reading)
        read(timeout_s, reading=reading)

    monkeypatch.setattr(channel, "_read_and_write", noting)
    for held in (most - 1, most):
        channel._reader.messages.clear()
        channel._reader.messages.extend([([], 0)] * held)
        channel._make_room(0, 0.0)
    assert was_reading == [True, False]


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


@pytest.mark.usefixtures("little_memory")
def test_a_reply_that_does_not_fit_into_memory_is_a_protocol_error(
    endpoint: str, channel: StreamChannel
) -> None:
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(endpoint.removeprefix("unix://"))
        listening.listen()
        request_id = channel.submit(InitRequest())
        with accepted(listening) as served:
            served.sendall(struct.pack("<IQ", 1, 500 * 2**20))
            with pytest.raises(ProtocolError, match="what fits into memory") as info:
                channel.wait(request_id)
            assert info.value.code is ErrorCode.LIMIT_EXCEEDED
            assert channel._socket is None


def test_garbage_from_the_service_ends_the_connection(
    endpoint: str, channel: StreamChannel
) -> None:
    path = endpoint.removeprefix("unix://")
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(path)
        listening.listen()
        first, second = channel.submit(InitRequest()), channel.submit(InitRequest())
        with accepted(listening) as served:
            served.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
            with pytest.raises(ProtocolError, match=f"message from {endpoint}: got 1347703880 fra"):
                channel.wait(first)
            with pytest.raises(EndpointError, match="a lost connection while Init"):
                channel.wait(second)
            # It does not go on reading in the middle of something.
            third = channel.submit(InitRequest())
            with accepted(listening) as again:
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
        with accepted(listening) as served:
            served.sendall(struct.pack("<IQ", 1, 2**20) + bytes(1000))
            with pytest.raises(DeadlineExceededError, match=r"no reply to Init within 0\.1 s"):
                channel.wait(request_id)


def test_deadline_holds_while_a_large_reply_comes_a_little_at_a_time(
    endpoint: str, channel: StreamChannel
) -> None:
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(endpoint.removeprefix("unix://"))
        listening.listen()
        request_id = channel.submit(InitRequest(), timeout_s=0.1)
        given_up, unnoticed = threading.Event(), threading.Event()

        def drip() -> None:
            for _ in range(3000):
                served.sendall(b"x")
                if given_up.wait(0.001):
                    return
            unnoticed.set()
            served.close()

        with accepted(listening) as served:
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
        with accepted(listening) as served:
            reader, received = slow_reader(served)
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
        with accepted(listening) as served:
            served.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
            with pytest.raises(ProtocolError, match="got 1347703880 frames"):
                channel.submit(InitRequest())
        channel.submit(InitRequest(), timeout_s=1.0)
        with accepted(listening) as again:
            again.settimeout(10)
            # A whole message, from its beginning.
            assert again.recv(2**16) == request_bytes(channel._last_id)


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
