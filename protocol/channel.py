"""How a request reaches the service and its reply comes back, whatever carries the bytes.

`Channel` is the client's end; `protocol.transport.open_channel` makes one. The service's end is the
GPU side's own business. Several requests may be in flight: `start` returns at once, `wait` returns
the reply to one of them. A channel belongs to one thread.

`PendingChannel` is all of a channel but the transport, which a subclass adds in three methods: what
every channel keeps of its requests, ids, deadlines and replies.
"""

import secrets
import time
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, Self, TypeAlias

import torch

from protocol.encoding import REPLY, REQUEST, Reply, decode_reply, encode_request
from protocol.errors import (
    DeadlineExceededError,
    EndpointError,
    ErrorCode,
    ProtocolError,
    ReplyError,
    ServiceError,
    TsqpError,
)
from protocol.messages import (
    MAX_TIMEOUT_MS,
    MAX_TIMING_US,
    REQUEST_TYPES,
    Request,
    Timing,
    checked_timing,
    tensor_reply,
)
from protocol.prepared import Exchange, Payload, PreparedRequest, Traffic
from protocol.tensors import Buffer, WireTensor

# How long a request may wait for a lost connection to come back before it is sent.
RECONNECT_S = 2.0
# ZeroMQ replaces a lost connection by itself, but not sooner than twice this. A reply that came
# sooner after its request came over the connection on which that went out.
_RECONNECT_NS = 50_000_000
# Of the first request id of a channel, which is drawn: a reply that was recorded in another session
# answers nothing in this one.
_ID_BITS = 62
# The place of a request that compiled code has not sent.
NOT_PUT = -1

# The frames of one message, and when the last of them had come.
Received: TypeAlias = tuple[Sequence[memoryview], int]


class Channel(Protocol):
    """A connection to one service."""

    endpoint: str
    traffic: Traffic

    def start(
        self, prepared: PreparedRequest, payload: Payload, timeout_s: float | None = None
    ) -> int:
        """Send a prepared request with these tensors, and return its id.

        Each must be of the prepared shape and dtype, and must not be written to from now on
        (`protocol.tensors.raw_bytes`). `PreparedRequest.output` reads the reply. Raises
        EndpointError, and ProtocolError for another form, or a request that is too large.
        """

    def wait(self, request_id: int) -> Exchange:
        """Return the reply to a request that was sent.

        Raises DeadlineExceededError, EndpointError (the connection was lost), ServiceError (an
        error reply), ProtocolError (undecodable, or an id that was never sent) and ReplyError (a
        reply to another operator).
        """

    def abandon(self, request_id: int) -> None:
        """Stop waiting for a request; its reply is dropped. Unknown ids do nothing."""

    def distrust(self, exchange: Exchange, error: TsqpError) -> None:
        """Ask the service that sent this no more: a wrong result, or one of a wrong form.

        Raises `error` where no other service is left to ask, as none is for a channel to one
        service; else the same request may be sent again.
        """
        raise error

    def close(self) -> None:
        """Disconnect; pending requests are dropped."""


# Lays something over a channel, such as the model of a slower link, and returns the channel to use
# instead. The number: the deadline of a request that names none, in seconds.
ChannelWrapper: TypeAlias = Callable[[Channel, float], Channel]


class OversizedRequestError(ProtocolError):
    """A request of our own that is larger than the limit; it was not sent."""


@dataclass(slots=True, eq=False, kw_only=True)
class Pending(Exchange):
    """A request that was sent, and once its reply is there the exchange.

    `deadline`: on the clock of `time.monotonic`, in seconds. `connection`: which of the channel's
    connections, one after another, it went out on. `prepared`: what a good reply says; None for a
    request whose reply is always decoded. `place`: where compiled code has put it, the transport's
    own business.

    `received_ns`: when the reply had come, 0 until then. Of one that compiled code has taken,
    `output` is its tensor and `times_us` says its two times; any other is `reply`.
    """

    method: str
    deadline: float
    timeout_s: float
    prepared: PreparedRequest | None = None
    connection: int = 0
    place: int = NOT_PUT
    received_ns: int = 0
    times_us: Sequence[int] = ()
    reply: Reply | None = None


