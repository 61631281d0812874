"""ZeroMQ transport: DEALER on the TEE side, ROUTER on the GPU side.

The ROUTER also serves plain REQ sockets: their empty delimiter frame is kept with the peer's
identity and put back in front of the reply. Heartbeats, authentication and failover are not here
yet (docs/limitations.md).
"""

from __future__ import annotations

import os
import select
import socket
import time
from collections.abc import Sequence
from math import ceil

import zmq
from zmq.utils.monitor import parse_monitor_message

from protocol.channel import Incoming
from protocol.encoding import DEFAULT_MAX_MESSAGE_BYTES
from protocol.endpoint import Endpoint, parse_endpoint, refuse_live_socket
from protocol.errors import EndpointError
from protocol.pending import RECONNECT_S, PendingChannel, Received
from protocol.spin import AdaptiveSpin
from protocol.tensors import Buffer

# Below this ZeroMQ copies the bytes, which is faster than tracking the buffer's lifetime.
COPY_THRESHOLD_BYTES = 64 * 1024
# Per client and direction, at the service; a message can be as large as the message limit.
QUEUED_MESSAGES = 16
# How often a waiting client looks whether its connection is still there.
EVENTS_INTERVAL_MS = 100
# How often a service that waits for messages looks whether it is to stop.
WAKEUP_INTERVAL_MS = 100


# Plain numbers: an operation on pyzmq's enumerations takes longer than a look at the socket.
_POLLIN = int(zmq.POLLIN)
_DONTWAIT = int(zmq.NOBLOCK)
_DONTWAIT_MORE = int(zmq.NOBLOCK | zmq.SNDMORE)


def _receive_frames(zmq_socket: zmq.Socket[bytes], flags: int = _DONTWAIT) -> list[memoryview]:
    """Receive one multipart message; each frame's memory is viewed, not copied.

    As `recv_multipart` does it, which asks the socket after each frame whether another follows.
    """
    frame = zmq_socket.recv(flags, copy=False)
    frames = [frame.buffer]
    while frame.more:
        frame = zmq_socket.recv(flags, copy=False)
        frames.append(frame.buffer)
    return frames


def _send_frames(zmq_socket: zmq.Socket[bytes], frames: Sequence[Buffer]) -> None:
    last = len(frames) - 1
    for index, frame in enumerate(frames):
        size = frame.nbytes if isinstance(frame, memoryview) else len(frame)
        zmq_socket.send(
            frame,
            _DONTWAIT if index == last else _DONTWAIT_MORE,
            copy=size < COPY_THRESHOLD_BYTES,
        )


def _is_readable(zmq_socket: zmq.Socket[bytes]) -> bool:
    """Ask the socket's own flag: a fifth of what polling takes, or failing to receive."""
    return bool(int(zmq_socket.get(zmq.EVENTS)) & _POLLIN)


class ZmqChannel(PendingChannel):
    """Our client: framed messages over a DEALER socket. `spin_us`: see `protocol.spin`."""

    def __init__(
        self,
        endpoint: str,
        *,
        timeout_s: float = 30.0,
        max_message_bytes: int = DEFAULT_MAX_MESSAGE_BYTES,
        spin_us: float = 0.0,
    ) -> None:
        _require_zmq(parse_endpoint(endpoint))
        super().__init__(endpoint, timeout_s=timeout_s, max_message_bytes=max_message_bytes)
        self._spin = AdaptiveSpin(spin_us)
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

    def close(self) -> None:
        """See `Channel.close`."""
        self._socket.disable_monitor()
        self._events.close()
        self._socket.close()
        self._context.term()

    def _send(self, method: str, frames: Sequence[Buffer], size: int, timeout_s: float) -> int:
        self._wait_for_reconnection(method, min(RECONNECT_S, timeout_s))
        sent_ns = time.perf_counter_ns()
        try:
            _send_frames(self._socket, frames)
        except zmq.Again:
            raise EndpointError(
                self.endpoint, got="a full send queue", expected="a service that reads"
            ) from None
        return sent_ns

    def _note_events(self) -> None:
        """Read what ZeroMQ says of the connection."""
        while _is_readable(self._events):
            event = parse_monitor_message(self._events.recv_multipart())["event"]
            self._lost = event == zmq.EVENT_DISCONNECTED
            self._connection += self._lost

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

    def _receive(self, deadline: float) -> Received | None:
        left_ms = ceil((deadline - time.monotonic()) * 1000) if deadline else 0
        patience_ms = max(0, min(left_ms, EVENTS_INTERVAL_MS))
        if self._spin.is_on:
            frames = self._spin_for_message(patience_ms)
        else:
            frames = self._next_message(patience_ms)
        if frames is None:
            self._note_events()
            return None
        return frames, time.perf_counter_ns()

    def _spin_for_message(self, patience_ms: int) -> list[memoryview] | None:
        frames: list[memoryview] | None = None

        def arrived() -> bool:
            nonlocal frames
            frames = self._next_message(0)
            return frames is not None

        started_ns = time.perf_counter_ns()
        if not (self._spin.expects_soon and self._spin.until(arrived, patience_ms / 1000)):
            spent_ms = (time.perf_counter_ns() - started_ns) // 1_000_000
            frames = self._next_message(max(0, patience_ms - spent_ms))
        self._spin.waited(started_ns)
        return frames

    def _next_message(self, patience_ms: int) -> list[memoryview] | None:
        """Return what arrives next, None if nothing does.

        Waiting in the call that receives takes a third less time than polling both sockets first,
        in every round trip.
        """
        flags = 0
        if patience_ms == 0:
            flags = _DONTWAIT
        elif patience_ms != self._patience_ms:
            self._socket.setsockopt(zmq.RCVTIMEO, patience_ms)
            self._patience_ms = patience_ms
        try:
            return _receive_frames(self._socket, flags)
        except zmq.Again:
            return None


