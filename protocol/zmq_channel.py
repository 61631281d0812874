"""The client's end of ZeroMQ, and what both ends have in common: options, messages, own events.

The client sends framed messages over a DEALER socket. ZeroMQ makes a lost connection again by
itself, but not after what it takes for a violation of its protocol: a refused key, a message that
is too large or was changed on the way. So once a connection has ended, the next request is sent
over a new socket, which has nothing queued from before.

Heartbeats: each side asks the other four times in a time-out whether it is there, and ends a
connection on which nothing has come for that long. ZeroMQ's own thread asks and answers, whatever
Python is busy with. What counts is a complete frame: one that takes longer than the time-out to
arrive ends its connection, so over slow links the time-out must be longer than the largest frame
takes.
`ZMQ_HEARTBEAT_TTL` stays 0, which leaves to each side how patient it is.
"""

import errno
import os
import socket
import sys
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from math import ceil

import zmq
from zmq.utils.monitor import parse_monitor_message

from protocol.channel import RECONNECT_S, PendingChannel, Received
from protocol.curve import ClientKeys
from protocol.encoding import DEFAULT_MAX_MESSAGE_BYTES, MAX_REPLY_FRAMES
from protocol.endpoint import Endpoint, parse_endpoint
from protocol.errors import AbsentError, EndpointError, ErrorCode, ProtocolError
from protocol.liveness import DEFAULT_HEARTBEAT_TIMEOUT_S, AdaptiveSpin
from protocol.tensors import Buffer

# A peer that is stopped accepts connections, which its kernel does, and goes no further.
HANDSHAKE_TIMEOUT_MS = 2000
# How long ZeroMQ waits for TCP to connect before it tries again.
CONNECT_TIMEOUT_MS = 2000
# Per connection and direction; a message can be as large as the message limit. Where as many wait
# ZeroMQ stops reading, heartbeats as well, and the connection ends: so it is more than an honest
# peer has under way (64, one for each micro-batch) while the other side is busy with one of them.
QUEUED_MESSAGES = 128
# Below this ZeroMQ copies the bytes, which is faster than tracking the buffer's lifetime.
COPY_THRESHOLD_BYTES = 64 * 1024

# Where `tcpi_bytes_received` is in `struct tcp_info` (linux/tcp.h, since Linux 4.1).
_RECEIVED_AT = 128

# Plain numbers: an operation on pyzmq's enumerations takes longer than a look at the socket.
_POLLIN = int(zmq.POLLIN)
DONTWAIT = int(zmq.NOBLOCK)
_DONTWAIT_MORE = int(zmq.NOBLOCK | zmq.SNDMORE)

# How often a waiting client looks whether its connection is still there.
EVENTS_INTERVAL_S = 0.1
# How long it takes at most until a handshake's failure is told of.
_NOTICE_S = 1.0
# Heartbeats, and a few bytes for each frame.
_BYTES_OF_ITS_OWN = 2**20

_NO_DETAIL = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
_EVENTS = int(
    zmq.EVENT_CONNECTED
    | zmq.EVENT_CLOSED
    | zmq.EVENT_DISCONNECTED
    | zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | _NO_DETAIL
)


