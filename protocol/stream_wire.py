"""Messages on a stream of bytes, where ZeroMQ does not say where one ends, and their memory.

    u32 number of frames | u64 size of each frame | the frames

Integers are little-endian, and every frame begins at a multiple of 64 bytes from the beginning of
its message, with zeros in between. The last frame is not padded, so a message may begin anywhere in
the stream; `MessageReader` puts it where its frames lie at multiples of 64 bytes in memory too (16
in a small message), as a processor likes to read a tensor. It checks the number of frames, their
sizes and their sum before it takes memory for them.

Writing never blocks in the kernel: a call that does begins its time-out anew with every byte that a
slow peer takes. It polls instead, until a time that does not move.
"""

import select
import socket
import struct
import time
import weakref
from collections import deque
from collections.abc import Sequence
from functools import lru_cache
from itertools import chain, islice
from math import ceil
from typing import Any, NamedTuple

import numpy

from protocol.errors import ErrorCode, ProtocolError
from protocol.tensors import Buffer

# Asked of the kernel, which gives what net.core.wmem_max allows: what fits is on its way at once,
# also while the service computes and does not read.
SOCKET_BUFFER_BYTES = 4 * 1024 * 1024
ALIGNMENT = 64
# Up to this size a message is sent as one piece: that takes less time than a list of pieces.
JOIN_BYTES = 16 * 1024
# What is received at once; it must hold the longest prefix that a reader accepts.
BUFFER_BYTES = 128 * 1024
# A message smaller than this is copied out of the receive buffer, which is then used again; a
# larger one keeps the buffer.
COPY_BYTES = 32 * 1024
# After a message too large for the buffer another is likely: its head is read alone, so that
# little of it has to be copied.
HEAD_BYTES = 4 * 1024
# Of a large message at most this much is received at once: while a fast peer goes on sending, the
# kernel goes on receiving.
TURN_BYTES = 4 * 1024 * 1024
# The kernel takes 1024 pieces at most in one call (IOV_MAX).
MAX_PIECES = 1000
# How long a peer that reads may keep the writer of a message from going on: so long, and as long as
# its bytes take at a pace that any reader reaches which does nothing else.
_PATIENCE_S = 0.002
_READING_BYTES_PER_S = 0.5e9

_COUNT = struct.Struct("<I")
# Longer messages' layouts are not remembered: a peer could make them hold much.
_REMEMBERED_FRAMES = 8
_ZEROS = bytes(ALIGNMENT)

# What lies in a pool unused, at most.
KEPT_BYTES = 64 * 1024 * 1024
KEPT_BLOCKS = 16
_GRAIN_BYTES = 64 * 1024
# A block may be this many times larger than what it is taken for.
_MAX_WASTE = 4


def prepare(connection: socket.socket) -> None:
    """Set a connected socket up as both ends want it."""
    connection.settimeout(None)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BUFFER_BYTES)


class Layout(NamedTuple):
    """Where frames of given sizes lie in a message.

    `places`: the slice of each. `gaps`: what comes before each: the prefix and its padding before
    the first, zeros before the others. `total`: size of the message.
    """

    places: tuple[slice, ...]
    gaps: tuple[bytes, ...]
    total: int


def _lay_out(sizes: tuple[int, ...]) -> Layout:
    prefix = struct.Struct(f"<I{len(sizes)}Q")
    position = prefix.size
    places, gaps = [], []
    for size in sizes:
        gap = -position % ALIGNMENT
        start = position + gap
        position = start + size
        places.append(slice(start, position))
        gaps.append(_ZEROS[:gap])
    gaps[0] = prefix.pack(len(sizes), *sizes) + gaps[0]
    return Layout(tuple(places), tuple(gaps), position)


_remembered_layout = lru_cache(maxsize=256)(_lay_out)


def layout(sizes: tuple[int, ...]) -> Layout:
    """Say how a message with frames of these sizes (at least one frame) is laid out."""
    return (_remembered_layout if len(sizes) <= _REMEMBERED_FRAMES else _lay_out)(sizes)


def longest_bytes(max_frames: int, max_message_bytes: int) -> int:
    """Say how many bytes a message of so many frames, and bytes in them, takes at most."""
    return _COUNT.size + max_frames * (8 + ALIGNMENT) + max_message_bytes


