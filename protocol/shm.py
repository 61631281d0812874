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

from protocol.encoding import MAX_REPLY_FRAMES
from protocol.errors import EndpointError, ProtocolError
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
        self._free = list(range(self._lane.slots))
        return connection

    def _disconnect(self) -> None:
        if self._lane is not None:
            # What came before the connection was lost counts, unless that is why.
            with suppress(ProtocolError):
                self._take_replies(self._lane)
            self._lane = None
        super()._disconnect()

    def _write(self, frames: Sequence[Buffer], most_s: float) -> None:
        lane = self._lane
        if lane is not None:
            if not self._free:
                self._collect()
            # Behind a message that still waits to be written, this one waits, too.
            if self._free and not self._writer.unsent:
                wakes = lane.put(self._free[-1], frames)
                if wakes is not None:
                    self._free.pop()
                    if wakes and self._socket is not None:
                        with suppress(BlockingIOError):  # full: it has something to wake up for
                            self._socket.send(WAKE_UP, socket.MSG_DONTWAIT)
                    return
        super()._write(frames, most_s)

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
            if slot in self._free:
                continue
            reply = lane.view(slot)
            if reply:
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
            self._free.append(slot)
            found = True
        return found
