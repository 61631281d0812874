"""The client's end of shared memory: a stream that carries as little as it can.

Connecting, signs of life and waking up go over the Unix socket, and so does what is too large for a
slot or comes while all slots are taken (`ShmChannel`).

`IvshmemChannel` uses memory that a virtual machine has as a device. QEMU's `ivshmem-plain` lets a
guest map a file of its host: in the guest it is `resource2` of the device in /sys. (Not
`resource2_wc`: what is written there may arrive in another order.) A file cannot be handed over
vsock, so each end maps the one that its own operator has named.

That memory holds the segment of one client, and what earlier clients have left. So the client says
a random number over the stream, which is in the head as well. It uses slots once the service has
written the number back: then it has mapped this memory, and writes nothing more for others. Until
then messages go over the stream.

The host can make its file smaller, and the kernel then ends us (SIGBUS) when we touch the rest:
that denies service, as a host always can, and tells it nothing.
"""

import fcntl
import mmap
import os
import socket
import time
from collections.abc import Sequence
from contextlib import suppress
from weakref import WeakValueDictionary

import torch

from protocol.channel import NOT_PUT, Pending
from protocol.encoding import MAX_REPLY_FRAMES
from protocol.endpoint import parse_endpoint
from protocol.errors import EndpointError, ProtocolError
from protocol.prepared import PreparedRequest
from protocol.shared_memory import (
    ATTACH,
    MAGIC,
    SESSION_BYTES,
    SMALLEST,
    TAKEN,
    WAKE_UP,
    Lane,
    areas_for,
    create,
    lay_out,
)
from protocol.stream import StreamChannel
from protocol.stream_wire import frames_in
from protocol.tensors import Buffer

# How long slots alone are looked at while we spin, before the socket is once more.
_LOOK_US = 20
# From here on the pages of fresh memory cost more than to look for memory that was used before.
_LARGE_BYTES = 1024 * 1024
# From here on a copy costs more than to lend a slot, which takes 4 us at any size.
_LENT_BYTES = 128 * 1024