class PendingChannel(Channel):
    """A `Channel` without its transport.

    `timeout_s` is the deadline of a request that names none. A reply that comes after its request
    was given up is dropped; one whose id was never sent is a ProtocolError. All waiting goes by
    `time.monotonic`: it does not matter what happens to the machine's clock.
    """

    def __init__(self, endpoint: str, *, timeout_s: float, max_message_bytes: int) -> None:
        self.endpoint = endpoint
        self.traffic = Traffic()
        self._timeout_s = timeout_s
        self._max_message_bytes = max_message_bytes
        # A reply may be as large as the service's limit allows, which we know only after the first
        # one: so `limit_messages` does not touch it.
        self._max_reply_bytes = max_message_bytes
        self._first_id = self._last_id = secrets.randbits(_ID_BITS)
        self._pending: dict[int, Pending] = {}
        # Counts lost connections: a request that went out on another one than this has no reply
        # to hope for.
        self._connection = 0
        self._one_connection = False
        # What a transport knows of how the last one was lost.
        self._why = ""

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

    def _put(
        self, prepared: PreparedRequest, payload: torch.Tensor, request_id: int, timeout_ms: int
    ) -> int:
        """Send a prepared request by compiled code; say where it is, or `NOT_PUT`.

        The tensor is as prepared, in one piece, and the request within the limit.
        """
        return NOT_PUT

    def _take(self, pending: Pending, prepared: PreparedRequest, request_id: int) -> None:
        """Take the reply to a prepared request by compiled code, if it comes in a moment."""

    def _was_replaced(self, connection: int) -> bool:
        """Say whether a reply that comes now may have come over a later connection than this.

        Without waiting. For a transport that replaces a lost connection by itself; others never do.
        """
        return False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def submit(
        self,
        request: Request,
        timeout_s: float | None = None,
        *,
        send_within_s: float = float("inf"),
    ) -> int:
        """Send any request and return its id. Raises EndpointError, ProtocolError (too large).

        `send_within_s`: as long as sending may take, if less than all.
        """
        begun_ns = time.perf_counter_ns()
        timeout_s = self._timeout_s if timeout_s is None else timeout_s
        timeout_ms = min(max(1, int(timeout_s * 1000)), MAX_TIMEOUT_MS)
        frames = encode_request(request, self._last_id + 1, timeout_ms)
        pending = Pending(
            method=request.method,
            deadline=time.monotonic() + timeout_s,
            timeout_s=timeout_s,
            bytes_sent=sum(map(len, frames)),
        )
        return self._begin(pending, frames, begun_ns, min(timeout_s, send_within_s))

    def call(self, request: Request, timeout_s: float | None = None) -> Exchange:
        """Submit and wait."""
        return self.wait(self.submit(request, timeout_s))

    def start(
        self, prepared: PreparedRequest, payload: Payload, timeout_s: float | None = None
    ) -> int:
        """See `Channel.start`."""
        begun_ns = time.perf_counter_ns()
        timeout_s = self._timeout_s if timeout_s is None else timeout_s
        timeout_ms = min(max(1, int(timeout_s * 1000)), MAX_TIMEOUT_MS)
        request_id, size, place = self._last_id + 1, prepared.request_bytes, NOT_PUT
        sent_ns = time.perf_counter_ns()
        if (
            (isinstance(payload, torch.Tensor) and payload.shape == prepared.shape)
            and (payload.dtype is prepared.torch_dtype and payload.is_contiguous())
            and (payload.is_cpu and prepared.sent_as.address)
            and size <= self._max_message_bytes
        ):
            place = self._put(prepared, payload, request_id, timeout_ms)
        pending = Pending(  # the service may read it meanwhile
            method=prepared.method,
            deadline=time.monotonic() + timeout_s,
            timeout_s=timeout_s,
            bytes_sent=size,
            bytes_received=prepared.reply_bytes,
            encode_ns=sent_ns - begun_ns,
            sent_ns=sent_ns,
            prepared=prepared,
            connection=self._connection,
            place=place,
        )
        if place != NOT_PUT:
            self._last_id, self._pending[request_id] = request_id, pending
            return request_id
        header = REQUEST.header(prepared.template, request_id, timeout_ms)
        return self._begin(pending, [header, *prepared.payload(payload)], begun_ns, timeout_s)

    def _begin(
        self, pending: Pending, frames: Sequence[Buffer], begun_ns: int, send_within_s: float
    ) -> int:
        """Send a request with the next id, and wait for its reply from now on."""
        self._last_id = request_id = self._last_id + 1
        size = pending.bytes_sent
        if size > self._max_message_bytes:
            raise OversizedRequestError(
                f"{pending.method} to {self.endpoint}",
                f"{size} bytes",
                f"at most {self._max_message_bytes} (fewer tokens in a step send less)",
                code=ErrorCode.LIMIT_EXCEEDED,
            )
        pending.encode_ns = time.perf_counter_ns() - begun_ns
        pending.sent_ns = self._send(pending.method, frames, size, send_within_s)
        pending.connection = self._connection
        self._pending[request_id] = pending
        return request_id

    def wait(self, request_id: int) -> Exchange:
        """See `Channel.wait`."""
        pending = self._pending[request_id]
        try:
            if not pending.received_ns and pending.prepared is not None:
                self._take(pending, pending.prepared, request_id)
            if not pending.received_ns:
                self._wait_until(pending, pending.deadline)
        finally:
            # Also given up: should it still come, it must not be taken for another's.
            self.abandon(request_id)
        reply = pending.reply
        if pending.output is not None:
            queue_us, compute_us = pending.times_us
            pending.timing = checked_timing({"queue_us": queue_us, "compute_us": compute_us})
        elif reply is None:
            raise DeadlineExceededError(
                self.endpoint,
                f"no reply to {pending.method} within {pending.timeout_s:g} s",
                "a gpu-service that answers there",
            )
        elif reply.error is not None:
            raise ServiceError(f"{pending.method} at {self.endpoint}", code=reply.error)
        elif reply.method != pending.method:
            raise ReplyError(
                f"reply {request_id} from {self.endpoint}",
                reply.method if reply.method in REQUEST_TYPES else "an unknown operator",
                pending.method,
            )
        else:
            pending.response, pending.timing = reply.response, reply.timing
        pending.endpoint, pending.elapsed_ns = self.endpoint, pending.received_ns - pending.sent_ns
        traffic = self.traffic
        traffic.round_trips += 1
        traffic.bytes_sent += pending.bytes_sent
        traffic.bytes_received += pending.bytes_received
        return pending

    def abandon(self, request_id: int) -> None:
        """See `Channel.abandon`."""
        self._pending.pop(request_id, None)

    def limit_messages(self, max_message_bytes: int) -> None:
        """Send no larger messages than this from now on; a higher limit than before is ignored."""
        self._max_message_bytes = min(self._max_message_bytes, max_message_bytes)

    def arrived(self, request_id: int, until: float = 0.0) -> bool:
        """Say whether the reply to a submitted request has come, and `wait` has not to wait.

        Waits for it until then at most (time.monotonic; 0: not at all), and no longer than its
        deadline. Raises EndpointError and ProtocolError as `wait` does, which then raises them
        again.
        """
        pending = self._pending[request_id]
        until = min(until, pending.deadline)
        return pending.received_ns > 0 or self._wait_until(pending, until)

    def use_one_connection(self) -> None:
        """Never go on with another connection: what is asked after a loss raises EndpointError.

        To be called before the first request, by a caller that must know the process: another one
        may be at the endpoint by then.
        """
        self._one_connection = True

    def limit_replies(self, max_reply_bytes: int) -> None:
        """Take no larger replies than this; to be called before the first request."""
        self._max_reply_bytes = min(self._max_reply_bytes, max_reply_bytes)

    def _wait_until(self, pending: Pending, until: float) -> bool:
        """Receive what comes until the reply to this is there; False at `until`."""
        while True:
            lost = pending.connection != self._connection
            # Its reply may have come before the connection was lost; but nothing more will.
            received = self._receive(0.0 if lost else until)
            if received is not None:
                self._accept(*received)
            if pending.received_ns:
                return True
            # Whatever came: a peer that keeps sending unasked replies must not hold the caller past
            # the deadline.
            over = time.monotonic() >= until
            if lost and (received is None or (over and until >= pending.deadline)):
                raise self._connection_lost(f"while {pending.method} was waiting for its reply")
            if over:
                return False

    def _refuse_second_connection(self, method: str) -> None:
        """Raise EndpointError if the only connection that may be used has been lost."""
        if self._one_connection and self._connection:
            raise self._connection_lost(f"before {method} could be sent")

    def _accept(self, frames: Sequence[memoryview], received_ns: int) -> None:
        """Decode a reply and keep it for its caller, if one waits.

        Looked at here, and not where it is waited for: many may be in flight, and it is any of them
        that a message answers.
        """
        started_ns = time.perf_counter_ns()
        size = sum(map(len, frames))
        ProtocolError.at_most(self._max_reply_bytes, f"reply from {self.endpoint}", size)
        reply = self._expected_reply(frames) or decode_reply(frames)
        request_id = reply.request_id
        pending = self._pending.get(request_id)
        if pending is not None and not pending.received_ns:
            decode_ns = time.perf_counter_ns() - started_ns
            # One that took so long may have come over another connection than its request went out
            # on: the peer there was sent the request by ZeroMQ, and may hold another model.
            slow = received_ns - pending.sent_ns > _RECONNECT_NS
            if not (slow and self._one_connection and self._was_replaced(pending.connection)):
                pending.reply, pending.received_ns = reply, received_ns
                pending.decode_ns, pending.bytes_received = decode_ns, size
        elif not self._first_id < request_id <= self._last_id:
            raise ProtocolError(
                f"reply from {self.endpoint}",
                f"request id {request_id}" + (f" with {reply.error.value}" if reply.error else ""),
                "the id of a request that was sent",
            )

    def _expected_reply(self, frames: Sequence[memoryview]) -> Reply | None:
        """Return the reply if it is exactly the one that a prepared request expects, else None."""
        if len(frames) != 2 or (split := REPLY.split(frames[0])) is None:
            return None
        (request_id, queue_us, compute_us), template = split
        pending = self._pending.get(request_id)
        prepared = None if pending is None else pending.prepared
        if (
            prepared is None
            or template != prepared.reply_template
            or frames[1].nbytes != prepared.reply_payload_bytes
            or queue_us > MAX_TIMING_US
            or compute_us > MAX_TIMING_US
        ):
            return None
        output = WireTensor(prepared.reply_dtype, prepared.reply_shape, frames[1])
        timing: Timing = checked_timing({"queue_us": queue_us, "compute_us": compute_us})
        return Reply(request_id, prepared.method, tensor_reply({"output": output}), None, timing)

    def _connection_lost(self, when: str) -> EndpointError:
        return EndpointError(
            self.endpoint,
            f"a lost connection {when}{self._why}",
            "a gpu-service that stays (it may have stopped: see its log)",
        )
