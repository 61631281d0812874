"""The client's end of a stream transport: Unix sockets, and vsock between a VM and its host."""

import errno
import os
import select
import socket
import struct
import time
from array import array
from collections.abc import Sequence
from contextlib import ExitStack
from math import ceil
from typing import Any

import numpy
import torch

from protocol import native
from protocol.channel import NOT_PUT, RECONNECT_S, Pending, PendingChannel, Received
from protocol.encoding import DEFAULT_MAX_MESSAGE_BYTES, MAX_REPLY_FRAMES, REQUEST
from protocol.endpoint import SPELLINGS, StreamAddress, parse_endpoint
from protocol.errors import DeadlineExceededError, EndpointError, ProtocolError, TsqpError
from protocol.liveness import PROBE_AFTER_S, AdaptiveSpin, LivenessProbe
from protocol.prepared import PreparedRequest
from protocol.stream_wire import (
    BUFFER_BYTES,
    MemoryPool,
    MessageReader,
    MessageWriter,
    prepare,
    to_pieces,
)
from protocol.tensors import Buffer

# Requests of which some bytes still wait here because the service does not read.
QUEUED_REQUESTS = 64
_CONNECT_INTERVAL_S = 0.01

# What says that no process listens there yet, or not at this moment; and ENODEV, of vsock.
_ABSENT = (FileNotFoundError, ConnectionError, BlockingIOError, TimeoutError)