def set_options(
    zmq_socket: zmq.Socket[bytes],
    endpoint: str,
    *,
    max_message_bytes: int,
    heartbeat_timeout_s: float,
) -> None:
    """Set what holds for both ends. `heartbeat_timeout_s`: 0 is without heartbeats."""
    options = {
        zmq.MAXMSGSIZE: max_message_bytes,
        zmq.RCVHWM: QUEUED_MESSAGES,
        zmq.SNDHWM: QUEUED_MESSAGES,
        zmq.IPV6: "[" in endpoint,
        zmq.HANDSHAKE_IVL: HANDSHAKE_TIMEOUT_MS,
        zmq.CONNECT_TIMEOUT: CONNECT_TIMEOUT_MS,
    }
    if heartbeat_timeout_s > 0:
        timeout_ms = max(2, ceil(heartbeat_timeout_s * 1000))
        options |= {zmq.HEARTBEAT_IVL: max(1, timeout_ms // 4), zmq.HEARTBEAT_TIMEOUT: timeout_ms}
    for option, value in options.items():
        zmq_socket.setsockopt(option, value)


def receive_frames(
    zmq_socket: zmq.Socket[bytes], flags: int = DONTWAIT, *, max_frames: int
) -> tuple[list[memoryview], zmq.Frame]:
    """Receive one multipart message; each frame's memory is viewed, not copied.

    Returns the frames' memory, and the last frame, which knows who sent it. As `recv_multipart`
    does it, which asks the socket after each frame whether another follows. Of a message of more
    than `max_frames` the others are still in the socket, and the last frame's `more` says so: each
    takes a few bytes on the wire, and hundreds here.
    """
    frame = zmq_socket.recv(flags, copy=False)
    frames = [frame.buffer]
    while frame.more and len(frames) < max_frames:
        frame = zmq_socket.recv(flags, copy=False)
        frames.append(frame.buffer)
    return frames, frame


def send_frames(
    zmq_socket: zmq.Socket[bytes],
    frames: Sequence[Buffer],
    large: list[tuple[zmq.MessageTracker, int]] | None = None,
) -> None:
    """Send one multipart message, or raise zmq.Again where the queue is full.

    `large`: gets what tells of each frame that is not copied when ZeroMQ is done with it, and how
    many bytes it is.
    """
    last = len(frames) - 1
    for index, frame in enumerate(frames):
        flags = DONTWAIT if index == last else _DONTWAIT_MORE
        size = frame.nbytes if isinstance(frame, memoryview) else len(frame)
        if size < COPY_THRESHOLD_BYTES:
            zmq_socket.send(frame, flags)
        elif large is None:
            zmq_socket.send(frame, flags, copy=False)
        else:
            large.append((zmq_socket.send(frame, flags, copy=False, track=True), size))


def is_readable(zmq_socket: zmq.Socket[bytes]) -> bool:
    """Ask the socket's own flag: a fifth of what polling takes, or failing to receive."""
    return bool(int(zmq_socket.get(zmq.EVENTS)) & _POLLIN)


def watch(
    context: zmq.Context[zmq.Socket[bytes]], watched: zmq.Socket[bytes], events: int
) -> zmq.Socket[bytes]:
    """Return a socket that tells the events of another one.

    ZeroMQ's own thread writes them, and would wait for ever at a queue that is full: this one has
    no limit.
    """
    address = f"inproc://events-of-{int(watched.getsockopt(zmq.FD))}"
    watched.monitor(address, events)
    events_socket = context.socket(zmq.PAIR)
    events_socket.setsockopt(zmq.RCVHWM, 0)
    events_socket.setsockopt(zmq.LINGER, 0)
    events_socket.connect(address)
    return events_socket


def bytes_received(descriptor: int) -> int | None:
    """Return how many bytes have come over a TCP connection of ZeroMQ's, None where unknown.

    ZeroMQ hands out whole messages only, limits a frame and not their number, and so would gather
    one that never ends until memory does. The kernel counts what it has given to ZeroMQ.
    """
    try:
        with socket.socket(fileno=os.dup(descriptor)) as connection:
            info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _RECEIVED_AT + 8)
    except OSError:
        return None
    return int.from_bytes(info[_RECEIVED_AT:], sys.byteorder)


def require_zmq(endpoint: Endpoint) -> None:
    """Raise EndpointError for a stream's endpoint."""
    EndpointError.unless(
        endpoint.is_zmq, endpoint.text, "a stream", "tcp://HOST:PORT or ipc://PATH"
    )


class ZmqChannel(PendingChannel):
    """Our client.

    `spin_us`: see `protocol.liveness`. `heartbeat_timeout_s`: see `protocol.zmq_channel`. `keys`:
    ours, and that of the only service that may answer. A service with other keys, or one that
    refuses ours, is an EndpointError that says so.
    """

    def __init__(
        self,
        endpoint: str,
        *,
        timeout_s: float = 30.0,
        max_message_bytes: int = DEFAULT_MAX_MESSAGE_BYTES,
        spin_us: float = 0.0,
        keys: ClientKeys | None = None,
        heartbeat_timeout_s: float = DEFAULT_HEARTBEAT_TIMEOUT_S,
    ) -> None:
        require_zmq(parse_endpoint(endpoint))
        super().__init__(endpoint, timeout_s=timeout_s, max_message_bytes=max_message_bytes)
        self._spin = AdaptiveSpin(spin_us)
        self._keys = keys
        self._heartbeat_timeout_s = heartbeat_timeout_s
        # Set from the loss of a connection until there is a new one.
        self._lost = False
        # Set when ZeroMQ may not connect again by itself.
        self._ended = False
        # Why there is no connection: the error's class, what we got, and what we expected.
        self._refusal: tuple[type[EndpointError], str, str] | None = None
        # The connection's file descriptor, and how many bytes had come when a message was complete.
        self._descriptor = -1
        self._bytes_before: int | None = None
        # What had come over a socket that was given up.
        self._kept: deque[Received] = deque()
        self._context = zmq.Context()
        self._open()

    def _open(self) -> None:
        """Make a socket, which connects when it is first used."""
        self._socket: zmq.Socket[bytes] = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        if self._keys is not None:
            self._socket.setsockopt(zmq.CURVE_SECRETKEY, self._keys.secret)
            self._socket.setsockopt(zmq.CURVE_PUBLICKEY, self._keys.public)
            self._socket.setsockopt(zmq.CURVE_SERVERKEY, self._keys.service)
        self._events = watch(self._context, self._socket, _EVENTS)
        self._patience_ms = -1
        self._connected = self._ended = False

    def _close_socket(self) -> None:
        self._socket.disable_monitor()
        self._events.close()
        self._socket.close()

    def close(self) -> None:
        """See `Channel.close`."""
        if not self._socket.closed:
            self._close_socket()
        self._context.term()

    def _send(self, method: str, frames: Sequence[Buffer], size: int, timeout_s: float) -> int:
        self._wait_for_connection(method, min(RECONNECT_S, timeout_s))
        sent_ns = time.perf_counter_ns()
        try:
            send_frames(self._socket, frames)
        except zmq.Again:
            # A handshake that has just failed leaves no queue to put it in, and is told of next.
            until = time.monotonic() + min(_NOTICE_S, timeout_s)
            while not self._lost and (left_s := until - time.monotonic()) > 0:
                self._events.poll(ceil(1000 * left_s))
                self._note_events()
            if self._lost:
                raise self._connection_lost(f"before {method} could be sent") from None
            raise EndpointError(
                self.endpoint, "a full send queue", "a service that reads"
            ) from None
        return sent_ns

    def _note_events(self) -> None:
        """Read what ZeroMQ says of the connection."""
        while is_readable(self._events):
            message = parse_monitor_message(self._events.recv_multipart())
            event, value = int(message["event"]), int(message["value"])
            if event == zmq.EVENT_CONNECTED:
                self._descriptor, self._bytes_before = value, None
            elif event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._lost = self._ended = False
                self._refusal = None
            elif event == zmq.EVENT_CLOSED:
                # Nothing listens. ZeroMQ tries again, but not where one connection is allowed.
                if self._one_connection:
                    self._lost = True
                    self._refusal = (AbsentError, "nothing that listens", "a gpu-service")
                    self._connection += 1
            elif event == zmq.EVENT_DISCONNECTED:
                # Also follows a handshake that failed, and then its refusal, after which ZeroMQ
                # may try again.
                self._ended |= self._refusal is None
                self._lost = True
                self._connection += 1
            elif event == _NO_DETAIL and value in (errno.EAGAIN, errno.EINTR):
                # Of a time that is over the value is whatever the last call before it left.
                self._refusal = (AbsentError, "no handshake", "a gpu-service that answers there")
            else:
                self._ended |= event != _NO_DETAIL
                self._refusal = (EndpointError, *self._reason(event, value))

    def _was_replaced(self, connection: int) -> bool:
        self._note_events()
        return self._connection != connection

    def _reason(self, event: int, value: int) -> tuple[str, str]:
        """Say why a handshake was refused: what we got, and what we expected."""
        keys, failed = self._keys, "a handshake that failed"
        if keys is None:
            return (
                failed,
                "a gpu-service without keys, or --identity and --service-key for one with them",
            )
        if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
            return "a refusal of our key", f"a service that allows {keys.public.decode('ascii')}"
        if (
            event == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
            and value == zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH
        ):
            return "a service without keys", "one that holds the key of --service-key"
        return failed, "the service that holds the key of --service-key (has it another, or none?)"

    def _connection_lost(self, when: str) -> EndpointError:
        if self._refusal is None:
            return super()._connection_lost(when)
        error, got, expected = self._refusal
        return error(self.endpoint, f"{got} {when}", expected)

    def _wait_for_connection(self, method: str, patience_s: float) -> None:
        """Have a lost connection replaced in a moment; raise EndpointError if that cannot be.

        A request sent into the void would be known to be lost only at its deadline.
        """
        until = time.monotonic() + patience_s
        self._note_events()
        self._refuse_second_connection(method)
        if self._ended and self._lost:
            self._replace_socket(keep_until=until)
        if not self._connected:
            # A frame beyond the limit of replies already ends the connection.
            set_options(
                self._socket,
                self.endpoint,
                max_message_bytes=self._max_reply_bytes,
                heartbeat_timeout_s=self._heartbeat_timeout_s,
            )
            if self._one_connection:
                # ZeroMQ would send what it has queued over whatever connection it makes next.
                self._socket.setsockopt(zmq.RECONNECT_IVL, -1)
            try:
                # Now, and whenever ZeroMQ thinks it right.
                self._socket.connect(self.endpoint)
            except zmq.ZMQError as error:
                raise EndpointError(
                    self.endpoint, os.strerror(error.errno or 0), "an address to connect to"
                ) from None
            self._connected = True
        while self._lost:
            left_ms = max(0, ceil((until - time.monotonic()) * 1000))
            if self._ended or not self._events.poll(left_ms):
                raise self._connection_lost(f"before {method} could be sent")
            self._note_events()

    def _replace_socket(self, *, keep_until: float = 0.0) -> None:
        """Go on with a new socket, but take with us what has come over the old one.

        As many messages as it may hold itself, and until then (time.monotonic) at most: its other
        end may be there again, and go on sending.
        """
        # What follows a message with too many frames is lost with it.
        with suppress(ProtocolError):
            while (
                self._pending
                and len(self._kept) < QUEUED_MESSAGES
                and time.monotonic() < keep_until
                and (frames := self._next_message(0.0)) is not None
            ):
                self._kept.append((frames, time.perf_counter_ns()))
        self._close_socket()
        self._refusal = None
        self._open()

    def _end_connection(self, *, keep_until: float = 0.0) -> None:
        """Have done with a peer that breaks the rules; the next request makes a new connection."""
        self._lost = True
        self._connection += 1
        self._replace_socket(keep_until=keep_until)

    def _receive(self, deadline: float) -> Received | None:
        if self._kept:
            return self._kept.popleft()
        left_s = deadline - time.monotonic() if deadline else 0.0
        try:
            frames = self._spin.wait(self._next_message, min(left_s, EVENTS_INTERVAL_S))
        except ProtocolError:
            # To read the rest of the message may take longer than the caller has.
            self._end_connection()
            raise
        if frames is None:
            self._note_events()
            if deadline:
                self._check_unfinished(deadline)
            return None
        self._bytes_before = None
        return frames, time.perf_counter_ns()

    def _check_unfinished(self, deadline: float) -> None:
        """End the connection if a message grows beyond what a reply may be. Raises ProtocolError.

        Only over TCP, and only while a caller waits: looked at whenever nothing is complete.
        """
        if self._lost or (received := bytes_received(self._descriptor)) is None:
            return
        if self._bytes_before is None:
            self._bytes_before = received
        # Bytes of ZeroMQ's own, and what was on the way when we looked first.
        limit = 2 * self._max_reply_bytes + _BYTES_OF_ITS_OWN
        if (unfinished := received - self._bytes_before) > limit:
            self._end_connection(keep_until=deadline)
            raise ProtocolError(
                f"reply from {self.endpoint}",
                f"{unfinished} bytes of a message without its end",
                f"at most {self._max_reply_bytes}",
                code=ErrorCode.LIMIT_EXCEEDED,
            )

    def _next_message(self, patience_s: float) -> list[memoryview] | None:
        """Return what arrives next, None if nothing does.

        Waiting in the call that receives takes a third less time than polling both sockets first,
        in every round trip. Raises ProtocolError for too many frames; the socket is of no more use.
        """
        patience_ms, flags = max(0, ceil(patience_s * 1000)), 0
        if patience_ms == 0:
            flags = DONTWAIT
        elif patience_ms != self._patience_ms:
            self._socket.setsockopt(zmq.RCVTIMEO, patience_ms)
            self._patience_ms = patience_ms
        try:
            frames, last = receive_frames(self._socket, flags, max_frames=MAX_REPLY_FRAMES)
        except zmq.Again:
            return None
        if last.more:
            raise ProtocolError(
                f"reply from {self.endpoint}",
                f"more than {MAX_REPLY_FRAMES} frames",
                f"at most {MAX_REPLY_FRAMES}",
                code=ErrorCode.LIMIT_EXCEEDED,
            )
        return frames
