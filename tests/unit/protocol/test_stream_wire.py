"""Messages on a stream of bytes: laid out, cut anywhere, refused before they cost."""

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
from tests.kit.rows import each_row

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


# --------------------------------------------------------------------------------- how it is laid


def test_every_frame_begins_at_a_multiple_of_64_behind_the_sizes() -> None:
    expected = struct.pack("<IQQ", 2, 3, 70).ljust(64, b"\0") + b"abc".ljust(64, b"\0") + b"x" * 70
    assert _stream([b"abc", b"x" * 70]) == expected
    for sizes in [(0,), (1,), (64,), (0, 0), (44, 44, 1), (63, 64, 65), tuple(range(12))]:
        places, gaps, total = layout(sizes)
        assert [place.stop - place.start for place in places] == list(sizes)
        assert all(place.start % 64 == 0 for place in places)
        assert places[-1].stop == total == sum(sizes) + sum(map(len, gaps))
        assert struct.unpack_from(f"<I{len(sizes)}Q", gaps[0]) == (len(sizes), *sizes)
    tensor = memoryview(bytes(JOIN_BYTES))
    pieces, total = to_pieces([b"header", tensor])
    assert any(piece is tensor for piece in pieces)  # not copied
    assert total == 128 + JOIN_BYTES


def test_remembered_layouts_are_bounded() -> None:
    for size in range(1000):
        layout((size, size + 1))
        layout(tuple(range(size, size + 20)))
    information = stream_wire._remembered_layout.cache_info()
    assert information.maxsize is not None
    assert information.currsize <= information.maxsize


# ------------------------------------------------------------------------------------ how it comes

SIZES = st.sampled_from([0, 1, 63, 64, 1000, COPY_BYTES, BUFFER_BYTES, BUFFER_BYTES + 1, 300_000])


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


# Each leaves the next one at another place in the stream, and some of the same buffer.
@each_row("first", [0, 1, 13, 63, 64, COPY_BYTES - 1, COPY_BYTES + 1])
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
    def exhausted(*_: object) -> None:
        raise MemoryError

    left, right = socket.socketpair()
    with left, right, monkeypatch.context() as patch:
        reader = _reader(right)
        patch.setattr(MemoryPool, "take", exhausted)
        left.sendall(struct.pack("<IQ", 1, size).ljust(64, b"\0") + bytes(min(size, COPY_BYTES)))
        with pytest.raises(ProtocolError, match=r"message from peer: got .* into memory") as info:
            reader.read()
        assert info.value.code is ErrorCode.LIMIT_EXCEEDED


# --------------------------------------------------------------------------------- how it is sent

STEP_S = 2.0**-10  # exact in sums


class SlowPeer:
    """Stands in for both the clock and `poll`: `step` is what the peer does in a moment."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, step: Callable[[], object]) -> None:
        self.now = 1000.0
        self.waits = 0
        self._step = step
        monkeypatch.setattr(stream_wire, "time", self)

    def monotonic(self) -> float:
        return self.now

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


@each_row("count", [1, 1200])
def test_what_the_kernel_does_not_take_waits_in_order(pair: Pair, count: int) -> None:
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
    assert len(right.recv(200)) == 69


def test_a_small_message_does_not_overtake_one_that_waits(pair: Pair) -> None:
    left, right = pair
    writer = MessageWriter(left)
    assert not writer.send([b"header", bytes(2_000_000)])
    # The kernel has room again, and the first message still waits.
    received = right.recv(1000)
    assert not writer.send([b"next"])
    assert len(writer.unsent) == 2
    expected = _stream([b"header", bytes(2_000_000)], [b"next"])
    while len(received) < len(expected):
        received += right.recv(50_000)
        writer.flush()
    assert received == expected
