"""ZeroMQ transport: DEALER on the TEE side, ROUTER on the GPU side.

The ROUTER also serves plain REQ sockets: their empty delimiter frame is kept with the peer's
identity and put back in front of the reply. Heartbeats, authentication and failover are not here
yet (docs/limitations.md).
"""

from __future__ import annotations

import os
import re
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass

import zmq
from zmq.utils.monitor import parse_monitor_message

from protocol.channel import Exchange, Traffic
from protocol.encoding import DEFAULT_MAX_MESSAGE_BYTES, Reply, decode_reply, encode_request
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

# Below this ZeroMQ copies the bytes, which is faster than tracking the buffer's lifetime.
COPY_THRESHOLD_BYTES = 64 * 1024
# Per client and direction, at the service; a message can be as large as the message limit.
QUEUED_MESSAGES = 16
RECONNECT_S = 2.0
# How often a waiting client looks whether its connection is still there.
EVENTS_INTERVAL_MS = 100

_TCP = re.compile(
    r"tcp://(?P<host>[A-Za-z0-9._-]+|\*|\[[0-9A-Fa-f:.]+(%[A-Za-z0-9._-]+)?\])"
    r":(?P<port>\*|[0-9]{1,5})"
)


def check_endpoint(endpoint: str, *, for_bind: bool = False) -> None:
    """Refuse anything but `tcp://HOST:PORT` and `ipc://PATH`. Raises EndpointError."""
    if (tcp := _TCP.fullmatch(endpoint)) is not None:
        host, port = tcp["host"], tcp["port"]
        good_port = for_bind if port in ("*", "0") else port != "*" and 0 < int(port) < 2**16
        if good_port and (for_bind or host != "*"):
            return
    path = endpoint.removeprefix("ipc://")
    if endpoint.startswith("ipc://") and path:
        if len(os.fsencode(path)) > zmq.IPC_PATH_MAX_LEN:
            raise EndpointError(
                endpoint,
                got=f"a path of {len(os.fsencode(path))} bytes",
                expected=f"at most {zmq.IPC_PATH_MAX_LEN}",
            )
        return
    raise EndpointError("endpoint", got=repr(endpoint), expected="tcp://HOST:PORT or ipc://PATH")


def _frame_bytes(frames: Sequence[Buffer]) -> int:
    return sum(f.nbytes if isinstance(f, memoryview) else len(f) for f in frames)


def _receive_frames(zmq_socket: zmq.Socket[bytes], flags: int = zmq.NOBLOCK) -> list[memoryview]:
    """Receive one multipart message; each frame's memory is viewed, not copied."""
    return [frame.buffer for frame in zmq_socket.recv_multipart(flags, copy=False)]


def _send_frames(zmq_socket: zmq.Socket[bytes], frames: Sequence[Buffer]) -> None:
    last = len(frames) - 1
    for index, frame in enumerate(frames):
        flags = zmq.NOBLOCK | (zmq.SNDMORE if index < last else 0)
        size = frame.nbytes if isinstance(frame, memoryview) else len(frame)
        zmq_socket.send(frame, flags, copy=size < COPY_THRESHOLD_BYTES)


@dataclass(slots=True)
class _Pending:
    method: str
    deadline: float
    timeout_s: float
    sent_ns: int
    encode_ns: int
    bytes_sent: int


