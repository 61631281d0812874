"""A stream's clients: how one is let in, its connection, and the memory that it may share with us.

When a client is read from, and when it has stalled, is said here; what follows from it is the
listener's business (`gpu_side.transport.stream_listener`).

Memory that a virtual machine has as a device (`protocol.shm`) is a file of the operator's, as
QEMU has it (memory-backend-file, share=on), and no client names one. Whatever the virtual machine
writes into it, the file keeps its size: nothing is missing when the service touches it, as long as
the operator does not truncate it.
"""

import fcntl
import mmap
import os
import select
import socket
import stat
import struct
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress

from gpu_side.encoding import MAX_FRAMES
from gpu_side.event_log import log
from gpu_side.transport.listener import AcceptingThread
from protocol.errors import EndpointError, ErrorCode, ProtocolError
from protocol.liveness import PROBE, PROBES_BYTES
from protocol.shared_memory import (
    ATTACH,
    HEAD,
    LARGEST,
    MAGIC,
    SEALS,
    SESSION_BYTES,
    SLOTS,
    SMALLEST,
    TAKEN,
    WAKE_UP,
    WHERE,
    Areas,
    Lane,
)
from protocol.stream_wire import MemoryPool, MessageReader, MessageWriter, frames_in
from protocol.tensors import Buffer


def adopt(file: int, owner: int) -> Lane:
    """Map a segment that a client sent: the service's end of it. `file` stays the caller's.

    `owner`: user id of the peer, whose the file must be. Raises ProtocolError for what is no sealed
    segment, or one larger than any that `create` makes.
    """
    with ProtocolError.for_os(WHERE, "a memfd"):
        seals, found = fcntl.fcntl(file, fcntl.F_GET_SEALS), os.fstat(file)
        page = os.fstatvfs(file).f_bsize
    for holds, got, expected in (
        (seals & SEALS == SEALS, "a file that may change its size", "one sealed against it"),
        # Huge ones may be missing when they are touched, which ends the process. (`st_blksize`
        # tells of transparent ones as well, which do no harm.)
        (page == mmap.PAGESIZE, f"pages of {page} bytes", f"{mmap.PAGESIZE}"),
        (found.st_uid == owner, "a file of another user than the peer", "one of its own"),
    ):
        ProtocolError.unless(holds, WHERE, got, expected)
    ProtocolError.unless(
        HEAD.size <= found.st_size <= LARGEST,
        WHERE,
        f"{found.st_size} bytes",
        f"{HEAD.size} to {LARGEST}",
        code=ErrorCode.LIMIT_EXCEEDED,
    )
    with ProtocolError.instead_of(
        (OSError, ValueError), WHERE, "a file that cannot be mapped", "one that can be written"
    ):
        mapped = mmap.mmap(file, found.st_size)
    return Lane(mapped, areas_in(mapped), is_client=False)


def areas_in(mapped: mmap.mmap, session: bytes | None = None) -> Areas:
    """Read the head of a segment, once. Raises ProtocolError.

    `session`: what the client says that the head names, in memory of which the segment may be a
    part; None where it is all of it.
    """
    magic, slots, named, *sizes = HEAD.unpack(mapped[: HEAD.size])
    areas = Areas(slots, *sizes)
    whole = all(size and size % mmap.PAGESIZE == 0 for size in areas[1:])
    fills = areas.total == len(mapped)
    fits = fills if session is None else areas.total <= len(mapped) and named == session
    good = magic == MAGIC and 0 < areas.slots <= SLOTS and whole and fits
    ProtocolError.unless(
        good, WHERE, "another head", f"{MAGIC.decode()}, whose areas fill the file"
    )
    return areas


