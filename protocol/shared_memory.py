"""Memory that a client and a service both map, and the slots in it by which messages go over.

The client makes the segment, and hands its file over a Unix socket; the service maps what it gets
after checking it (`gpu_side.transport.stream_client`). Between a VM and its host each end maps a
file of its own (`protocol.shm`). A segment is

    head      magic, slots, session, size of a request's area and of a reply's (`HEAD`), and where
              the session is written back (`TAKEN`)
    64        a line: not zero while the client sleeps
    128       a line: not zero while the service sleeps
    192       a line for each slot's request, then one for each slot's reply: u32 number, u64 bytes
    pages     of each slot, the area of its request, then that of its reply

A message lies at the beginning of an area as it would lie in a stream (`protocol.stream_wire`). The
end that puts it there writes how many it has put by then to the slot's line, and wakes the other
end up by the socket if that says that it sleeps. A slot is the client's until its request is put,
and again once its reply is; a reply of no bytes gives the slot back without one.

The other end may write anything anywhere at any time. So a line is read once, into memory of our
own, and a size held against that of the area as we know it. The client copies a reply out once, and
reads the copy; or it reads the tensor where it lies, each element once (`Lane.lend`). The service
copies headers; a change of a tensor while it is read must do no more than change the result, which
is the business of the client that changed it.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import struct
import weakref
from array import array
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy

from protocol import native
from protocol.errors import EndpointError, ProtocolError
from protocol.prepared import MessageShape
from protocol.stream_wire import layout
from protocol.tensors import Buffer

# What a client says on its connection, with the segment's file beside it: where a service expects
# plain messages, one of more frames than any may have, which it refuses at once.
ATTACH = b"\xff\xff\xff\xff"
# Written to the socket of an end that sleeps: a message of no frames.
WAKE_UP = bytes(4)
# Requests in flight at once; further ones go over the socket.
SLOTS = 8
# Of an area at most: what is larger goes over the socket.
MAX_AREA_BYTES = 64 * 1024 * 1024

MAGIC = b"TSQPshm1"
# The number of one client's segment, in memory that others had before it.
SESSION_BYTES = 4
TAKEN = slice(40, 40 + SESSION_BYTES)

HEAD = struct.Struct("<8sI4sQQ")
_LINE_BYTES = 64
_CLIENT_SLEEPS, _SERVICE_SLEEPS, _LINES = 64, 128, 192
SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
WHERE = "shared memory"


class Areas(NamedTuple):
    """How a segment is laid out: `slots`, and the bytes of each request's and reply's area."""

    slots: int
    request_bytes: int
    reply_bytes: int

    @property
    def first(self) -> int:
        """Where the first area begins."""
        return _whole_pages(_LINES + 2 * self.slots * _LINE_BYTES)

    @property
    def total(self) -> int:
        """The size of the segment."""
        return self.first + self.slots * (self.request_bytes + self.reply_bytes)


def _whole_pages(size: int) -> int:
    return size + -size % mmap.PAGESIZE


LARGEST = Areas(SLOTS, MAX_AREA_BYTES, MAX_AREA_BYTES).total
# Of memory in which `lay_out` finds room.
SMALLEST = Areas(SLOTS, mmap.PAGESIZE, mmap.PAGESIZE).total


def areas_for(largest_request: int, largest_reply: int, size: int = LARGEST) -> Areas:
    """Choose areas for frames of at most so many bytes, in memory of `size`, `SMALLEST` or more."""
    most = (min(size, LARGEST) - Areas(SLOTS, 0, 0).first) // (2 * SLOTS)
    # A page for the prefix, which is as long as that of a repeated message.
    sizes = (_whole_pages(wanted + mmap.PAGESIZE) for wanted in (largest_request, largest_reply))
    return Areas(SLOTS, *(min(most - most % mmap.PAGESIZE, wanted) for wanted in sizes))


def lay_out(mapped: mmap.mmap, areas: Areas, session: bytes = bytes(SESSION_BYTES)) -> Lane:
    """Write head and lines of a segment in which nothing was put yet; return the client's end."""
    mapped[: areas.first] = bytes(areas.first)
    HEAD.pack_into(mapped, 0, MAGIC, areas.slots, session, *areas[1:])
    return Lane(mapped, areas, is_client=True)


def create(largest_request: int, largest_reply: int) -> tuple[Lane, int]:
    """Make a segment for frames of at most so many bytes; return our end of it, and its file.

    Memory is taken as slots are used. Raises OSError, and EndpointError without compiled kernels.
    """
    areas = areas_for(largest_request, largest_reply)
    file = os.memfd_create("tsqp", os.MFD_ALLOW_SEALING | os.MFD_CLOEXEC)
    try:
        os.ftruncate(file, areas.total)
        # Neither end can take memory away that the other one has mapped.
        fcntl.fcntl(file, fcntl.F_ADD_SEALS, SEALS)
        return lay_out(mmap.mmap(file, areas.total), areas), file
    except BaseException:
        os.close(file)
        raise


def require_library() -> None:
    """Raise EndpointError where the library that orders reads and writes is not compiled."""
    there = native.library is not None
    EndpointError.unless(there, "shm://", "no compiled kernels", "them (tsqp doctor says how)")


class SlotMemory(NamedTuple):
    """What a service's device may use in place: `size` bytes from `address`, both areas of a slot.

    `reply`: where the reply goes. As long as `lane` is there, the memory is.
    """

    lane: Lane
    address: int
    size: int
    reply: memoryview


