"""A channel over a stream: messages cut anywhere, buffers, slow and wrong services.

What it has in common with the other transports is in `tests/contract/test_transports.py`.
"""

import os
import socket
import struct
import time
from pathlib import Path
from unittest.mock import Mock

import hypothesis
import hypothesis.strategies as st
import numpy
import pytest
import torch

from gpu_side.encoding import encode_reply, open_request
from gpu_side.transport.stream_listener import StreamListener
from protocol import liveness, stream, stream_wire
from protocol.errors import EndpointError, ErrorCode, ProtocolError, ServiceError
from protocol.liveness import PROBE, PROBE_AFTER_S, LivenessProbe
from protocol.messages import InitRequest, LMHeadRequest
from protocol.stream import StreamChannel
from protocol.stream_wire import (
    BUFFER_BYTES,
    COPY_BYTES,
    MemoryPool,
    MessageReader,
    MessageWriter,
    to_pieces,
)
from protocol.tensors import from_torch
from tests.kit.rows import each_row
from tests.kit.wire import LARGE, accepted, request_bytes, take


def _reader(connection: socket.socket, max_message_bytes: int = 2**30) -> MessageReader:
    return MessageReader(
        connection, MemoryPool(), where="peer", max_frames=8, max_message_bytes=max_message_bytes
    )


def _stream(*messages: list[bytes]) -> bytes:
    return b"".join(b"".join(to_pieces(frames)[0]) for frames in messages)


def _taken(reader: MessageReader) -> list[list[bytes]]:
    """Take the messages, whose frames lie where a processor likes to read them."""
    taken = [[bytes(frame) for frame in frames] for frames, _ in reader.messages]
    for frames, _ in reader.messages:
        total = stream_wire.layout(tuple(map(len, frames))).total
        for frame in filter(len, frames):
            address = numpy.frombuffer(frame, numpy.uint8).ctypes.data
            assert address % (64 if total >= COPY_BYTES else 16) == 0
    reader.messages.clear()
    return taken


SIZES = st.sampled_from([0, 1, 63, 64, 1000, COPY_BYTES, BUFFER_BYTES, BUFFER_BYTES + 1, 300_000])


# The second lies in one buffer with others, at no multiple of 64.
@hypothesis.example(messages=[[1], [COPY_BYTES], [13, 200_001]], cuts=[], seed=0)
@hypothesis.settings(max_examples=50)
@hypothesis.given(
    messages=st.lists(st.lists(SIZES, min_size=1, max_size=4), min_size=1, max_size=4),
    cuts=st.lists(st.integers(1, 200_000), max_size=30),
    seed=st.integers(0, 2**32 - 1),
)
def test_messages_are_found_wherever_the_stream_is_cut(
    messages: list[list[int]], cuts: list[int], seed: int
) -> None:
    data = numpy.random.default_rng(seed)
    sent = [[data.bytes(size) for size in sizes] for sizes in messages]
    left = memoryview(_stream(*sent))
    left_socket, right_socket = socket.socketpair()
    taken = []
    with left_socket, right_socket:
        reader = _reader(right_socket)
        slices = iter(cuts)
        while left:
            size = min(next(slices, 100_000), 100_000)
            left_socket.sendall(left[:size])
            left = left[size:]
            while True:
                try:
                    assert reader.read(socket.MSG_DONTWAIT)
                except BlockingIOError:
                    break
            taken += _taken(reader)
    assert taken == sent