class DeviceMemory:
    """The memory in a file, mapped as long as we listen. Raises EndpointError for another file."""

    def __init__(self, path: str) -> None:
        with EndpointError.for_os(path, "the file of a device's memory"):
            descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)
            with os.fdopen(descriptor, "r+b", buffering=0):
                found = os.fstat(descriptor)
                for holds, got, expected in (
                    (stat.S_ISREG(found.st_mode), "no regular file", "one"),
                    (
                        not found.st_mode & stat.S_IWOTH,
                        "a file that all users may write",
                        "mode 0660",
                    ),
                    (found.st_size >= SMALLEST, f"{found.st_size} bytes", f"{SMALLEST} or more"),
                ):
                    EndpointError.unless(holds, path, got, expected)
                size = min(found.st_size, LARGEST)
                # Room is taken now: where the file system is full, the kernel ends a process that
                # touches a page that is not there yet.
                os.posix_fallocate(descriptor, 0, size)
                self._mapped = mmap.mmap(descriptor, size)

    def attach(self, connection: socket.socket, *, in_use: bool) -> Lane:
        """Take the segment that a new client has laid out. `in_use`: another client has one.

        Raises ProtocolError, and OSError for a connection that is lost.
        """
        said = connection.recv(len(ATTACH) + SESSION_BYTES, socket.MSG_DONTWAIT)
        session = said[len(ATTACH) :]
        ProtocolError.unless(
            said.startswith(ATTACH) and len(session) == SESSION_BYTES,
            WHERE,
            f"{len(said)} other bytes first",
            f"0x{ATTACH.hex()}, and {SESSION_BYTES} that its head names",
        )
        ProtocolError.unless(
            not in_use,
            WHERE,
            "a second client",
            "one at a time",
            code=ErrorCode.LIMIT_EXCEEDED,
        )
        lane = Lane(self._mapped, areas_in(self._mapped, session), is_client=False)
        # A reply to an earlier client is none to this one. What follows is seen after that.
        lane.clear()
        lane.sleeps(True)
        self._mapped[TAKEN] = session
        return lane


# Of a peer: process, user, group.
_UCRED = struct.Struct("3i")


def handed_over(connection: socket.socket) -> Lane:
    """Map the memory that a new client hands over. Raises ProtocolError, and OSError."""
    said, files, _, _ = socket.recv_fds(connection, len(ATTACH), 2, socket.MSG_DONTWAIT)
    try:
        ProtocolError.unless(
            said == ATTACH and len(files) == 1,
            WHERE,
            f"{len(files)} files with the first bytes",
            f"one, with 0x{ATTACH.hex()}",
        )
        credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
        return adopt(files[0], _UCRED.unpack(credentials)[1])
    finally:
        for file in files:
            os.close(file)


# A client with so many requests, or so many bytes in them, that the service has not taken is not
# read from. Beside them at most one more is being received.
QUEUED_REQUESTS = 64
QUEUED_BYTES = 16 * 1024 * 1024
# Where others are kept out, a client that has sent less than so much of its message for so long
# makes room.
STALLED_S = 2.0
STALLED_BYTES = 64 * 1024
# While no further client is let in, a client that has been silent for this long is dropped.
SILENT_S = 2.0