class ZmqListener:
    """The service's end: a ROUTER socket that hands out messages and takes replies.

    Raises EndpointError when the endpoint is malformed, in use or not ours to bind.
    """

    def __init__(
        self,
        endpoint: str,
        *,
        max_message_bytes: int = DEFAULT_MAX_MESSAGE_BYTES,
        spin_us: float = 0.0,
    ) -> None:
        parsed = parse_endpoint(endpoint, for_bind=True)
        _require_zmq(parsed)
        refuse_live_socket(parsed)
        self._spin = AdaptiveSpin(spin_us)
        # A message that `wait` has received and nobody has taken yet.
        self._waiting: Incoming | None = None
        self._patience_ms = -1
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
        """See `Listener.wait`. `wakeup` is looked at a few times a second, when nothing arrives.

        To sleep in the call that receives, and not in a poll of both sockets before it, is what a
        fifth of a small round trip went into.
        """
        if self._waiting is not None:
            return True
        give_up = None if timeout_ms is None else time.monotonic() + timeout_ms / 1000
        left_s = None if timeout_ms is None else timeout_ms / 1000
        # Only looking is no wait, and says nothing of how soon messages come.
        started_ns = time.perf_counter_ns() if self._spin.is_on and timeout_ms != 0 else 0
        if not (started_ns and self._spin.expects_soon and self._spin.until(self._take, left_s)):
            self._wait(wakeup, give_up)
        if started_ns:
            self._spin.waited(started_ns)
        return self._waiting is not None

    def _wait(self, wakeup: socket.socket | None, give_up: float | None) -> None:
        while True:
            patience_ms = WAKEUP_INTERVAL_MS
            if give_up is not None:
                patience_ms = ceil(1000 * max(0.0, give_up - time.monotonic()))
                patience_ms = min(patience_ms, WAKEUP_INTERVAL_MS)
            if self._take(patience_ms):
                return
            if give_up is not None and time.monotonic() >= give_up:
                return
            if wakeup is not None and select.select([wakeup], [], [], 0)[0]:
                return

    def _take(self, patience_ms: int = 0) -> bool:
        """Receive a message, and keep it for `receive`; False if none comes."""
        if patience_ms == 0:
            if not _is_readable(self._socket):
                return False
        elif patience_ms != self._patience_ms:
            self._socket.setsockopt(zmq.RCVTIMEO, patience_ms)
            self._patience_ms = patience_ms
        try:
            parts = _receive_frames(self._socket, 0 if patience_ms else _DONTWAIT)
        except zmq.Again:
            return False
        received_ns = time.perf_counter_ns()
        has_delimiter = len(parts) > 1 and parts[1].nbytes == 0
        split = 2 if has_delimiter else 1
        route = tuple([bytes(part) for part in parts[:split]])
        self._waiting = Incoming(route, parts[split:], received_ns)
        return True

    def receive(self) -> Incoming | None:
        """See `Listener.receive`."""
        if self._waiting is None:
            self._take()
        incoming, self._waiting = self._waiting, None
        return incoming

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


def _require_zmq(endpoint: Endpoint) -> None:
    if endpoint.is_stream:
        raise EndpointError(endpoint.text, got="a stream", expected="tcp://HOST:PORT or ipc://PATH")
