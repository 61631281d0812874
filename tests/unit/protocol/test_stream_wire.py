"""Tests of messages on a stream of bytes: laid out, cut anywhere, refused before they cost."""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Callable, Iterator

import hypothesis
import hypothesis.strategies as st
import numpy
import pytest

from protocol import stream_wire
from protocol.errors import ErrorCode, ProtocolError
from protocol.memory_pool import MemoryPool
from protocol.stream_wire import (
    BUFFER_BYTES,
    COPY_BYTES,
    JOIN_BYTES,
    MessageReader,
    MessageWriter,
    layout,
    to_pieces,
)

Pair = tuple[socket.socket, socket.socket]


@pytest.fixture
def pair() -> Iterator[Pair]:
    left, right = socket.socketpair()
    right.settimeout(10)
    with left, right:
        yield left, right


def _reader(connection: socket.socket, max_message_bytes: int = 2**30) -> MessageReader:
    return MessageReader(
        connection, MemoryPool(), where="peer", max_frames=8, max_message_bytes=max_message_bytes
    )


def _stream(*messages: list[bytes]) -> bytes:
    return b"".join(b"".join(to_pieces(frames)[0]) for frames in messages)


def _taken(reader: MessageReader) -> list[list[bytes]]:
    taken = [[bytes(frame) for frame in frames] for frames, _ in reader.messages]
    reader.messages.clear()
    return taken


def test_bytes_of_a_message() -> None:
    expected = struct.pack("<IQQ", 2, 3, 70).ljust(64, b"\0") + b"abc".ljust(64, b"\0") + b"x" * 70
    assert _stream([b"abc", b"x" * 70]) == expected


def test_every_frame_begins_at_a_multiple_of_64() -> None:
    for sizes in [(0,), (1,), (64,), (0, 0), (44, 44, 1), (63, 64, 65), tuple(range(12))]:
        places, gaps, total = layout(sizes)
        assert [place.stop - place.start for place in places] == list(sizes)
        assert all(place.start % 64 == 0 for place in places)
        assert places[-1].stop == total == sum(sizes) + sum(map(len, gaps))
        assert struct.unpack_from(f"<I{len(sizes)}Q", gaps[0]) == (len(sizes), *sizes)


def test_large_frames_are_not_copied() -> None:
    tensor = memoryview(numpy.zeros(JOIN_BYTES, numpy.uint8))  # type: ignore[arg-type]
    pieces, total = to_pieces([b"header", tensor])
    assert any(piece is tensor for piece in pieces)
    assert total == 128 + JOIN_BYTES


SIZES = st.sampled_from([0, 1, 63, 64, 1000, COPY_BYTES, BUFFER_BYTES, BUFFER_BYTES + 1, 300_000])


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


@pytest.mark.parametrize("size", [10, COPY_BYTES, BUFFER_BYTES * 2])
def test_memory_of_a_message_is_its_own(pair: Pair, size: int) -> None:
    left, right = pair
    reader, messages = _reader(right), []
    for value in range(3):
        writer = MessageWriter(left)
        writer.send([b"h", bytes([value]) * size])
        while not reader.messages:
            reader.read()
            writer.flush()
        messages.append(reader.messages.popleft()[0][1])
        messages[-1][0] = 100 + value  # writable
    for value, frame in enumerate(messages):
        assert bytes(frame) == bytes([100 + value]) + bytes([value]) * (size - 1)


# Each leaves the next one at another place in the stream, and some of the same buffer.
@pytest.mark.parametrize("first", [0, 1, 13, 63, 64, COPY_BYTES - 1, COPY_BYTES + 1])
def test_frames_lie_where_a_processor_likes_to_read_them(pair: Pair, first: int) -> None:
    left, right = pair
    reader = _reader(right)
    sent = [[bytes(size), bytes([7]) * size] for size in (first, COPY_BYTES + 9, 200_001, 11)]
    sent[1:1] = [[b"a", b"bc"]]
    thread = threading.Thread(target=lambda: left.sendall(_stream(*sent)))
    thread.start()
    while len(reader.messages) < len(sent):
        reader.read()
    thread.join()
    for (frames, _), expected in zip(reader.messages, sent, strict=True):
        total = layout(tuple(map(len, expected))).total
        for frame in frames:
            if frame.nbytes:
                address = numpy.frombuffer(frame, numpy.uint8).ctypes.data
                assert address % (64 if total >= COPY_BYTES else 16) == 0
    assert _taken(reader) == sent


def test_end_of_the_stream_is_told(pair: Pair) -> None:
    left, right = pair
    reader = _reader(right)
    left.sendall(_stream([b"a"])[:-1])
    assert reader.read()
    left.close()
    assert not reader.read()
    assert not reader.messages


def test_end_of_the_stream_in_a_large_message_is_told(pair: Pair) -> None:
    left, right = pair
    reader = _reader(right)
    left.sendall(_stream([bytes(BUFFER_BYTES * 2)])[:1000])
    assert reader.read()
    assert reader.large is not None
    left.close()
    assert not reader.read()
    assert not reader.messages