class ShmChannel(StreamChannel):
    """Our client over shared memory; otherwise as `StreamChannel`."""

    _skips_empty = True
    _lane: Lane | None = None
    # Slots that are ours and not lent: the last one was used last, and is in the caches.
    _free: list[int]
    # The requests in the others, and the tensors of replies that are lent.
    _asked: dict[int, int]
    _lent: WeakValueDictionary[int, torch.Tensor]

    def _connect(self, give_up: float) -> socket.socket:
        connection, self._lent = super()._connect(give_up), WeakValueDictionary()
        try:
            self._share(connection)
        except EndpointError:
            self.close()
            raise
        return connection

    def _share(self, connection: socket.socket) -> None:
        """Share memory with the service. Raises OSError and EndpointError."""
        lane, file = create(self._max_message_bytes, self._max_reply_bytes)
        try:
            socket.send_fds(connection, [ATTACH], [file])
        finally:
            os.close(file)
        self._use(lane)

    def _use(self, lane: Lane) -> None:
        self._lane, self._free, self._asked = lane, list(range(lane.slots)), {}

    def close(self) -> None:
        """See `Channel.close`."""
        if self._lane is not None:
            # What came before the connection was lost counts, unless that is why.
            with suppress(ProtocolError):
                self._collect()
            self._lane = None
        super().close()

    def _put(
        self, prepared: PreparedRequest, payload: torch.Tensor, request_id: int, timeout_ms: int
    ) -> int:
        lane, shape = self._lane, prepared.sent_as
        # Behind a message that still waits to be written, this one waits, too.
        if lane is None or not self._free or self._writer.unsent:
            return NOT_PUT
        # Taken at once: a lent slot may come back from any thread, behind it.
        slot, address = self._free.pop(), payload.data_ptr()
        wakes = lane.put_prepared(slot, shape, request_id, timeout_ms, address)
        if wakes is None:
            self._free.append(slot)
            return NOT_PUT
        self._asked[slot] = request_id
        if wakes:
            try:
                self._wake_up()
            except OSError:
                # No service is there to read it: it may be sent again.
                self.close()
                return NOT_PUT
        return slot

    def _write(self, frames: Sequence[Buffer], most_s: float) -> None:
        lane = self._lane
        if lane is not None and not self._writer.unsent:
            if not self._free:
                self._collect()
            if self._free:
                slot = self._free.pop()
                if (wakes := lane.put(slot, frames)) is not None:
                    self._asked[slot] = self._last_id
                    if wakes:
                        self._wake_up()
                    return
                self._free.append(slot)
        super()._write(frames, most_s)

    def _wake_up(self) -> None:
        if self._socket is not None:
            with suppress(BlockingIOError):  # full: it has something to wake up for
                self._socket.send(WAKE_UP, socket.MSG_DONTWAIT)

    def _take(self, pending: Pending, prepared: PreparedRequest, request_id: int) -> None:
        lane, slot = self._lane, pending.place
        if lane is None or not self._spin.expects_soon or self._asked.get(slot) != request_id:
            return
        taken = self._take_expected(lane, slot, pending, request_id, self._spin.limit_us)
        self._spin.expects_soon = taken != 0
        if taken:
            del self._asked[slot]
        if taken < 0:
            self._take_any(lane, slot)

    def _read(self, left_s: float) -> bool:
        lane = self._lane
        if lane is None:
            return super()._read(left_s)
        if left_s <= 0:
            return self._collect(_LOOK_US if self._spin.is_on else 0) or super()._read(left_s)
        lane.sleeps(True)
        try:
            return self._collect() or super()._read(left_s)
        finally:
            lane.sleeps(False)

    def _read_and_write(self, timeout_s: float, *, reading: bool) -> None:
        lane = self._lane
        if lane is None:
            super()._read_and_write(timeout_s, reading=reading)
            return
        lane.sleeps(True)
        try:
            super()._read_and_write(0.0 if self._collect() else timeout_s, reading=reading)
        finally:
            lane.sleeps(False)

    def _collect(self, spin_us: int = 0) -> bool:
        """Take the replies that are there, waiting so long for the first; False for none."""
        lane, found = self._lane, False
        if lane is None:
            return False
        # No more looks than slots: a service that goes on raising numbers does not hold us.
        for _ in range(lane.slots):
            slot = lane.look(0 if found else spin_us)
            if slot < 0:
                break
            if request_id := self._asked.pop(slot, 0):
                pending = self._pending.get(request_id)
                if pending is None or self._take_expected(lane, slot, pending, request_id) < 0:
                    self._take_any(lane, slot)
                found = True
            if not self._asked:
                break
        return found

    def _take_expected(
        self, lane: Lane, slot: int, pending: Pending, request_id: int, spin_us: int = -1
    ) -> int:
        """Take a reply by compiled code, as `Lane.take_expected`, and note it."""
        prepared = pending.prepared
        if (
            prepared is None
            or not prepared.answered_as.address
            or prepared.reply_bytes > self._max_reply_bytes
            or prepared.answered_as.total_bytes > lane.incoming
        ):
            return -1 if spin_us < 0 else 0
        shape, dtype = prepared.reply_shape, prepared.reply_torch_dtype
        size, output = prepared.reply_payload_bytes, None
        if size < (_LENT_BYTES if prepared.read_once else _LARGE_BYTES):
            output = torch.empty(shape, dtype=dtype)
        elif not prepared.read_once:
            output = torch.frombuffer(self._pool.take(size), dtype=dtype).view(shape)
        payload_at = 0 if output is None else output.data_ptr()
        taken = lane.take_expected(
            *(slot, prepared.answered_as, request_id, payload_at, self._times_at, spin_us)
        )
        if taken > 0:
            if output is None:
                memory = lane.lend(slot, prepared.answered_as, self._free.append)
                self._lent[slot] = output = torch.frombuffer(memory, dtype=dtype).view(shape)
                pending.lent = True
            else:
                self._free.append(slot)
            pending.output, pending.times_us = output, self._times[:]
            pending.received_ns = time.perf_counter_ns()
        return taken

    def _take_any(self, lane: Lane, slot: int) -> None:
        """Keep what was seen in a slot as if the socket had brought it. Raises ProtocolError."""
        self._free.append(slot)
        try:
            if not (reply := lane.view(slot)):
                return
            # Into memory of our own, once: the service may write on.
            private = self._pool.take(len(reply))
            private[:] = reply
            frames = frames_in(
                private,
                self.endpoint,
                max_frames=MAX_REPLY_FRAMES,
                max_message_bytes=self._max_reply_bytes,
            )
        except ProtocolError:
            # As on a stream: what else it says is of no use.
            self._lane = None
            self.close()
            raise
        self._reader.messages.append((frames, time.perf_counter_ns()))


class IvshmemChannel(ShmChannel):
    """Our client over the memory of a device."""

    # Locked while we are connected: no other client of this machine lays out its own there.
    _file: int | None = None
    # A segment that the service has not taken yet, its memory, and its number.
    _offered: tuple[Lane, mmap.mmap, bytes] | None = None

    def _share(self, connection: socket.socket) -> None:
        path = parse_endpoint(self.endpoint).memory
        with (
            EndpointError.for_os(path, "a file to map (resource2)"),
            EndpointError.instead_of(BlockingIOError, path, "another client", "one at a time"),
        ):
            self._file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            size = os.fstat(self._file).st_size
            EndpointError.unless(size >= SMALLEST, path, f"{size} bytes", f"{SMALLEST} or more")
            areas = areas_for(self._max_message_bytes, self._max_reply_bytes, size)
            mapped = mmap.mmap(self._file, areas.total)
        ours = mapped[: len(MAGIC)] in (MAGIC, bytes(len(MAGIC)))
        EndpointError.unless(ours, path, "something else in it", "zeros, or a segment")
        session = os.urandom(SESSION_BYTES)
        self._offered = lay_out(mapped, areas, session), mapped, session
        connection.sendall(ATTACH + session)

    def _write(self, frames: Sequence[Buffer], most_s: float) -> None:
        if self._offered is not None and self._offered[1][TAKEN] == self._offered[2]:
            self._use(self._offered[0])
            self._offered = None
        super()._write(frames, most_s)

    def close(self) -> None:
        """See `Channel.close`."""
        super().close()
        self._offered = None
        if self._file is not None:
            for output in self._lent.values():  # the next session may lie where they do
                output.data = output.clone()
            # By itself it would stay locked as long as it is mapped.
            fcntl.flock(self._file, fcntl.LOCK_UN)
            os.close(self._file)
            self._file = None