class ZmqChannel:
    """Our client: framed messages over a DEALER socket.

    `timeout_s` is the deadline of a request that names none. A reply that comes after its request
    was given up is dropped; one whose id was never sent is a ProtocolError.
    """

    def __init__(
        self,
        endpoint: str,
        *,
        timeout_s: float = 30.0,
        max_message_bytes: int = DEFAULT_MAX_MESSAGE_BYTES,
    ) -> None:
        check_endpoint(endpoint)
        self.endpoint = endpoint
        self.traffic = Traffic()
        self._timeout_s = timeout_s
        self._max_message_bytes = max_message_bytes
        self._last_id = 0
        self._pending: dict[int, _Pending] = {}
        self._arrived: dict[int, tuple[Reply, int, int, int]] = {}
        self._context = zmq.Context()
        self._socket: zmq.Socket[bytes] = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.MAXMSGSIZE, max_message_bytes)
        self._socket.setsockopt(zmq.IPV6, "[" in endpoint)
        # Set from the loss of an established connection until ZeroMQ has made a new one.
        self._lost = False
        self._events = self._socket.get_monitor_socket(
            zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_SUCCEEDED
        )
        self._patience_ms = -1
        try:
            self._socket.connect(endpoint)
        except zmq.ZMQError as error:
            self.close()
            raise EndpointError(
                endpoint, got=os.strerror(error.errno or 0), expected="an address to connect to"
            ) from None

    def __enter__(self) -> ZmqChannel:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def submit(self, request: Request, timeout_s: float | None = None) -> int:
        """See `Channel.submit`."""
        started_ns = time.perf_counter_ns()
        timeout_s = self._timeout_s if timeout_s is None else timeout_s
        self._last_id += 1
        request_id = self._last_id
        timeout_ms = min(max(1, int(timeout_s * 1000)), MAX_TIMEOUT_MS)
        frames = encode_request(request, request_id, timeout_ms)
        size = _frame_bytes(frames)
        if size > self._max_message_bytes:
            raise ProtocolError(
                f"{request.method} to {self.endpoint}",
                got=f"{size} bytes",
                expected=f"at most {self._max_message_bytes} (fewer tokens in a step send less)",
                code=ErrorCode.LIMIT_EXCEEDED,
            )
        self._wait_for_reconnection(request.method, min(RECONNECT_S, timeout_s))
        sent_ns = time.perf_counter_ns()
        try:
            _send_frames(self._socket, frames)
        except zmq.Again:
            raise EndpointError(
                self.endpoint, got="a full send queue", expected="a service that reads"
            ) from None
        self._pending[request_id] = _Pending(
            request.method,
            time.monotonic() + timeout_s,
            timeout_s,
            sent_ns,
            sent_ns - started_ns,
            size,
        )
        return request_id

    def wait(self, request_id: int) -> Exchange:
        """See `Channel.wait`."""
        pending = self._pending[request_id]
        while request_id not in self._arrived:
            try:
                self._receive_one(pending)
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
        self.traffic.round_trips += 1
        self.traffic.bytes_sent += pending.bytes_sent
        self.traffic.bytes_received += bytes_received
        return Exchange(
            reply.response,
            pending.bytes_sent,
            bytes_received,
            pending.encode_ns,
            received_ns - pending.sent_ns,
            decode_ns,
            reply.timing,
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

    def close(self) -> None:
        """See `Channel.close`."""
        self._socket.disable_monitor()
        self._events.close()
        self._socket.close()
        self._context.term()

    def _note_events(self) -> None:
        """Read what ZeroMQ says of the connection."""
        # The socket's own flag: polling takes five times as long, at every request.
        while int(self._events.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            event = parse_monitor_message(self._events.recv_multipart())["event"]
            self._lost = event == zmq.EVENT_DISCONNECTED

    def _wait_for_reconnection(self, method: str, patience_s: float) -> None:
        """Give ZeroMQ a moment to replace a lost connection; raise EndpointError if it cannot.

        A request sent into the void would be known to be lost only at its deadline.
        """
        self._note_events()
        if not self._lost:
            return
        until = time.monotonic() + patience_s
        while self._lost:
            if not self._events.poll(max(0, int((until - time.monotonic()) * 1000))):
                raise self._connection_lost(f"before {method} could be sent")
            self._note_events()

    def _connection_lost(self, when: str) -> EndpointError:
        return EndpointError(
            self.endpoint,
            got=f"a lost connection {when}",
            expected="a gpu-service that stays (it may have stopped: see its log)",
        )

    def _too_late(self, pending: _Pending) -> DeadlineExceededError:
        return DeadlineExceededError(
            self.endpoint,
            got=f"no reply to {pending.method} within {pending.timeout_s:g} s",
            expected="a gpu-service that answers there",
        )

    def _next_message(self, patience_ms: int) -> list[memoryview] | None:
        """Return what arrives next, None if nothing does.

        Waiting in the call that receives takes a third less time than polling both sockets first,
        in every round trip.
        """
        if patience_ms != self._patience_ms:
            self._socket.setsockopt(zmq.RCVTIMEO, patience_ms)
            self._patience_ms = patience_ms
        try:
            return _receive_frames(self._socket, 0)
        except zmq.Again:
            return None

    def _receive_one(self, pending: _Pending) -> None:
        remaining_ms = max(0, int((pending.deadline - time.monotonic()) * 1000))
        frames = self._next_message(min(remaining_ms, EVENTS_INTERVAL_MS))
        if frames is None:
            if remaining_ms == 0:
                raise self._too_late(pending)
            self._note_events()
            if self._lost:
                raise self._connection_lost(f"while {pending.method} was waiting for its reply")
            return
        received_ns = time.perf_counter_ns()
        reply = decode_reply(frames)
        if reply.request_id in self._pending and reply.request_id not in self._arrived:
            decode_ns = time.perf_counter_ns() - received_ns
            self._arrived[reply.request_id] = (reply, received_ns, decode_ns, _frame_bytes(frames))
        elif not 0 < reply.request_id <= self._last_id:
            raise ProtocolError(
                f"reply from {self.endpoint}",
                got=f"request id {reply.request_id}"
                + (f" with {reply.error.value}" if reply.error else ""),
                expected="the id of a request that was sent",
                code=ErrorCode.MALFORMED_MESSAGE,
            )
        elif time.monotonic() > pending.deadline:
            # A peer that keeps sending what nobody waits for must not hold us past the deadline.
            raise self._too_late(pending)


@dataclass(frozen=True, slots=True)
class Incoming:
    """One received message: where the reply must go, and the frames of the message itself."""

    route: tuple[bytes, ...]
    frames: list[memoryview]
    received_ns: int

    @property
    def peer(self) -> str:
        """A short name of the client for logs."""
        return self.route[0].hex()


class ZmqListener:
    """The service's end: a ROUTER socket that hands out messages and takes replies.

    Raises EndpointError when the endpoint is malformed, in use or not ours to bind.
    """

    def __init__(
        self, endpoint: str, *, max_message_bytes: int = DEFAULT_MAX_MESSAGE_BYTES
    ) -> None:
        check_endpoint(endpoint, for_bind=True)
        _refuse_live_ipc(endpoint)
        self._context = zmq.Context()
        self._socket: zmq.Socket[bytes] = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 500)
        self._socket.setsockopt(zmq.MAXMSGSIZE, max_message_bytes)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        # A client that sends and does not read must not make us hold its replies without end.
        self._socket.setsockopt(zmq.SNDHWM, QUEUED_MESSAGES)
        self._socket.setsockopt(zmq.RCVHWM, QUEUED_MESSAGES)
        self._socket.setsockopt(zmq.IPV6, "[" in endpoint)
        try:
            self._socket.bind(endpoint)
        except zmq.ZMQError as error:
            self.close()
            raise EndpointError(
                endpoint, got=os.strerror(error.errno or 0), expected="an address to bind"
            ) from None
        self.endpoint: str = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)

    def wait(self, *, wakeup: socket.socket | None = None, timeout_ms: int | None = None) -> bool:
        """Block until a message can be received; False on time-out or if `wakeup` is readable."""
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        if wakeup is not None:
            poller.register(wakeup, zmq.POLLIN)
        events = dict(poller.poll(timeout_ms))
        stopping = wakeup is not None and wakeup.fileno() in events
        return not stopping and self._socket in events

    def receive(self) -> Incoming | None:
        """Return the next message, or None when there is none or it is not a message at all."""
        try:
            parts = _receive_frames(self._socket)
        except zmq.Again:
            return None
        received_ns = time.perf_counter_ns()
        has_delimiter = len(parts) > 1 and parts[1].nbytes == 0
        split = 2 if has_delimiter else 1
        return Incoming(tuple(bytes(p) for p in parts[:split]), parts[split:], received_ns)

    def send(self, route: Sequence[bytes], frames: Sequence[Buffer]) -> bool:
        """Send a reply; False if the client has gone or does not read."""
        try:
            _send_frames(self._socket, [*route, *frames])
        except zmq.ZMQError as error:
            if error.errno in (zmq.EHOSTUNREACH, zmq.EAGAIN):
                return False
            raise
        return True

    def close(self) -> None:
        """Stop listening; replies on their way get half a second."""
        self._socket.close()
        self._context.term()


def _refuse_live_ipc(endpoint: str) -> None:
    """Raise EndpointError where a live service owns the socket file.

    libzmq unlinks an existing file before it binds, and would silently take over from it.
    """
    if not endpoint.startswith("ipc://"):
        return
    path = endpoint.removeprefix("ipc://")
    if path.startswith("@"):
        path = "\0" + path[1:]
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(path)
        except OSError:
            return
    raise EndpointError(endpoint, got="Address already in use", expected="an address to bind")