@pytest.mark.parametrize(
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
    pair: Pair, monkeypatch: pytest.MonkeyPatch, prefix: bytes, code: ErrorCode, got: str
) -> None:
    left, right = pair
    reader = _reader(right, max_message_bytes=1000)
    monkeypatch.setattr(MemoryPool, "take", None)
    left.sendall(prefix)
    with pytest.raises(ProtocolError, match=f"message from peer: got {got}, expected") as info:
        reader.read()
    assert info.value.code is code


@pytest.mark.parametrize("size", [COPY_BYTES, 2 * BUFFER_BYTES, 500 * 2**20])
def test_a_message_larger_than_the_memory_that_is_left_is_refused(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    def exhausted(*_: object) -> None:
        raise MemoryError

    left, right = pair
    reader = _reader(right)
    monkeypatch.setattr(MemoryPool, "take", exhausted)
    left.sendall(struct.pack("<IQ", 1, size).ljust(64, b"\0") + bytes(min(size, COPY_BYTES)))
    with pytest.raises(ProtocolError, match=r"message from peer: got .* into memory") as info:
        reader.read()
    assert info.value.code is ErrorCode.LIMIT_EXCEEDED


STEP_S = 2.0**-10  # exact in sums


class SlowPeer:
    """Stands in for both the clock and `poll`: each wait takes a moment, then a little comes.

    Or goes: `step` is what the peer does in that moment.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, step: Callable[[], object]) -> None:
        self.now = 1000.0
        self.waits = 0
        self._step = step
        monkeypatch.setattr(stream_wire, "time", self)

    def monotonic(self) -> float:
        return self.now

    def perf_counter_ns(self) -> int:
        return int(self.now * 1e9)

    def poll(self, timeout_ms: float) -> list[int]:
        self.waits += 1
        assert timeout_ms >= 1
        self.now += STEP_S
        self._step()
        return [1]


@pytest.mark.parametrize("first", [False, True])
def test_a_peer_that_reads_a_little_at_a_time_is_waited_for_as_long_as_was_said(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, first: bool
) -> None:
    left, right = pair
    writer = MessageWriter(left)
    slow = SlowPeer(monkeypatch, lambda: right.recv(36_000))
    writer._poll = slow  # type: ignore[assignment]
    if first:
        assert not writer.send([b"h", bytes(40 * 2**20)], 5 * STEP_S)
    else:
        assert not writer.send([b"h", bytes(40 * 2**20)])
        assert not writer.flush(slow.now + 5 * STEP_S)
    assert slow.waits == 5
    assert 0 < writer.unsent_bytes < 40 * 2**20
    # And not at all, where nobody said so.
    assert not writer.flush()
    assert slow.waits == 5


def test_the_largest_message_that_is_allowed_is_taken(pair: Pair) -> None:
    left, right = pair
    reader = _reader(right, max_message_bytes=1000)
    left.sendall(_stream([b"a" * 400, b"b" * 600]))
    reader.read()
    assert _taken(reader) == [[b"a" * 400, b"b" * 600]]


@pytest.mark.parametrize("count", [1, 1200])
def test_writer_keeps_what_the_kernel_does_not_take(pair: Pair, count: int) -> None:
    left, right = pair
    writer = MessageWriter(left)
    sent = [[b"header", bytes([n]) * 200_000] for n in range(5)]
    sent.append([bytes([n % 256]) * 200 for n in range(count)])
    for frames in sent:
        writer.send(frames)
    # The kernel took some of it; all others are still whole messages behind it.
    assert 1 <= len(writer.unsent) <= 6
    received = bytearray()
    expected = _stream(*sent)
    assert 0 < writer.unsent_bytes < len(expected)
    while len(received) < len(expected):
        received += right.recv(50_000)
        done = writer.flush()
    assert done
    assert received == expected
    assert (len(writer.unsent), writer.unsent_bytes) == (0, 0)
    assert writer.send([b"small"])


def test_writer_does_not_overtake_what_waits(pair: Pair) -> None:
    left, right = pair
    writer = MessageWriter(left)
    assert not writer.send([b"header", bytes(2_000_000)])
    assert not writer.send([b"next"])
    assert len(writer.unsent) == 2
    reader = _reader(right)
    while len(reader.messages) < 2:
        reader.read()
        writer.flush()
    assert [len(frames[0]) for frames, _ in reader.messages] == [6, 4]


def test_writer_tells_a_lost_connection(pair: Pair) -> None:
    left, right = pair
    right.close()
    with pytest.raises(BrokenPipeError):
        MessageWriter(left).send([b"x"])


def test_remembered_layouts_are_bounded() -> None:
    remembered = stream_wire._remembered_layout
    for size in range(1000):
        layout((size, size + 1))
        layout(tuple(range(size, size + 20)))
    information = remembered.cache_info()
    assert information.maxsize is not None
    assert information.currsize <= information.maxsize