class Client:
    """One connection. `lane`: the service's end of the memory that it shares, None for none."""

    def __init__(
        self,
        connection: socket.socket,
        pool: MemoryPool,
        name: bytes,
        max_message_bytes: int,
        lane: Lane | None = None,
    ) -> None:
        self.socket = connection
        self.name = name
        self.lane = lane
        self.slots = [] if lane is None else [lane.memory(slot) for slot in range(lane.slots)]
        # Requests in slots, and when they were seen (perf_counter_ns); slots that owe a reply.
        self.in_slots: deque[tuple[list[memoryview], int, int]] = deque()
        self._owing: set[int] = set()
        # The number of the last request in a slot.
        self._taken = 0
        self._max_message_bytes = max_message_bytes
        self.reader = MessageReader(
            connection,
            pool,
            where=f"client {name.hex()}",
            max_frames=MAX_FRAMES,
            max_message_bytes=max_message_bytes,
            asks_first=True,
            skips_empty=lane is not None,
        )
        self.writer = MessageWriter(connection)
        # Of large messages that are being received, or have not been handed out.
        self.large_bytes = 0
        # Since when the message that is not complete has hardly grown (time.monotonic; 0: there is
        # none), and how much of it had come by then.
        self.stalled_since = 0.0
        self._stalled_at = 0
        self.watched = select.EPOLLIN

    @property
    def may_send_more(self) -> bool:
        """Whether to read from it, with what the service has not taken yet."""
        messages = self.reader.messages
        size = sum(len(frame) for frames, _ in messages for frame in frames)
        return len(messages) < QUEUED_REQUESTS and size < QUEUED_BYTES

    def read(self) -> bool:
        """Receive what there is; False when the client has gone."""
        reader = self.reader
        had = len(reader.messages)
        try:
            alive = reader.read(socket.MSG_DONTWAIT)
        except BlockingIOError:
            return True
        if not (come := reader.unfinished_bytes):
            self.stalled_since = 0.0
        elif (
            not self.stalled_since
            or len(reader.messages) > had
            or come >= self._stalled_at + STALLED_BYTES
        ):
            self.note_start()
        return alive

    def look_at_slots(self, spin_us: int = 0) -> bool:
        """Take in the requests that are in its slots; False if there are none.

        Headers are copied when they are handed out. Tensors stay where they are, and the client may
        change them while they are read. Raises ProtocolError for what is no message.
        """
        lane = self.lane
        found: list[tuple[int, list[memoryview], int]] = []
        while lane is not None and (slot := lane.look(0 if found else spin_us)) >= 0:
            if slot in self._owing:
                raise ProtocolError(
                    f"slot {slot} of client {self.name.hex()}",
                    got="a request before the reply to the last one",
                    expected="one at a time",
                )
            frames = frames_in(
                lane.view(slot),
                f"client {self.name.hex()}",
                max_frames=MAX_FRAMES,
                max_message_bytes=self._max_message_bytes,
            )
            self._owing.add(slot)
            found.append((lane.number(slot), frames, slot))
        if found:
            seen_ns = time.perf_counter_ns()
            # As they were put, however the numbers wrap.
            found.sort(key=lambda one: (one[0] - self._taken) & 0xFFFFFFFF)
            self._taken = found[-1][0]
            self.in_slots.extend((frames, seen_ns, slot) for _, frames, slot in found)
        return bool(found)

    def reply_in_slot(self, slot: int, frames: Sequence[Buffer]) -> bool:
        """Put a reply into the slot of its request; False where it does not fit, and goes back."""
        if self.lane is None or slot not in self._owing:
            return False
        self._owing.discard(slot)
        wakes = self.lane.put(slot, frames)
        fits = wakes is not None
        if not fits:
            wakes = self.lane.put(slot, ())
        if wakes and not self.writer.unsent:
            with suppress(BlockingIOError):  # full: it has something to wake up for
                self.socket.send(WAKE_UP, socket.MSG_DONTWAIT)
        return fits

    def note_start(self) -> None:
        """Let the time begin in which the message that is not complete has to grow."""
        self.stalled_since, self._stalled_at = time.monotonic(), self.reader.unfinished_bytes

    def has_stalled(self, now: float) -> bool:
        """Say whether it goes on with no message (now: time.monotonic), while we would read it."""
        long = 0 < self.stalled_since <= now - STALLED_S
        return long and not (self.reader.messages or self.reader.wants_room)