class StreamChannel(PendingChannel):
    """Our client over a stream socket.

    It connects at the first request, and waits for the service to appear as long as that request
    may take. `spin_us`: see `protocol.liveness`.
    """

    _skips_empty = False

    def __init__(
        self,
        endpoint: str,
        *,
        timeout_s: float = 30.0,
        max_message_bytes: int = DEFAULT_MAX_MESSAGE_BYTES,
        spin_us: float = 0.0,
    ) -> None:
        address = parse_endpoint(endpoint).address
        if address is None:
            raise EndpointError(endpoint, "no stream", f"a stream of {SPELLINGS}")
        super().__init__(endpoint, timeout_s=timeout_s, max_message_bytes=max_message_bytes)
        self._address: StreamAddress = address
        self._spin = AdaptiveSpin(spin_us)
        self._pool = MemoryPool()
        self._socket: socket.socket | None = None
        self._probe: LivenessProbe
        self._read_timeout_s = 0.0
        self._reader: MessageReader
        self._writer: MessageWriter
        # What compiled code says of a reply: two times; and what it has received beside it.
        self._times = array("q", (0, 0))
        self._times_at = self._times.buffer_info()[0]
        scratch: Any = numpy.empty(BUFFER_BYTES, numpy.uint8)
        self._scratch, self._scratch_at = memoryview(scratch), int(scratch.ctypes.data)

    # ------------------------------------------------------------------------- connection

    def _connect(self, give_up: float) -> socket.socket:
        """Connect once. Raises OSError where another attempt may help, and EndpointError."""
        try:
            # For messages and for signs of life: a client that may send messages has both.
            with ExitStack() as until_both:
                probing = until_both.enter_context(_connected(self._address, give_up))
                self._probe = LivenessProbe(probing)
                connection = _connected(self._address, give_up)
                until_both.pop_all()
        except OSError as error:
            if isinstance(error, _ABSENT) or error.errno == errno.ENODEV:
                raise
            got = os.strerror(error.errno or 0)
            raise EndpointError(self.endpoint, got, "an address to connect to") from None
        late = self._reader.messages if self._connection else ()
        self._reader = MessageReader(
            connection,
            self._pool,
            where=self.endpoint,
            max_frames=MAX_REPLY_FRAMES,
            max_message_bytes=self._max_reply_bytes,
            skips_empty=self._skips_empty,
        )
        self._reader.messages.extend(late)
        self._writer = MessageWriter(connection)
        self._read_timeout_s = 0.0
        self._socket = connection
        return connection

    def close(self) -> None:
        """See `Channel.close`. The next request connects again."""
        if self._socket is not None:
            self._socket.close()
            self._probe.close()
            self._socket = None
            self._connection += 1

    # ---------------------------------------------------------------------------- sending

    def _send(self, method: str, frames: Sequence[Buffer], size: int, timeout_s: float) -> int:
        give_up = 0.0
        while True:
            if self._connection:
                self._refuse_second_connection(method)
            try:
                if self._socket is None or self._writer.unsent:
                    if not give_up:
                        # A service that was there comes back in a moment, or not.
                        was_there = self._connection or self._socket is not None
                        most_s = min(RECONNECT_S, timeout_s) if was_there else timeout_s
                        give_up = time.monotonic() + most_s
                    if self._socket is None:
                        self._connect(give_up)
                    self._make_room(size, give_up)
                sent_ns = time.perf_counter_ns()
                left_s = give_up - time.monotonic() if give_up else timeout_s
                self._write(frames, left_s)
            except OSError:
                # The service has not got all of it, so it is safe to send again.
                self.close()
                if give_up and time.monotonic() >= give_up:
                    if self._connection:
                        raise self._connection_lost(f"before {method} could be sent") from None
                    raise DeadlineExceededError(
                        self.endpoint,
                        f"no connection for {method} within {timeout_s:g} s",
                        "a gpu-service that answers there",
                    ) from None
                if give_up:
                    time.sleep(_CONNECT_INTERVAL_S)
            except TsqpError:
                raise
            except BaseException:
                # How much of it has been written is not known.
                self.close()
                raise
            else:
                return sent_ns

    def _write(self, frames: Sequence[Buffer], most_s: float) -> None:
        """Send a message. What is not read by then goes out in `wait`, or before the next one."""
        self._writer.send(frames, most_s)

    def _put(
        self, prepared: PreparedRequest, payload: torch.Tensor, request_id: int, timeout_ms: int
    ) -> int:
        shape = prepared.sent_as
        if self._socket is None or self._writer.unsent:
            return NOT_PUT
        written: int = native.library.stream_put(
            shape.address, request_id, timeout_ms, payload.data_ptr(), self._socket.fileno()
        )
        if 0 < written < shape.total_bytes:
            header = REQUEST.header(prepared.template, request_id, timeout_ms)
            pieces, total = to_pieces([header, *prepared.payload(payload)])
            self._writer.keep_rest(pieces, total, written)
        return 0 if written else NOT_PUT

    def _take(self, pending: Pending, prepared: PreparedRequest, request_id: int) -> None:
        if self._socket is None:
            return
        reader, shape = self._reader, prepared.answered_as
        ready = not (reader.unfinished_bytes or reader.messages or self._writer.unsent)
        fits = shape.total_bytes <= BUFFER_BYTES and prepared.reply_bytes <= self._max_reply_bytes
        if not (ready and fits and shape.address):
            return
        output = torch.empty(prepared.reply_shape, dtype=prepared.reply_torch_dtype)
        started_ns = time.perf_counter_ns()
        left_s = min(PROBE_AFTER_S, pending.deadline - time.monotonic())
        come: int = native.library.stream_take(
            *(shape.address, request_id, self._socket.fileno(), self._scratch_at),
            *(self._spin.limit_us if self._spin.expects_soon else 0, int(left_s * 1000)),
            *(output.data_ptr(), self._times_at),
        )
        if come < 0:
            pending.output, pending.times_us = output, self._times[:]
            pending.received_ns = time.perf_counter_ns()
            if self._spin.is_on:
                self._spin.waited(started_ns)
        elif come:
            try:
                reader.take_in(self._scratch[:come])
            except ProtocolError:
                self.close()
                raise
        elif left_s > 0:
            self._note_silence(left_s)

    def _make_room(self, size: int, give_up: float) -> None:
        """Wait for a service that does not read. It may be waiting for us to read: we do."""
        writer = self._writer
        while writer.unsent:
            full = (
                len(writer.unsent) >= QUEUED_REQUESTS
                or writer.unsent_bytes + size > self._max_message_bytes
            )
            # Replies to requests that wait, and as many that came too late.
            reading = len(self._reader.messages) < QUEUED_REQUESTS + len(self._pending)
            left_s = give_up - time.monotonic() if full else 0.0
            self._read_and_write(left_s, reading=reading)
            if self._socket is None:
                raise ConnectionResetError
            if not full:
                return
            if left_s <= 0 and writer.unsent:
                raise EndpointError(self.endpoint, "a full send queue", "a service that reads")

    # -------------------------------------------------------------------------- receiving

    def _receive(self, deadline: float) -> Received | None:
        messages = self._reader.messages
        if not messages and self._socket is not None:
            left_s = deadline - time.monotonic() if deadline else 0.0
            if self._writer.unsent:
                self._read_and_write(left_s, reading=True)
            elif self._spin.is_on:
                self._spin.wait(self._read, left_s)
            else:  # the same, in fewer calls
                self._read(left_s)
        return messages.popleft() if messages else None

    def _read(self, left_s: float) -> bool:
        """Read what comes in so many seconds, or is there; False if nothing was.

        It returns with the first byte that comes, so a peer that sends one now and then cannot
        prolong the time-out.
        """
        flags, timeout_s = int(socket.MSG_DONTWAIT), 0.0
        if left_s > 0:
            flags, timeout_s = 0, min(left_s, PROBE_AFTER_S)
            if timeout_s != self._read_timeout_s and self._socket is not None:
                # The kernel itself ends a blocking call: no poll before each one. Zero would mean
                # for ever.
                value = struct.pack("@ll", *divmod(max(1000, ceil(timeout_s * 1e6)), 1_000_000))
                self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, value)
                self._read_timeout_s = timeout_s
        try:
            if not self._reader.read(flags):
                self.close()
        except BlockingIOError:
            self._note_silence(timeout_s)
            return False
        except OSError:
            self.close()
        except BaseException:
            # Where the next message begins is not known any more.
            self.close()
            raise
        return True

    def _note_silence(self, waited_s: float) -> None:
        """Take note that so much time has brought no reply, and go on only if the service lives."""
        if waited_s and self._socket is not None and not self._probe.is_alive(waited_s):
            self.close()

    def _read_and_write(self, timeout_s: float, *, reading: bool) -> None:
        """Write what waits, and read where `reading`, as soon as either can be done."""
        if self._socket is None:
            return
        poll = select.poll()
        poll.register(self._socket, select.POLLOUT | (select.POLLIN if reading else 0))
        timeout_s = min(max(0.0, timeout_s), PROBE_AFTER_S)
        ready = poll.poll(timeout_s * 1000)
        if not ready:
            self._note_silence(timeout_s)
        for _, events in ready:
            if reading and events & ~select.POLLOUT:
                self._read(0.0)
            if events & select.POLLOUT and self._socket is not None:
                try:
                    self._writer.flush()
                except BaseException as error:
                    self.close()
                    if not isinstance(error, OSError):
                        raise


def _connected(address: StreamAddress, give_up: float) -> socket.socket:
    family = socket.AF_UNIX if isinstance(address, str) else socket.AF_VSOCK
    with socket.socket(family, socket.SOCK_STREAM) as connection:
        connection.settimeout(max(0.001, give_up - time.monotonic()))
        connection.connect(address)
        prepare(connection)
        # Python 3.11 passes a socket of vsock no options but numbers: it goes by another family.
        return socket.socket(socket.AF_UNIX, fileno=connection.detach())
