"""A channel over a stream where it differs from ZeroMQ: buffers, slow and wrong services.

What it has in common with the other transports is in `tests/contract/test_transports.py`.
"""

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
from protocol import stream
from protocol.errors import (
    DeadlineExceededError,
    EndpointError,
    ErrorCode,
    ProtocolError,
    ServiceError,
)
from protocol.messages import InitRequest, LMHeadRequest
from protocol.stream import StreamChannel
from protocol.tensors import from_torch
from tests.kit.wire import LARGE, accepted, request_bytes, slow_reader

GARBAGE = b"HTTP/1.1 400 Bad Request\r\n\r\n"
LARGE_REQUEST = LMHeadRequest(hidden_states=from_torch(torch.zeros(LARGE)))


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


# -------------------------------------------------------------------- a service that does not read


@pytest.mark.usefixtures("small_buffers")
def test_a_full_send_queue_is_an_endpoint_error(listener: StreamListener, endpoint: str) -> None:
    request = LMHeadRequest(hidden_states=from_torch(torch.zeros(1000)))

    def fill(channel: StreamChannel) -> None:
        for _ in range(10_000):
            channel.submit(request, timeout_s=0.05)

    with StreamChannel(endpoint) as channel:
        with pytest.raises(EndpointError, match="got a full send queue") as info:
            fill(channel)
        assert info.value.retryable
        assert len(channel._writer.unsent) == stream.QUEUED_REQUESTS
        # The service reads again: what waited goes out, and new requests too.
        until = time.monotonic() + 30
        while channel._writer.unsent:
            assert time.monotonic() < until
            listener.wait(timeout_ms=100)
            while listener.receive() is not None:
                pass
            channel._read_and_write(0.0, reading=True)
        channel.submit(request)


@pytest.mark.usefixtures("small_buffers", "listener")
def test_replies_that_nobody_asked_for_are_not_read_without_an_end(
    channel: StreamChannel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While a request waits to be sent: a service that reads none must not fill our memory."""
    channel.submit(LARGE_REQUEST, timeout_s=0.05)
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


def test_deadline_holds_while_a_large_request_is_read_a_little_at_a_time(
    listening: socket.socket, channel: StreamChannel
) -> None:
    listening.setblocking(True)
    request = LMHeadRequest(hidden_states=from_torch(torch.zeros(32 * LARGE)))
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


# ------------------------------------------------------------------------------- wrong messages


def test_deadline_holds_while_a_large_reply_comes_a_little_at_a_time(
    listening: socket.socket, channel: StreamChannel
) -> None:
    listening.setblocking(True)
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
            with pytest.raises(DeadlineExceededError, match=r"no reply to Init within 0\.1 s"):
                channel.wait(request_id)
        finally:
            given_up.set()
            thread.join()
    assert not unnoticed.is_set()


@pytest.mark.usefixtures("little_memory")
@pytest.mark.parametrize(
    ("sent", "code", "said"),
    [
        (GARBAGE, ErrorCode.MALFORMED_MESSAGE, "got 1347703880 frames"),
        (struct.pack("<IQ", 1, 500 * 2**20), ErrorCode.LIMIT_EXCEEDED, "what fits into memory"),
    ],
)
def test_what_is_no_message_ends_the_connection(
    listening: socket.socket, channel: StreamChannel, sent: bytes, code: ErrorCode, said: str
) -> None:
    listening.setblocking(True)
    first, second = channel.submit(InitRequest()), channel.submit(InitRequest())
    with accepted(listening) as served:
        served.sendall(sent)
        with pytest.raises(
            ProtocolError, match=f"message from {channel.endpoint}: .*{said}"
        ) as info:
            channel.wait(first)
        assert info.value.code is code
        with pytest.raises(EndpointError, match="a lost connection while Init"):
            channel.wait(second)
    # It does not go on reading in the middle of something.
    channel.submit(InitRequest(), timeout_s=1.0)
    with accepted(listening) as again:
        assert again.recv(2**16) == request_bytes(channel._last_id)


@pytest.mark.usefixtures("small_buffers")
def test_garbage_while_a_request_waits_to_be_sent_ends_the_connection(
    listening: socket.socket, channel: StreamChannel
) -> None:
    listening.setblocking(True)
    channel.submit(LARGE_REQUEST)
    with accepted(listening) as served:
        served.sendall(GARBAGE)
        with pytest.raises(ProtocolError, match="got 1347703880 frames"):
            channel.submit(InitRequest())
    channel.submit(InitRequest(), timeout_s=1.0)
    with accepted(listening) as again:
        again.settimeout(10)
        # A whole message, from its beginning.
        assert again.recv(2**16) == request_bytes(channel._last_id)


# ----------------------------------------------------------------------------- lost connections


def test_a_reply_that_came_before_the_connection_was_lost_counts(
    endpoint: str, channel: StreamChannel
) -> None:
    first = StreamListener(endpoint)
    answered, lost = channel.submit(InitRequest()), channel.submit(InitRequest())
    assert first.wait(timeout_ms=10_000)
    incoming = first.receive()
    assert incoming is not None
    refusal = encode_reply(Form.FRAMED, answered, "Init", ErrorCode.INTERNAL)
    assert first.send(incoming.route, refusal)
    first.close()
    with pytest.raises(EndpointError, match="a lost connection while Init"):
        channel.wait(lost)
    with pytest.raises(ServiceError, match="error reply INTERNAL"):
        channel.wait(answered)


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
    with pytest.raises(EndpointError, match="a lost connection before Init could be sent"):
        channel.submit(InitRequest())
    assert channel._socket is None
    assert not second.wait(timeout_ms=0)
    second.close()


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
