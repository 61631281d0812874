"""What every channel keeps of its requests, whatever carries the bytes: ids, deadlines, replies.

`PendingChannel` is all of a channel but the transport, which a subclass adds in three methods.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self, TypeAlias

from protocol.channel import Exchange, Traffic
from protocol.encoding import Reply, decode_reply, encode_request
from protocol.errors import (
    DeadlineExceededError,
    EndpointError,
    ErrorCode,
    ProtocolError,
    ReplyError,
    ServiceError,
)
from protocol.messages import MAX_TIMEOUT_MS, REQUEST_TYPES, Request
from protocol.tensors import Buffer

# How long a request may wait for a lost connection to come back before it is sent.
RECONNECT_S = 2.0

# The frames of one message, and when the last of them had come.
Received: TypeAlias = tuple[Sequence[memoryview], int]


def frame_bytes(frames: Sequence[Buffer]) -> int:
    """Return the size of all frames together."""
    total = 0
    for frame in frames:
        total += frame.nbytes if isinstance(frame, memoryview) else len(frame)
    return total


@dataclass(slots=True)
class Pending:
    """A request that was sent. `deadline`: on the clock of `time.monotonic`, in seconds.

    `connection`: which of the channel's connections, one after another, it went out on.
    """

    method: str
    deadline: float
    timeout_s: float
    sent_ns: int
    encode_ns: int
    bytes_sent: int
    connection: int


class PendingChannel(ABC):
    """A `Channel` without its transport.

    `timeout_s` is the deadline of a request that names none. A reply that comes after its request
    was given up is dropped; one whose id was never sent is a ProtocolError.
    """

    def __init__(self, endpoint: str, *, timeout_s: float, max_message_bytes: int) -> None:
        self.endpoint = endpoint
        self.traffic = Traffic()
        self._timeout_s = timeout_s
        self._max_message_bytes = max_message_bytes
        self._last_id = 0
        self._pending: dict[int, Pending] = {}
        self._arrived: dict[int, tuple[Reply, int, int, int]] = {}
        # Counts lost connections: a request that went out on another one than this has no reply
        # to hope for.
        self._connection = 0

    @abstractmethod
    def _send(self, method: str, frames: Sequence[Buffer], size: int, timeout_s: float) -> int:
        """Send a message of `size` bytes, and return when it was handed over (perf_counter_ns).

        Raises EndpointError, `_connection_lost` among them.
        """

    @abstractmethod
    def _receive(self, deadline: float) -> Received | None:
        """Wait for one message, at most until `deadline` (0: not at all); may return None earlier.

        Counts a lost connection in `_connection`. Raises ProtocolError for what is no message.
        """

    @abstractmethod
    def close(self) -> None:
        """See `Channel.close`."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def submit(self, request: Request, timeout_s: float | None = None) -> int:
        """See `Channel.submit`."""
        started_ns = time.perf_counter_ns()
        timeout_s = self._timeout_s if timeout_s is None else timeout_s
        self._last_id = request_id = self._last_id + 1
        timeout_ms = min(max(1, int(timeout_s * 1000)), MAX_TIMEOUT_MS)
        frames = encode_request(request, request_id, timeout_ms)
        size = frame_bytes(frames)
        if size > self._max_message_bytes:
            raise ProtocolError(
                f"{request.method} to {self.endpoint}",
                got=f"{size} bytes",
                expected=f"at most {self._max_message_bytes} (fewer tokens in a step send less)",
                code=ErrorCode.LIMIT_EXCEEDED,
            )
        encode_ns = time.perf_counter_ns() - started_ns
        deadline = time.monotonic() + timeout_s
        sent_ns = self._send(request.method, frames, size, timeout_s)
        self._pending[request_id] = Pending(
            request.method, deadline, timeout_s, sent_ns, encode_ns, size, self._connection
        )
        return request_id

    def wait(self, request_id: int) -> Exchange:
        """See `Channel.wait`."""
        pending = self._pending[request_id]
        if request_id not in self._arrived:
            try:
                self._wait_until_arrived(request_id, pending)
            except BaseException:
                # Given up: should its reply still come, it must not be taken for another's.
                self._pending.pop(request_id, None)
                raise
        del self._pending[request_id]
        reply, received_ns, decode_ns, bytes_received = self._arrived.pop(request_id)
        if reply.error is not None or reply.response is None:
            raise ServiceError(
                f"{pending.method} at {self.endpoint}", code=reply.error or ErrorCode.INTERNAL
            )
        if reply.method != pending.method:
            raise ReplyError(
                f"reply {request_id} from {self.endpoint}",
                got=reply.method if reply.method in REQUEST_TYPES else "an unknown operator",
                expected=pending.method,
            )
        traffic = self.traffic
        traffic.round_trips += 1
        traffic.bytes_sent += pending.bytes_sent
        traffic.bytes_received += bytes_received
        return Exchange(
            reply.response,
            pending.bytes_sent,
            bytes_received,
            pending.encode_ns,
            received_ns - pending.sent_ns,
            decode_ns,
            reply.timing,
            pending.sent_ns,
        )

    def call(self, request: Request, timeout_s: float | None = None) -> Exchange:
        """See `Channel.call`."""
        return self.wait(self.submit(request, timeout_s))

    def abandon(self, request_id: int) -> None:
        """See `Channel.abandon`."""
        self._pending.pop(request_id, None)
        self._arrived.pop(request_id, None)

    def limit_messages(self, max_message_bytes: int) -> None:
        """See `Channel.limit_messages`."""
        self._max_message_bytes = min(self._max_message_bytes, max_message_bytes)

    def _wait_until_arrived(self, request_id: int, pending: Pending) -> None:
        while True:
            lost = pending.connection != self._connection
            # Its reply may have come before the connection was lost; but nothing more will.
            received = self._receive(0.0 if lost else pending.deadline)
            if received is not None:
                self._accept(*received)
                if request_id in self._arrived:
                    return
            elif lost:
                raise self._connection_lost(f"while {pending.method} was waiting for its reply")
            # Whatever came: a peer that keeps sending what nobody waits for must not hold us past
            # the deadline.
            if time.monotonic() >= pending.deadline and not lost:
                raise DeadlineExceededError(
                    self.endpoint,
                    got=f"no reply to {pending.method} within {pending.timeout_s:g} s",
                    expected="a gpu-service that answers there",
                )

    def _accept(self, frames: Sequence[memoryview], received_ns: int) -> None:
        """Decode a reply and keep it for who waits for it, if anybody does."""
        started_ns = time.perf_counter_ns()
        reply = decode_reply(frames)
        request_id = reply.request_id
        if request_id in self._pending and request_id not in self._arrived:
            decode_ns = time.perf_counter_ns() - started_ns
            self._arrived[request_id] = (reply, received_ns, decode_ns, frame_bytes(frames))
        elif not 0 < request_id <= self._last_id:
            raise ProtocolError(
                f"reply from {self.endpoint}",
                got=f"request id {request_id}"
                + (f" with {reply.error.value}" if reply.error else ""),
                expected="the id of a request that was sent",
                code=ErrorCode.MALFORMED_MESSAGE,
            )

    def _connection_lost(self, when: str) -> EndpointError:
        return EndpointError(
            self.endpoint,
            got=f"a lost connection {when}",
            expected="a gpu-service that stays (it may have stopped: see its log)",
        )