def to_pieces(frames: Sequence[Buffer]) -> tuple[list[Buffer], int]:
    """Turn frames into what is written one after another, and say how many bytes that is.

    Small messages are copied into one piece; the frames of others are referenced.
    """
    # Remembered, however many: they are our own.
    _, gaps, total = _remembered_layout(tuple(map(len, frames)))
    pieces = list(chain.from_iterable(zip(gaps, frames, strict=True)))
    return ([b"".join(pieces)] if total <= JOIN_BYTES else pieces), total


def patience_s(size: int) -> float:
    """Say how long to wait for a peer that has `size` bytes to read, in seconds."""
    return _PATIENCE_S + size / _READING_BYTES_PER_S


def _read(head: bytes) -> tuple[tuple[slice, ...], int, int] | None:
    """Return where the frames of a message lie, by its first bytes, its size, and that of frames.

    None where these bytes say of no frame, or not of all.
    """
    count = int.from_bytes(head[: _COUNT.size], "little")
    if not 0 < 8 * count <= len(head) - _COUNT.size:
        return None
    sizes = struct.unpack_from(f"<{count}Q", head, _COUNT.size)
    places, _, total = layout(sizes)
    return places, total, sum(sizes)


_remembered_prefix = lru_cache(maxsize=256)(_read)


def frames_in(
    message: memoryview, where: str, *, max_frames: int, max_message_bytes: int
) -> list[memoryview]:
    """Return the frames of one whole message, as views of it; its first bytes are read once.

    Raises ProtocolError for what is no message.
    """
    # The second reading replaces the first: the peer may have changed the bytes meanwhile.
    longest = _COUNT.size + 8 * max_frames
    found = _remembered_prefix(bytes(message[:ALIGNMENT])) or _read(bytes(message[:longest]))
    places, total, size = found or ((), 0, 0)
    if size > max_message_bytes:
        ProtocolError.at_most(max_message_bytes, f"message from {where}", size)
    if not 1 <= len(places) <= max_frames or total != len(message):
        got = f"{int.from_bytes(message[: _COUNT.size], 'little')} frames in {len(message)} bytes"
        raise ProtocolError(
            f"message from {where}", got, f"1 to {max_frames} frames, and no byte behind them"
        )
    return list(map(message.__getitem__, places))


class MessageWriter:
    """The sending half of a connection: what the kernel does not take at once waits here."""

    def __init__(self, connection: socket.socket) -> None:
        self._sendmsg = connection.sendmsg
        self._poll = select.poll()
        self._poll.register(connection, select.POLLOUT)
        # Of each message that has not been written whole, the pieces that are left.
        self.unsent: deque[deque[memoryview]] = deque()
        self.unsent_bytes = 0

    def send(self, frames: Sequence[Buffer], most_s: float = 0.0) -> bool:
        """Send a message behind those that wait; True if all of it is written.

        Takes as long as a peer that reads needs for it, and `most_s` at most, however slowly this
        one reads. Raises OSError where the connection is lost.
        """
        pieces, total = to_pieces(frames)
        written = 0
        if not self.unsent:
            try:
                written = self._sendmsg(pieces[:MAX_PIECES], (), socket.MSG_DONTWAIT)
            except BlockingIOError:
                written = 0
            if written == total:
                return True
        self.keep_rest(pieces, total, written)
        limit_s = min(most_s, patience_s(total))
        return limit_s > 0 and self.flush(time.monotonic() + limit_s)

    def keep_rest(self, pieces: Sequence[Buffer], total: int, written: int) -> None:
        """Let a message of `total` bytes, of which so many are written, wait."""
        self.unsent.append(deque(memoryview(piece) for piece in pieces))
        self.unsent_bytes += total
        self._note_written(written)

    def flush(self, give_up: float = 0.0) -> bool:
        """Write what waits, until `give_up` (time.monotonic; 0: only what is taken at once).

        True if nothing is left. Raises OSError as `send` does.
        """
        while self.unsent:
            try:
                pieces = list(islice(self.unsent[0], MAX_PIECES))
                written = self._sendmsg(pieces, (), socket.MSG_DONTWAIT)
            except BlockingIOError:
                written = 0
            self._note_written(written)
            # Also after a part: a peer that takes a little again and again is waited for as long.
            if self.unsent and not (self._wait(give_up) if give_up else written):
                return False
        return True

    def _wait(self, give_up: float) -> bool:
        """Wait until the peer has read something; False if the time has come."""
        left_s = give_up - time.monotonic()
        return left_s > 0 and bool(self._poll.poll(ceil(left_s * 1000)))

    def _note_written(self, written: int) -> None:
        """Forget so many bytes of the first message."""
        self.unsent_bytes -= written
        pieces = self.unsent[0]
        while pieces and len(pieces[0]) <= written:
            written -= len(pieces.popleft())
        if pieces:
            pieces[0] = pieces[0][written:]
        else:
            self.unsent.popleft()