@each_row(
    ("prefix", "code", "got"),
    [
        (struct.pack("<I", 0), ErrorCode.MALFORMED_MESSAGE, "0 frames"),
        (struct.pack("<I", 9), ErrorCode.MALFORMED_MESSAGE, "9 frames"),
        (b"GET / HTTP/1.1\r\n", ErrorCode.MALFORMED_MESSAGE, "542393671 frames"),
        (struct.pack("<IQ", 1, 1001), ErrorCode.LIMIT_EXCEEDED, "1001 bytes"),
        (struct.pack("<IQQ", 2, 500, 501), ErrorCode.LIMIT_EXCEEDED, "1001 bytes"),
        (struct.pack("<IQ", 1, 2**64 - 1), ErrorCode.LIMIT_EXCEEDED, f"{2**64 - 1} bytes"),
        (struct.pack("<IQQ", 2, 2**63, 2**63), ErrorCode.LIMIT_EXCEEDED, f"{2**64} bytes"),
    ],
)
def test_what_is_no_message_is_refused_before_memory_is_taken(
    monkeypatch: pytest.MonkeyPatch, prefix: bytes, code: ErrorCode, got: str
) -> None:
    left, right = socket.socketpair()
    with left, right:
        reader = _reader(right, max_message_bytes=1000)
        largest = [b"a" * 400, b"b" * 600]
        left.sendall(_stream(largest))
        reader.read()
        assert _taken(reader) == [largest]
        with monkeypatch.context() as patch:
            patch.setattr(MemoryPool, "take", None)
            left.sendall(prefix)
            with pytest.raises(
                ProtocolError, match=f"message from peer: got {got}, expected"
            ) as info:
                reader.read()
        assert info.value.code is code