class Acceptor(AcceptingThread):
    """Lets a stream's clients in, and answers their probes (`protocol.liveness`), until `stop`.

    A connection on which a message begins goes to `arrivals`; `ready_fd` is a file that is readable
    while there are some. Clients beyond `max_clients` wait to be accepted, and a client that was
    silent for two seconds is dropped then. Of connections for probes there are twice as many, and a
    new one takes the place of the one that was idle longest. `listening` must not block, and stays
    the caller's.

    Should the thread fail, it closes what it holds, and `ready_fd` is readable, so that the
    service, which can let in no client any more, ends. Its clients go on with another.
    """

    def __init__(self, listening: socket.socket, *, max_clients: int) -> None:
        # Those that have not said yet what they are, since when (time.monotonic), the first one
        # first; and those that probe, the one that has not for longest first.
        self._unclassified: dict[int, tuple[socket.socket, float]] = {}
        self._probes: dict[int, socket.socket] = {}
        self._arrived: deque[socket.socket] = deque()
        self.ready_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        super().__init__(listening, "acceptor_failed", max_clients=max_clients)

    def arrivals(self) -> list[socket.socket]:
        """Return the clients that have come since it was last asked; they are the caller's."""
        with suppress(BlockingIOError):
            os.eventfd_read(self.ready_fd)
        return [self._arrived.popleft() for _ in range(len(self._arrived))]

    def stop(self) -> None:
        """Let no client in any more. What is open stays open, and is not answered."""
        if not self._stopping:
            super().stop()
            self._thread.join()

    def close(self) -> None:
        """Close all connections but those that were handed out. After `stop`, and once only."""
        if self._epoll.closed:
            return
        self._close_connections()
        for connection in self._arrived:
            connection.close()
        self._epoll.close()
        os.close(self.ready_fd)
        os.close(self._wakeup)

    def _close_connections(self) -> None:
        unclassified = [connection for connection, _ in self._unclassified.values()]
        for connection in (*unclassified, *self._probes.values()):
            connection.close()

    def _attend_all(self) -> None:
        while not self._stopping:
            for file, _ in self._epoll.poll(self._left_s()):
                try:
                    self._attend(file)
                except MemoryError:
                    self.pause_accepting()
            # After those that have spoken by now were listened to.
            self._make_room()

    def _ended(self) -> None:
        if self.failed:
            self._close_connections()
            # A client that connects from now on is refused, and does not wait to be accepted.
            with suppress(OSError):
                self._listening.shutdown(socket.SHUT_RDWR)
            os.eventfd_write(self.ready_fd, 1)

    def _left_s(self) -> float | None:
        left_s = super()._left_s()
        if self.accepting or not self._unclassified:
            return left_s
        _, since = next(iter(self._unclassified.values()))
        silent_s = max(0.0, since + SILENT_S - time.monotonic())
        return silent_s if left_s is None else min(left_s, silent_s)

    def _make_room(self) -> None:
        """Drop those that have been silent for too long, if that is what keeps others out."""
        if self.accepting:
            return
        until = time.monotonic() - SILENT_S
        silent = [file for file, (_, since) in self._unclassified.items() if since <= until]
        if silent:
            log.warning(
                "dropped",
                clients=len(silent),
                reason="silent",
                detail=f"silent for {SILENT_S:g} s",
            )
        for file in silent:
            connection, _ = self._unclassified.pop(file)
            self.client_closed()
            # Closing takes it out of the epoll set too.
            connection.close()

    def _attend(self, file: int) -> None:
        if file == self._file:
            self._accept()
        elif file == self._wakeup:
            os.eventfd_read(self._wakeup)
        elif file in self._probes:
            self._answer(file)
        elif file in self._unclassified:
            self._classify(file)

    def _let_in(self) -> None:
        connection = self._accepted()
        try:
            self._unclassified[connection.fileno()] = connection, time.monotonic()
            self._epoll.register(connection, select.EPOLLIN)
        except (OSError, MemoryError):
            self._unclassified.pop(connection.fileno(), None)
            connection.close()
            self.client_closed()
            self.pause_accepting()

    def _classify(self, file: int) -> None:
        """Find out what a connection is for, by its first byte."""
        connection, _ = self._unclassified[file]
        try:
            first = connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return
        except OSError:
            first = b""
        del self._unclassified[file]
        if first and first != PROBE:
            self._epoll.unregister(file)
            if not self.accepting:
                log.warning("no_more_clients", clients=self._clients)
            self._arrived.append(connection)
            os.eventfd_write(self.ready_fd, 1)
            return
        self.client_closed()
        if not first:
            connection.close()
            return
        # Each client has one, and may be in the middle of coming back.
        most = int(2 * self._max_clients)
        if len(self._probes) >= most:
            idle = next(iter(self._probes))
            self._probes.pop(idle).close()
            log.warning(
                "dropped", reason="idle_probe", detail=f"signs of life: idle longest of {most}"
            )
        self._probes[file] = connection
        self._answer(file)

    def _answer(self, file: int) -> None:
        """Send a probe back. A client that sends more before that, or anything else, is dropped."""
        connection = self._probes.pop(file)
        probes = b""
        with suppress(OSError):
            probes = connection.recv(PROBES_BYTES, socket.MSG_DONTWAIT)
            if probes == PROBE and connection.send(probes, socket.MSG_DONTWAIT):
                # Behind those that have not probed since.
                self._probes[file] = connection
                return
        if probes not in (b"", PROBE):
            log.warning(
                "dropped",
                reason="no_probe",
                detail=f"signs of life: got {len(probes)} bytes, expected one zero at a time",
            )
        connection.close()
