"""The client's end of shared memory: a stream that carries as little as it can.

Connecting, signs of life and waking up go over the Unix socket, and so does what is too large for a
slot or comes while all slots are taken.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Sequence
from contextlib import suppress

import torch

from protocol.encoding import MAX_REPLY_FRAMES
from protocol.errors import EndpointError, ProtocolError
from protocol.pending import Pending
from protocol.prepared import PreparedRequest
from protocol.shared_memory import ATTACH, WAKE_UP, Lane, create, frames_in
from protocol.stream import StreamChannel
from protocol.tensors import Buffer

# How long slots alone are looked at while we spin, before the socket is once more.
_LOOK_US = 20


class ShmChannel(StreamChannel):
    """Our client over shared memory; otherwise as `StreamChannel`."""

    _skips_empty = True
    _lane: Lane | None = None
    # Slots that are ours: the last one was used last, and is in the caches.
    _free: list[int]
    # The requests in the others.
    _asked: dict[int, int]

    def _connect(self, method: str, timeout_s: float, give_up: float) -> socket.socket:
        connection = super()._connect(method, timeout_s, give_up)
        try:
            self._lane, file = create(self._max_message_bytes, self._max_reply_bytes)
        except EndpointError:
            self._disconnect()
            raise
        try:
            socket.send_fds(connection, [ATTACH], [file])
        finally:
            os.close(file)
        self._free, self._asked = list(range(self._lane.slots)), {}
        return connection

    def _disconnect(self) -> None:
        if self._lane is not None:
            # What came before the connection was lost counts, unless that is why.
            with suppress(ProtocolError):
                self._take_replies(self._lane)
            self._lane = None
        super()._disconnect()

    def _put(
        self, prepared: PreparedRequest, payload: torch.Tensor, request_id: int, timeout_ms: int
    ) -> bool:
        lane, shape = self._lane, prepared.sent_as
        # Behind a message that still waits to be written, this one waits, too.
        if lane is None or not self._free or self._writer.unsent or not shape.address:
            return False
        if not (payload.is_contiguous() and payload.is_cpu):
            return False
        address = payload.data_ptr()
        wakes = lane.put_prepared(self._free[-1], shape, request_id, timeout_ms, address)
        return wakes is not None and self._note_put(request_id, wakes)

    def _write(self, frames: Sequence[Buffer], most_s: float) -> None:
        lane = self._lane
        if lane is not None and not self._writer.unsent:
            if not self._free:
                self._collect()
            if self._free and (wakes := lane.put(self._free[-1], frames)) is not None:
                self._note_put(self._last_id, wakes)
                return
        super()._write(frames, most_s)

    def _note_put(self, request_id: int, wakes: bool) -> bool:
        """Note in which slot a request is, and wake the service up where it sleeps."""
        self._asked[self._free.pop()] = request_id
        if wakes and self._socket is not None:
            with suppress(OSError):  # full, so it wakes up; or lost, as waiting will find
                self._socket.send(WAKE_UP, socket.MSG_DONTWAIT)
        return True

    def _take(self, pending: Pending, request_id: int) -> None:
        if self._lane is None:
            super()._take(pending, request_id)
        elif self._spin.expects_soon:
            kept = self._reader.messages
            while self._collect(self._spin.limit_us) and pending.reply is None and not kept:
                pass
            self._spin.expects_soon = pending.reply is not None

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
        lane = self._lane
        try:
            return lane is not None and self._take_replies(lane, spin_us)
        except BaseException:
            self._lane = None
            self._disconnect()
            raise

    def _take_replies(self, lane: Lane, spin_us: int = 0) -> bool:
        found = False
        # No more looks than slots: a service that goes on raising numbers does not hold us here.
        for _ in range(lane.slots):
            slot = lane.look(0 if found else spin_us)
            if slot < 0:
                break
            if not (request_id := self._asked.pop(slot, 0)):
                continue
            pending = self._pending.get(request_id)
            if pending is None or not self._take_expected(lane, slot, pending, request_id):
                self._take_any(lane, slot)
            self._free.append(slot)
            found = True
        return found

    def _take_expected(self, lane: Lane, slot: int, pending: Pending, request_id: int) -> bool:
        """Take a reply by compiled code, if it is exactly what its prepared request expects."""
        prepared = pending.prepared
        if prepared is None or prepared.reply_bytes > self._max_reply_bytes:
            return False
        shape = prepared.answered_as
        if not shape.address:
            return False
        output = torch.empty(prepared.reply_shape, dtype=prepared.reply_torch_dtype)
        if not lane.take_expected(slot, shape, request_id, output.data_ptr(), self._times_at):
            return False
        self._note_output(pending, request_id, output, self._times)
        return True

    def _take_any(self, lane: Lane, slot: int) -> None:
        """Keep what was seen in a slot as if the socket had brought it. Raises ProtocolError."""
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
        self._reader.messages.append((frames, time.perf_counter_ns()))