class Lane:
    """One end of a segment. `slots`: how many there are. Raises as `require_library` does.

    `incoming`: bytes of an area that the other end puts messages into.
    """

    def __init__(self, mapped: mmap.mmap, areas: Areas, *, is_client: bool) -> None:
        require_library()
        self.slots = areas.slots
        self._memory = memoryview(mapped)
        self._base = base = ctypes.addressof(ctypes.c_char.from_buffer(mapped))
        first, both = areas.first, areas.request_bytes + areas.reply_bytes
        # Of the client and of the service: its flag, its lines, its areas' size and first place.
        client, service = (
            (base + _CLIENT_SLEEPS, base + _LINES, areas.request_bytes, first),
            (
                base + _SERVICE_SLEEPS,
                base + _LINES + areas.slots * _LINE_BYTES,
                areas.reply_bytes,
                first + areas.request_bytes,
            ),
        )
        ours, theirs = (client, service) if is_client else (service, client)
        self._sleeps, self._our_lines, self._room, start = ours
        self._peer_sleeps, self._their_lines, self.incoming, their_start = theirs
        self._out = [start + slot * both for slot in range(areas.slots)]
        self._in = [their_start + slot * both for slot in range(areas.slots)]
        self._put = 0
        # Of each slot the number and size last seen: ours alone.
        self._seen = array("Q", bytes(16 * areas.slots))
        self._seen_at = self._seen.buffer_info()[0]

    def memory(self, slot: int) -> SlotMemory:
        """Return a slot's memory, at the service's end."""
        start, reply = self._in[slot], self._out[slot]
        end = reply + self._room
        return SlotMemory(self, self._base + start, end - start, self._memory[reply:end])

    def clear(self) -> None:
        """Take back what this end has put there, for an earlier client as well."""
        ctypes.memset(self._our_lines, 0, self.slots * _LINE_BYTES)

    def look(self, spin_us: int = 0) -> int:
        """Return a slot with a message that was not seen yet; -1 if none comes in that time."""
        slot: int = native.library.lane_look(self._their_lines, self._seen_at, self.slots, spin_us)
        return slot

    def sleeps(self, asleep: bool) -> None:
        """Say that this end sleeps, or no more. Look once more before you do."""
        native.library.lane_sleep(self._sleeps, asleep)

    def put(self, slot: int, frames: Sequence[Buffer]) -> bool | None:
        """Put a message into a slot that is ours; True where the other end has to be woken up.

        None for a message that is larger than the area: nothing was done. No frames: give the slot
        back without a message.
        """
        total = 0
        if frames:
            places, gaps, total = layout(tuple(map(len, frames)))
            if total > self._room:
                return None
            area = self._memory[self._out[slot] :]
            for place, gap, frame in zip(places, gaps, frames, strict=True):
                area[place.start - len(gap) : place.start] = gap
                # A result that a device has left there lies there already.
                start = self._base + self._out[slot] + place.start
                if not (
                    getattr(frame, "obj", None) is self._memory.obj
                    and ctypes.addressof(ctypes.c_char.from_buffer(frame)) == start
                ):
                    area[place] = frame
        line = self._our_lines + slot * _LINE_BYTES
        return bool(native.library.lane_publish(line, self._number(), total, self._peer_sleeps))

    def put_prepared(
        self, slot: int, shape: MessageShape, request_id: int, timeout_ms: int, payload_at: int
    ) -> bool | None:
        """Put a request as `put` does, in one call of compiled code."""
        if shape.total_bytes > self._room:
            return None
        wakes: bool = native.library.lane_put(
            *(shape.address, request_id, timeout_ms, payload_at),
            *(self._base + self._out[slot], self._our_lines + slot * _LINE_BYTES),
            *(self._number(), self._peer_sleeps),
        )
        return wakes

    def _number(self) -> int:
        """Return the number of the next message: never 0, as in a line that was not written yet."""
        self._put = (self._put + 1) & 0xFFFFFFFF or 1
        return self._put

    def take_expected(
        self,
        slot: int,
        shape: MessageShape,
        request_id: int,
        payload_at: int,
        times_at: int,
        spin_us: int,
    ) -> int:
        """Copy the tensor of the reply with this id, if that comes in that time.

        `payload_at`: 0 leaves it where it is. `spin_us` is less than 0 for one that was seen. 1
        where it is done; 0 where nothing has come; -1 for another message, which counts as seen.
        """
        taken: int = native.library.lane_take(
            *(shape.address, request_id, self._base + self._in[slot]),
            *(self._their_lines + slot * _LINE_BYTES, self._seen_at + 16 * slot),
            *(spin_us, payload_at, times_at),
        )
        return taken

    def lend(self, slot: int, shape: MessageShape, back: Callable[[int], object]) -> memoryview:
        """Return the tensor of a reply that was taken, where the service may still change it.

        `back`: is given the slot once the last view of the tensor is gone.
        """
        end = self._in[slot] + shape.total_bytes
        loan: Any = numpy.frombuffer(self._memory[end - shape.payload_bytes : end], numpy.uint8)
        # The last view may go on another thread.
        weakref.finalize(loan, back, slot).atexit = False
        return memoryview(loan)

    def number(self, slot: int) -> int:
        """Return how many messages the other end says it had put with the one seen in a slot."""
        return self._seen[2 * slot]

    def view(self, slot: int) -> memoryview:
        """Return the message that was seen in a slot, which the other end may still change.

        Raises ProtocolError for one that claims to be larger than its area.
        """
        size = self._seen[2 * slot + 1]
        if size > self.incoming:
            ProtocolError.at_most(self.incoming, WHERE, size)
        start = self._in[slot]
        return self._memory[start : start + size]