@each_row("size", [COPY_BYTES, 2 * BUFFER_BYTES, 500 * 2**20])
def test_a_message_larger_than_the_memory_that_is_left_is_refused(
    monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    left, right = socket.socketpair()
    with left, right, monkeypatch.context() as patch:
        reader = _reader(right)
        patch.setattr(MemoryPool, "take", Mock(side_effect=MemoryError))
        left.sendall(struct.pack("<IQ", 1, size).ljust(64, b"\0") + bytes(min(size, COPY_BYTES)))
        with pytest.raises(ProtocolError, match=r"message from peer: got .* into memory") as info:
            reader.read()
        assert info.value.code is ErrorCode.LIMIT_EXCEEDED


@each_row("count", [1, 1200])
def test_what_the_kernel_does_not_take_waits_in_order(count: int) -> None:
    left, right = socket.socketpair()
    with left, right:
        writer = MessageWriter(left)
        sent = [[b"header", bytes([n]) * 200_000] for n in range(5)]
        sent.append([bytes([n % 256]) * 200 for n in range(count)])
        for frames in sent:
            writer.send(frames)
        # The kernel took some of it; all others are still whole messages behind it.
        assert 1 <= len(writer.unsent) <= 6
        expected = _stream(*sent, [b"abc", b"x" * 70])
        assert 0 < writer.unsent_bytes < len(expected)
        received = bytearray(right.recv(100_000))
        # It has room again, and a small message does not overtake those that wait.
        assert not writer.send([b"abc", b"x" * 70])
        while len(received) < len(expected):
            received += right.recv(50_000)
            done = writer.flush()
    assert done
    assert received == expected
    assert (len(writer.unsent), writer.unsent_bytes) == (0, 0)
    small = struct.pack("<IQQ", 2, 3, 70).ljust(64, b"\0") + b"abc".ljust(64, b"\0") + b"x" * 70
    assert received.endswith(small)


LARGE_REQUEST = LMHeadRequest(hidden_states=from_torch(torch.zeros(LARGE)))


def test_an_address_that_can_never_answer_is_told_at_once(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with (
        StreamChannel(f"unix://{tmp_path}/file/s", timeout_s=3600) as channel,
        pytest.raises(EndpointError, match="got Not a directory"),
    ):
        channel.submit(InitRequest())


@pytest.mark.usefixtures("small_buffers")
def test_a_full_send_queue_is_an_endpoint_error(listener: StreamListener, endpoint: str) -> None:
    request = LMHeadRequest(hidden_states=from_torch(torch.zeros(1000)))
    with StreamChannel(endpoint) as channel:
        with pytest.raises(EndpointError, match="got a full send queue") as info:  # noqa: PT012
            for _ in range(10_000):
                channel.submit(request, timeout_s=0.05)
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


def test_a_large_request_is_written_no_longer_than_it_may_take(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    until: list[float] = []
    monkeypatch.setattr(MessageWriter, "flush", lambda _, give_up: until.append(give_up))
    monkeypatch.setattr("protocol.stream_wire.time.monotonic", lambda: 1000.0)
    left, right = socket.socketpair()
    with left, right:
        for most_s in (0.001, 3600.0):
            MessageWriter(left).send([bytes(2**22)], most_s)
    assert until == [1000.001, 1000.0 + stream_wire.patience_s(2**22 + 64)]


def test_what_is_no_message_ends_the_connection(
    listening: socket.socket, channel: StreamChannel
) -> None:
    listening.setblocking(True)
    first, second = channel.submit(InitRequest()), channel.submit(InitRequest())
    with accepted(listening) as served:
        served.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        with pytest.raises(ProtocolError, match=f"{channel.endpoint}: got 1347703880 frames"):
            channel.wait(first)
        assert (channel._socket, channel._probe._socket.fileno()) == (None, -1)  # at once
        with pytest.raises(EndpointError, match="a lost connection while Init"):
            channel.wait(second)
    # It does not go on reading in the middle of something.
    channel.submit(InitRequest(), timeout_s=1.0)
    with accepted(listening) as again:
        assert again.recv(2**16) == request_bytes(channel._last_id)


def test_replies_that_came_before_the_connection_was_lost_count(
    endpoint: str, channel: StreamChannel
) -> None:
    """Also after another one was made."""
    first = StreamListener(endpoint)
    *answered, lost = (channel.submit(InitRequest()) for _ in range(3))
    incoming = take(first)
    for request_id in answered:
        refusal = encode_reply("framed", request_id, "Init", ErrorCode.INTERNAL)
        assert first.send(incoming.route, refusal)
    first.close()
    assert channel.arrived(answered[0], time.monotonic() + 10)
    second = StreamListener(endpoint)
    channel.submit(InitRequest())
    for request_id in answered:
        with pytest.raises(ServiceError, match="error reply INTERNAL"):
            channel.wait(request_id)
    with pytest.raises(EndpointError, match="a lost connection while Init"):
        channel.wait(lost)
    second.close()


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

    with monkeypatch.context() as patched:
        patched.setattr(channel._writer, "send", Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            channel.submit(InitRequest())
    assert channel._socket is None
    request_id = channel.submit(InitRequest())
    received = []
    while request_id not in received:
        assert listener.wait(timeout_ms=10_000)
        while (incoming := listener.receive()) is not None:
            received.append(open_request(incoming.frames, 1000).request_id)


MEBIBYTE = 2**20


def test_what_is_kept_is_bounded_and_what_was_not_used_for_longest_goes_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pool = MemoryPool()
    small = [pool.take(1000) for _ in range(stream_wire.KEPT_BLOCKS + 3)]
    del small
    assert pool.trim() == stream_wire.KEPT_BLOCKS * 65_536
    monkeypatch.setattr(stream_wire, "KEPT_BYTES", 4 * MEBIBYTE)
    pool = MemoryPool()
    old, large = pool.take(MEBIBYTE), pool.take(4 * MEBIBYTE)
    del old
    assert pool.trim() == MEBIBYTE
    del large
    assert pool.trim() == 4 * MEBIBYTE
    # A large block is not taken for little.
    little = pool.take(MEBIBYTE // 2)
    assert pool.trim() == 4 * MEBIBYTE
    fitting = pool.take(4 * MEBIBYTE - 5)
    assert pool.trim() == 0
    del little, fitting


def _waits(probe: LivenessProbe, waited_s: float) -> int:
    """Return how often a probe says that the service lives, of waits in vain for so long."""
    count = 0
    while probe.is_alive(waited_s):
        count += 1
        assert count < 100, "for ever"
    return count


@each_row("answer_to", [0, 1])
def test_a_service_that_stops_just_after_an_answer_is_noticed_in_time(answer_to: int) -> None:
    """Within the promised two seconds; of waits, by the channel's slices. It answers no others."""
    ours, theirs = socket.socketpair()
    with theirs:
        probe = LivenessProbe(ours)
        if answer_to:
            theirs.send(theirs.recv(10))
        else:
            theirs.send(PROBE)  # to one that was never asked
            assert probe.is_alive(PROBE_AFTER_S)
        waited_s = PROBE_AFTER_S * (1 + _waits(probe, PROBE_AFTER_S))
        assert 3 * PROBE_AFTER_S <= waited_s <= 2.0 - 0.7
        probe.close()


def test_it_asks_again_after_a_wait_where_it_was_answered_and_not_before() -> None:
    ours, service = socket.socketpair()
    probe = LivenessProbe(ours)
    service.setblocking(False)
    with service:
        for _ in range(5):
            # One question at a time, however long it waits.
            assert service.recv(10) == PROBE
            assert probe.is_alive(PROBE_AFTER_S)
            with pytest.raises(BlockingIOError):
                service.recv(10)
            service.send(PROBE)
            assert probe.is_alive(PROBE_AFTER_S)
        service.send(service.recv(10))
        assert probe.is_alive(PROBE_AFTER_S / 2)
        with pytest.raises(BlockingIOError):
            service.recv(10)
        # A client that was stopped itself finds the answer when it goes on.
        assert probe.is_alive(100 * PROBE_AFTER_S)
        assert service.recv(10) == PROBE
        assert _waits(probe, PROBE_AFTER_S) == 2
        probe.close()


def test_a_closed_connection_is_no_sign_of_life() -> None:
    ours, theirs = socket.socketpair()
    probe = LivenessProbe(ours)
    with theirs:
        theirs.send(theirs.recv(10))
        assert probe.is_alive(0.01)
    # At once, whenever the next question were due.
    assert not probe.is_alive(0.01)
    probe.close()
    ours, theirs = socket.socketpair()
    theirs.close()
    with ours, pytest.raises(BrokenPipeError):
        LivenessProbe(ours)


QUICK_S = 0.03


@pytest.fixture
def quick_probes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give a silent service up ten times as soon."""
    for module in (liveness, stream):
        monkeypatch.setattr(module, "PROBE_AFTER_S", QUICK_S)
    monkeypatch.setattr(liveness, "_ANSWER_WITHIN_S", 3 * QUICK_S)


@pytest.mark.usefixtures("quick_probes")
def test_a_service_that_never_lets_in_is_noticed_and_leaves_nothing(
    listening: socket.socket, endpoint: str
) -> None:
    with StreamChannel(endpoint, timeout_s=3600) as channel:
        files = sorted(os.listdir("/proc/self/fd"))
        ids = [channel.submit(InitRequest()) for _ in range(2)]
        for request_id in ids:
            with pytest.raises(EndpointError, match="a lost connection while Init") as info:
                channel.wait(request_id)
            assert info.value.retryable
        assert sorted(os.listdir("/proc/self/fd")) == files


@pytest.mark.usefixtures("quick_probes", "small_buffers", "listening")
@pytest.mark.parametrize("waiting", [True, False])
def test_a_service_that_stops_while_a_request_is_sent_is_noticed(
    endpoint: str, monkeypatch: pytest.MonkeyPatch, waiting: bool
) -> None:
    with StreamChannel(endpoint, timeout_s=3600) as channel:
        request_id = channel.submit(LARGE_REQUEST)
        if not waiting:
            # More than it queues: it waits for room on this connection, and on others after it.
            monkeypatch.setattr(stream, "QUEUED_REQUESTS", 1)
            monkeypatch.setattr(stream, "RECONNECT_S", 3600.0)
            channel._was_connected = True
            channel.submit(LARGE_REQUEST)
        with pytest.raises(EndpointError, match="a lost connection while LMHead"):
            channel.wait(request_id)
