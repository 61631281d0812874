"""Messages on a stream of bytes, where ZeroMQ does not say where one ends.

    u32 number of frames | u64 size of each frame | the frames

Integers are little-endian, and every frame begins at a multiple of 64 bytes from the beginning of
its message, with zeros in between. The last frame is not padded, so a message may begin anywhere in
the stream; `MessageReader` puts it where its frames lie at multiples of 64 bytes in memory too (16
in a small message), as a processor likes to read a tensor. It checks the number of frames, their
sizes and their sum before it allocates anything.

Nothing here blocks in the kernel: a call that does begins its time-out anew with every byte that a
slow peer takes or gives. What has to wait polls, until a time that does not move.
"""

from __future__ import annotations

import select
import socket
import struct
import time
from collections import deque
from collections.abc import Sequence
from functools import lru_cache
from itertools import islice
from math import ceil
from typing import NamedTuple

from protocol.errors import ErrorCode, ProtocolError
from protocol.memory_pool import MemoryPool
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
_PREFIXES = tuple(struct.Struct(f"<I{n}Q") for n in range(9))
_ZEROS = bytes(ALIGNMENT)


def prepare(connection: socket.socket) -> None:
    """Set a connected socket up as both ends want it."""
    connection.settimeout(None)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BUFFER_BYTES)


class Layout(NamedTuple):
    """Where frames of given sizes lie in a message.

    `places`: begin and end of each. `gaps`: what comes before each: the prefix and its padding
    before the first, zeros before the others. `total`: size of the message.
    """

    places: tuple[tuple[int, int], ...]
    gaps: tuple[bytes, ...]
    total: int


def _prefix(count: int) -> struct.Struct:
    return _PREFIXES[count] if count < len(_PREFIXES) else struct.Struct(f"<I{count}Q")


def _lay_out(sizes: tuple[int, ...]) -> Layout:
    prefix = _prefix(len(sizes))
    position = prefix.size
    places, gaps = [], []
    for size in sizes:
        gap = -position % ALIGNMENT
        start = position + gap
        position = start + size
        places.append((start, position))
        gaps.append(_ZEROS[:gap])
    gaps[0] = prefix.pack(len(sizes), *sizes) + gaps[0]
    return Layout(tuple(places), tuple(gaps), position)


# Only for short tuples, so that a peer cannot make it hold much.
_remembered_layout = lru_cache(maxsize=256)(_lay_out)


def layout(sizes: tuple[int, ...]) -> Layout:
    """Say how a message with frames of these sizes (at least one frame) is laid out."""
    return (_remembered_layout if len(sizes) < len(_PREFIXES) else _lay_out)(sizes)


def to_pieces(frames: Sequence[Buffer]) -> tuple[list[Buffer], int]:
    """Turn frames into what is written one after another, and say how many bytes that is.

    Small messages are copied into one piece. Of others, frames from the second on are referenced.
    """
    sizes = tuple([f.nbytes if isinstance(f, memoryview) else len(f) for f in frames])
    _, gaps, total = layout(sizes)
    if len(frames) == 2:
        head = (gaps[0], frames[0], gaps[1])
        if total <= JOIN_BYTES:
            return [b"".join((*head, frames[1]))], total
        return [b"".join(head), frames[1]], total
    pieces: list[Buffer] = []
    for gap, frame in zip(gaps, frames, strict=True):
        if gap:
            pieces.append(gap)
        pieces.append(frame)
    return ([b"".join(pieces)] if total <= JOIN_BYTES else pieces), total


def patience_s(size: int) -> float:
    """Say how long to wait for a peer that has `size` bytes to read, in seconds."""
    return _PATIENCE_S + size / _READING_BYTES_PER_S


def _wait(poll: select.poll, give_up: float) -> bool:
    """Wait for a registered socket until `give_up` (monotonic); False if that time has come."""
    left_s = give_up - time.monotonic()
    return left_s > 0 and bool(poll.poll(ceil(left_s * 1000)))