class MemoryPool:
    """Hands out writable memory that comes back by itself, when its last view is gone.

    Fresh memory of a megabyte costs more than to receive a megabyte: the kernel hands it out page
    by page and fills it with zeros. `malloc` gives it back to the kernel and asks for it again
    whenever two messages are alive at a time.

    What that costs: a message holds a whole block, of up to four times its size, as long as a byte
    of it is viewed. And an unused block is not cleared: what the last messages held, masked
    activations and the results that came back for them, stays in memory until it is overwritten or
    the pool goes, up to `KEPT_BYTES` of it.
    """

    def __init__(self) -> None:
        # What was not used for longest comes first.
        self._free: list[Any] = []

    def take(self, size: int) -> memoryview:
        """Return `size` bytes (at least one) with anything in them, at a multiple of 64.

        They stay valid as long as a view of them lives: a memoryview, or a tensor made of one.
        Raises MemoryError.
        """
        block = self._find(size)
        # An object of its own: every view of the memory that goes out refers to it, and only those.
        loan = block[:size]
        # The last view may go on another thread than the one that takes.
        weakref.finalize(loan, self._free.append, block).atexit = False
        return memoryview(loan)

    def trim(self) -> int:
        """Forget what is beyond the limits, and say how many bytes lie here unused."""
        kept: int = sum(block.nbytes for block in self._free)
        while len(self._free) > KEPT_BLOCKS or kept > KEPT_BYTES:
            kept -= self._free.pop(0).nbytes
        return kept

    def _find(self, size: int) -> Any:
        self.trim()
        for index in range(len(self._free) - 1, -1, -1):
            if size <= self._free[index].nbytes <= _MAX_WASTE * max(size, _GRAIN_BYTES):
                return self._free.pop(index)
        whole = size + -size % _GRAIN_BYTES
        # numpy's own memory begins at a multiple of 16.
        memory = numpy.empty(whole + ALIGNMENT, numpy.uint8)
        start = -memory.ctypes.data % ALIGNMENT
        return memory[start : start + whole]