class MessageWriter:
    """The sending half of a connection: what the kernel does not take at once waits here."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._poll = select.poll()
        self._poll.register(connection, select.POLLOUT)
        self._send = connection.send
        self._unsent: deque[memoryview] = deque()
        self._ends: deque[int] = deque()
        self._queued = 0
        self._written = 0
        # Messages of which some bytes have not been written.
        self.unsent_messages = 0

    @property
    def unsent_bytes(self) -> int:
        """Bytes that have not been written."""
        return self._queued - self._written

    def send(self, frames: Sequence[Buffer], patience_s: float = 0.0) -> bool:
        """Send a message behind those that wait; True if all of it is written.

        Takes `patience_s` at most, however slowly the peer reads. Raises OSError where the
        connection is lost.
        """
        pieces, total = to_pieces(frames)
        written = 0
        if not self.unsent_messages:
            try:
                if len(pieces) == 1:
                    written = self._send(pieces[0], socket.MSG_DONTWAIT)
                else:
                    written = self._socket.sendmsg(pieces[:MAX_PIECES], (), socket.MSG_DONTWAIT)
            except BlockingIOError:
                written = 0
            if written == total:
                return True
        self._keep(pieces, written, total)
        return patience_s > 0 and self.flush(time.monotonic() + patience_s)

    def flush(self, give_up: float = 0.0) -> bool:
        """Write what waits, until `give_up` (time.monotonic; 0: only what is taken at once).

        True if nothing is left. Raises OSError as `send` does.
        """
        while self._unsent:
            pieces = list(islice(self._unsent, MAX_PIECES))
            try:
                written = self._socket.sendmsg(pieces, (), socket.MSG_DONTWAIT)
            except BlockingIOError:
                written = 0
            self._note_written(written)
            # Also after a part: a peer that takes a little again and again is waited for as long.
            if self._unsent and not (_wait(self._poll, give_up) if give_up else written):
                return False
        return True

    def _note_written(self, written: int) -> None:
        self._written += written
        while self._ends and self._ends[0] <= self._written:
            self._ends.popleft()
            self.unsent_messages -= 1
        while written:
            piece = self._unsent.popleft()
            if piece.nbytes > written:
                self._unsent.appendleft(piece[written:])
                break
            written -= piece.nbytes

    def _keep(self, pieces: Sequence[Buffer], written: int, total: int) -> None:
        skip = written
        for piece in pieces:
            view = memoryview(piece).cast("B")
            if view.nbytes > skip:
                self._unsent.append(view[skip:])
            skip = max(0, skip - view.nbytes)
        self._queued += total
        self._written += written
        self._ends.append(self._queued)
        self.unsent_messages += 1


class MessageReader:
    """The receiving half of a connection: takes bytes as they come and finds the messages.

    `messages` holds those that are complete, each with the time of its last byte (perf_counter_ns).
    Their memory is writable, belongs to them alone, and lives as long as somebody views it.

    `asks_first`: take no memory for a message too large for the receive buffer. `wants_room` says
    how many bytes its frames have, and nothing may be read until `begin_large`.
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
    ) -> None:
        self.messages: deque[tuple[list[memoryview], int]] = deque()
        self._recv_into = connection.recv_into
        self._poll = select.poll()
        self._poll.register(connection, select.POLLIN)
        self._pool = pool
        self._where = where
        self._max_frames = max_frames
        self._max_message_bytes = max_message_bytes
        self._asks_first = asks_first
        self.wants_room = 0
        self._buffer = self._pool.take(BUFFER_BYTES)
        self._start = self._end = 0
        self._expected = 0
        # A message too large for the buffer: its memory, how much of it has come, where frames lie.
        self._large: memoryview | None = None
        self._filled = 0
        self._places: tuple[tuple[int, int], ...] = ()

    @property
    def in_large_message(self) -> bool:
        """Whether the rest of a message larger than the receive buffer is still to come."""
        return self._large is not None

    @property
    def unfinished_bytes(self) -> int:
        """How much has come of a message that is not complete, in bytes; 0 between messages."""
        return self._end if self._large is None else self._filled

    def read(self, flags: int = 0) -> bool:
        """Receive once; False where the peer has closed the connection.

        Raises BlockingIOError (nothing came in the socket's time-out, or at all), another OSError
        where the connection is lost, and ProtocolError for what is no message, too large, or larger
        than the memory that is left; after that, where the next message begins is unknown, and the
        connection of no use.
        """
        try:
            return self._read(flags)
        except MemoryError:
            raise self._too_large_for_memory() from None

    def begin_large(self) -> None:
        """Take memory for the large message whose head has come. Raises ProtocolError as `read`."""
        try:
            self._begin_large()
        except MemoryError:
            raise self._too_large_for_memory() from None

    def read_rest(self, give_up: float) -> bool:
        """Receive the rest of a large message, until `give_up` (time.monotonic).

        As `read`, but for BlockingIOError: `in_large_message` says whether it is all there.
        """
        while self.in_large_message:
            try:
                if not self.read(socket.MSG_DONTWAIT):
                    return False
            except BlockingIOError:
                if not _wait(self._poll, give_up):
                    return True
            else:
                if time.monotonic() >= give_up:
                    return True
        return True

    def _read(self, flags: int) -> bool:
        if self._large is not None:
            return self._read_large(self._large, flags)
        if self._end or self._expected > BUFFER_BYTES:
            limit = BUFFER_BYTES if self._expected <= BUFFER_BYTES else self._end + HEAD_BYTES
            received = self._recv_into(self._buffer[self._end : limit], 0, flags)
        else:
            received = self._recv_into(self._buffer, 0, flags)
            if _PREFIXES[2].size <= received < COPY_BYTES and self._take_only_message(received):
                return True
        self._end += received
        self._take_messages()
        return received > 0

    def _take_only_message(self, received: int) -> bool:
        """Take what nearly always comes: one whole small message of two frames.

        The same as `_take_messages` does with it, in a third of the time.
        """
        count, first, second = _PREFIXES[2].unpack_from(self._buffer)
        if count != 2 or first + second > self._max_message_bytes:
            return False
        places, _, total = _remembered_layout((first, second))
        if total != received:
            return False
        memory = memoryview(bytearray(self._buffer[:total]))
        frames = [memory[begin:end] for begin, end in places]
        self.messages.append((frames, time.perf_counter_ns()))
        return True

    def _read_large(self, large: memoryview, flags: int) -> bool:
        received = self._recv_into(large[self._filled : self._filled + TURN_BYTES], 0, flags)
        self._filled += received
        if self._filled == large.nbytes:
            frames = [large[start:stop] for start, stop in self._places]
            self.messages.append((frames, time.perf_counter_ns()))
            self._large = None
        return received > 0

    def _take_messages(self) -> None:
        while (available := self._end - self._start) >= _COUNT.size:
            (count,) = _COUNT.unpack_from(self._buffer, self._start)
            if not 1 <= count <= self._max_frames:
                raise self._refused(f"{count} frames", f"1 to {self._max_frames}")
            prefix = _prefix(count)
            if available < prefix.size:
                break
            sizes = prefix.unpack_from(self._buffer, self._start)[1:]
            if sum(sizes) > self._max_message_bytes:
                raise self._refused(
                    f"{sum(sizes)} bytes",
                    f"at most {self._max_message_bytes}",
                    ErrorCode.LIMIT_EXCEEDED,
                )
            self._places, _, total = layout(sizes)
            self._expected = total
            if available < total:
                if total > BUFFER_BYTES:
                    self.wants_room = sum(sizes)
                    if not self._asks_first:
                        self._begin_large()
                break
            self._take_message(total)
        if self._start:
            # What is left is the beginning of a message: move it to where there is room for all.
            left = self._end - self._start
            if left:
                self._buffer[:left] = bytes(self._buffer[self._start : self._end])
            self._start, self._end = 0, left

    def _take_message(self, total: int) -> None:
        start, stop = self._start, self._start + total
        if total < COPY_BYTES:
            memory = memoryview(bytearray(self._buffer[start:stop]))
            self._start = stop
        elif start % ALIGNMENT:
            memory = self._pool.take(total)
            memory[:] = self._buffer[start:stop]
            self._start = stop
        else:
            whole = self._buffer
            self._buffer = self._pool.take(BUFFER_BYTES)
            rest = self._end - stop
            self._buffer[:rest] = whole[stop : self._end]
            self._start, self._end = 0, rest
            memory = whole[start:stop]
        frames = [memory[begin:end] for begin, end in self._places]
        self.messages.append((frames, time.perf_counter_ns()))

    def _begin_large(self) -> None:
        self.wants_room = 0
        self._large = self._pool.take(self._expected)
        self._filled = self._end - self._start
        self._large[: self._filled] = self._buffer[self._start : self._end]
        self._start = self._end = 0

    def _too_large_for_memory(self) -> ProtocolError:
        return self._refused(
            f"{self._expected} bytes", "what fits into memory", ErrorCode.LIMIT_EXCEEDED
        )

    def _refused(
        self, got: str, expected: str, code: ErrorCode = ErrorCode.MALFORMED_MESSAGE
    ) -> ProtocolError:
        return ProtocolError(f"message from {self._where}", got=got, expected=expected, code=code)