class MessageReader:
    """The receiving half of a connection: takes bytes as they come and finds the messages.

    `messages` holds those that are complete, each with the time of its last byte (perf_counter_ns).
    Their memory is writable, belongs to them alone, and lives as long as it is viewed.

    `asks_first`: take no memory for a message too large for the receive buffer. `wants_room` says
    how many bytes its frames have, and nothing may be read until `begin_large`. `skips_empty`: a
    message of no frames is nothing, as beside shared memory it only wakes us up.
    """

    def __init__(
        self,
        connection: socket.socket,
        pool: MemoryPool,
        *,
        where: str,
        max_frames: int,
        max_message_bytes: int,
        asks_first: bool = False,
        skips_empty: bool = False,
    ) -> None:
        self.messages: deque[tuple[list[memoryview], int]] = deque()
        self._recv_into = connection.recv_into
        self._pool = pool
        self._where = where
        self._max_frames = max_frames
        self._max_message_bytes = max_message_bytes
        self._asks_first, self._skips_empty = asks_first, skips_empty
        self.wants_room = 0
        self._buffer = self._pool.take(BUFFER_BYTES)
        self._expected = 0
        # The memory of a message too large for the buffer, whose rest is still to come.
        self.large: memoryview | None = None
        # How much has come of a message that is not complete; 0 between messages.
        self.unfinished_bytes = 0
        self._places: tuple[slice, ...] = ()

    def read(self, flags: int = 0) -> bool:
        """Receive once; False where the peer has closed the connection.

        Raises BlockingIOError (nothing came in the socket's time-out, or at all), another OSError
        where the connection is lost, and ProtocolError for what is no message, too large, or larger
        than the memory that is left; after that, where the next message begins is unknown, and the
        connection of no use.
        """
        large = self.large
        try:
            if large is not None:
                turn = large[self.unfinished_bytes : self.unfinished_bytes + TURN_BYTES]
                received = self._recv_into(turn, 0, flags)
                self.unfinished_bytes += received
                if self.unfinished_bytes == len(large):
                    self.large, self.unfinished_bytes = None, 0
                    frames = list(map(large.__getitem__, self._places))
                    self.messages.append((frames, time.perf_counter_ns()))
            else:
                come = self.unfinished_bytes
                limit = BUFFER_BYTES if self._expected <= BUFFER_BYTES else come + HEAD_BYTES
                received = self._recv_into(self._buffer[come:limit], 0, flags)
                self.unfinished_bytes += received
                self._take_messages()
        except MemoryError:
            raise self._too_large_for_memory() from None
        return received > 0

    def take_in(self, received: memoryview) -> None:
        """Go on from what was received elsewhere, between two messages and no more than a buffer.

        Raises ProtocolError as `read`.
        """
        self._buffer[: len(received)] = received
        self.unfinished_bytes = len(received)
        self._take_messages()

    def begin_large(self) -> None:
        """Take memory for the large message whose head has come. Raises ProtocolError as `read`."""
        try:
            self.large = self._pool.take(self._expected)
        except MemoryError:
            raise self._too_large_for_memory() from None
        self.wants_room = 0
        self.large[: self.unfinished_bytes] = self._buffer[: self.unfinished_bytes]

    def _take_messages(self) -> None:
        """Take every whole message out of the buffer, and move what is left to its beginning."""
        start = 0
        while (available := self.unfinished_bytes - start) >= _COUNT.size:
            (count,) = _COUNT.unpack_from(self._buffer, start)
            if not count and self._skips_empty:
                # All of them at once: a peer could send as many as it likes.
                rest = bytes(self._buffer[start : self.unfinished_bytes])
                start += (available - len(rest.lstrip(b"\0"))) // _COUNT.size * _COUNT.size
                continue
            if not 1 <= count <= self._max_frames:
                raise self._refused(f"{count} frames", f"1 to {self._max_frames}")
            stop = min(start + _COUNT.size + 8 * count, self.unfinished_bytes)
            read = _remembered_prefix if count <= _REMEMBERED_FRAMES else _read
            if (found := read(bytes(self._buffer[start:stop]))) is None:
                break
            self._places, self._expected, size = found
            if size > self._max_message_bytes:
                most = f"at most {self._max_message_bytes}"
                raise self._refused(f"{size} bytes", most, ErrorCode.LIMIT_EXCEEDED)
            if available < self._expected:
                self.wants_room = size if self._expected > BUFFER_BYTES else 0
                break
            stop = start + self._expected
            if self._expected < COPY_BYTES:
                memory, start = memoryview(bytearray(self._buffer[start:stop])), stop
            elif start % ALIGNMENT:
                memory = self._pool.take(stop - start)
                memory[:] = self._buffer[start:stop]
                start = stop
            else:
                # It keeps the buffer, and what follows begins another one.
                whole, self._buffer = self._buffer, self._pool.take(BUFFER_BYTES)
                left = self.unfinished_bytes - stop
                self._buffer[:left] = whole[stop : self.unfinished_bytes]
                self.unfinished_bytes = left
                memory, start = whole[start:stop], 0
            frames = list(map(memory.__getitem__, self._places))
            self.messages.append((frames, time.perf_counter_ns()))
        if start:
            left = self.unfinished_bytes - start
            self._buffer[:left] = bytes(self._buffer[start : self.unfinished_bytes])
            self.unfinished_bytes = left
        if self.wants_room and not self._asks_first:
            self.begin_large()

    def _too_large_for_memory(self) -> ProtocolError:
        return self._refused(
            f"{self._expected} bytes", "what fits into memory", ErrorCode.LIMIT_EXCEEDED
        )

    def _refused(
        self, got: str, expected: str, code: ErrorCode = ErrorCode.MALFORMED_MESSAGE
    ) -> ProtocolError:
        return ProtocolError(f"message from {self._where}", got, expected, code=code)
