"""The service's end of ZeroMQ: a ROUTER socket, which also serves plain REQ sockets.

A REQ socket's empty delimiter frame is kept with the connection's routing id, and put back in front
of the reply. The id is ours, and no other connection's (`gpu_side.transport.zmq_admission`): a
reply reaches the connection that asked, or none. With keys (`protocol.curve`) a connection is let
in by the ZAP handler there, and each message is taken only from a client that is on the list as it
stands then. Without keys clients come through the doorway there.
"""

import os
import time
from collections import deque
from collections.abc import Sequence
from math import ceil

import zmq

from gpu_side.access import ServiceKeys
from gpu_side.encoding import MAX_FRAMES
from gpu_side.event_log import log
from gpu_side.transport.listener import (
    Incoming,
    WaitingListener,
    admits_no_client,
    cannot_bind,
    refuse_live_socket,
)
from gpu_side.transport.zmq_admission import (
    DOMAIN,
    ZAP_ENFORCE_DOMAIN,
    Doorway,
    Names,
    ZapHandler,
    bind_within_process,
    sender_of,
)
from protocol.encoding import DEFAULT_MAX_MESSAGE_BYTES
from protocol.endpoint import parse_endpoint
from protocol.errors import EndpointError, SettingsError
from protocol.liveness import DEFAULT_HEARTBEAT_TIMEOUT_S
from protocol.tensors import Buffer
from protocol.zmq_channel import (
    DONTWAIT,
    is_readable,
    receive_frames,
    require_zmq,
    send_frames,
    set_options,
)

# ZeroMQ's own thread closes a socket that is unbound, in its time, and so its descriptors.
_REBIND_S = 5.0
# Clients with large replies, before the listener looks which of them have none any more.
_LOOK_AT_CLIENTS = 64
# The sender's identity, perhaps an empty delimiter, and the request.
_MAX_PARTS = 2 + MAX_FRAMES


class Unread:
    """Bytes in large replies that ZeroMQ still holds, because their client has not read them."""

    def __init__(self) -> None:
        self._held: dict[bytes, deque[tuple[zmq.MessageTracker, int]]] = {}
        # With so many clients it is looked which of them have gone.
        self._look_at = _LOOK_AT_CLIENTS

    def add(self, client: bytes, frames: Sequence[tuple[zmq.MessageTracker, int]]) -> None:
        """Take note of frames, with the bytes in each, that were sent to a client."""
        if client not in self._held and len(self._held) >= self._look_at:
            for name in list(self._held):
                self.bytes_of(name)
            # A look takes as long as there are clients.
            self._look_at = 2 * len(self._held) + _LOOK_AT_CLIENTS
        self._held.setdefault(client, deque()).extend(frames)

    def bytes_of(self, client: bytes) -> int:
        """Return how many bytes a client has not read."""
        if (held := self._held.get(client)) is None:
            return 0
        while held and held[0][0].done:
            held.popleft()
        if not held:
            del self._held[client]
        return sum(size for _, size in held)


class ZmqListener(WaitingListener):
    """The service's end: a ROUTER socket that hands out messages and takes replies.

    With `keys`, only to clients that hold one of the allowed ones. `heartbeat_timeout_s`: see
    `protocol.zmq_channel`. Raises EndpointError when the endpoint is malformed, in use or not ours
    to bind; `gpu_side.service.open_listener` refuses keys that ZeroMQ would not keep to.
    """

    def __init__(
        self,
        endpoint: str,
        *,
        max_message_bytes: int = DEFAULT_MAX_MESSAGE_BYTES,
        spin_us: float = 0.0,
        keys: ServiceKeys | None = None,
        heartbeat_timeout_s: float = DEFAULT_HEARTBEAT_TIMEOUT_S,
    ) -> None:
        parsed = parse_endpoint(endpoint, for_bind=True)
        require_zmq(parsed)
        refuse_live_socket(parsed)
        super().__init__(spin_us)
        # A message that `wait` has received and `receive` has not returned yet.
        self._waiting: Incoming | None = None
        self._patience_ms = -1
        self._names = Names()
        self._zap_handler: ZapHandler | None = None
        self._doorway: Doorway | None = None
        # The one of the two that there is.
        self._admitting: ZapHandler | Doorway
        self._max_message_bytes = max_message_bytes
        self._unread = Unread()
        # Set by `allow`, on any thread; `_has_come` then cuts all connections.
        self._to_cut = False
        self.endpoint = endpoint
        # As many I/O threads as the ZAP handler counts on.
        self._context = zmq.Context(io_threads=1)
        self._socket: zmq.Socket[bytes] = self._context.socket(zmq.ROUTER)
        try:
            set_options(
                self._socket,
                endpoint,
                max_message_bytes=max_message_bytes,
                heartbeat_timeout_s=heartbeat_timeout_s,
            )
            self._socket.setsockopt(zmq.LINGER, 500)
            self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
            if keys is None:
                inner = bind_within_process(self._socket)
                self._admitting = self._doorway = Doorway(parsed, inner, self._names)
                self.endpoint = self._doorway.endpoint
            else:
                # Before the socket is bound: the first client finds the handler.
                self._socket.setsockopt(zmq.CURVE_SERVER, 1)
                self._socket.setsockopt(zmq.CURVE_SECRETKEY, keys.secret)
                self._socket.setsockopt(zmq.ZAP_DOMAIN, DOMAIN)
                with SettingsError.instead_of(
                    zmq.ZMQError,
                    "keys",
                    got=f"libzmq {zmq.zmq_version()} without ZMQ_ZAP_ENFORCE_DOMAIN",
                    expected="one that has it (4.3 or later): without it strangers may get in",
                ):
                    # Without it a client that comes while no handler is there is let in.
                    self._socket.setsockopt(ZAP_ENFORCE_DOMAIN, 1)
                self._admitting = self._zap_handler = ZapHandler(
                    self._context, self._socket, keys.allowed, self._names
                )
                self._socket.bind(endpoint)
                self.endpoint = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        except (OSError, zmq.ZMQError) as error:
            self.close()
            raise cannot_bind(endpoint, error.errno) from None
        except BaseException:
            self.close()
            raise

    def allow(self, allowed: frozenset[bytes]) -> None:
        """See `Listener.allow`.

        Where one that was let in before is not among them, all connections are cut the next time
        that the listener is used, and those that are allowed come back by themselves.
        """
        if self._zap_handler is None:
            super().allow(allowed)
        elif self._zap_handler.replace_list(allowed):
            self._to_cut = True

    def is_allowed(self, key: bytes) -> bool:
        """See `Listener.is_allowed`."""
        return self._zap_handler is None or key in self._zap_handler.allowed

    @property
    def clients_refused(self) -> int:
        """See `Listener.clients_refused`."""
        return self._admitting.refused

    def _has_come(self, patience_s: float) -> bool:
        """Receive a message, and keep it for `receive`; False if none comes.

        Raises EndpointError where connections were cut and the address cannot be bound again, or
        the thread that lets clients in has failed.
        """
        if self._waiting is not None:
            return True
        if self._admitting.failed:
            raise admits_no_client(self.endpoint)
        if self._to_cut:
            self._cut_connections()
        patience_ms = ceil(1000 * patience_s)
        if patience_ms == 0:
            if not is_readable(self._socket):
                return False
        elif patience_ms != self._patience_ms:
            self._socket.setsockopt(zmq.RCVTIMEO, patience_ms)
            self._patience_ms = patience_ms
        try:
            flags = 0 if patience_ms else DONTWAIT
            parts, last = receive_frames(self._socket, flags, max_frames=_MAX_PARTS)
        except zmq.Again:
            return False
        received_ns = time.perf_counter_ns()
        if last.more:
            # The message is refused for its number of frames, in a reply, as any other would be.
            # What is left of it goes frame by frame, each before the next; a frame knows soonest
            # whether others follow. Behind the last the next message begins.
            while self._socket.recv(DONTWAIT, copy=False).more:
                pass
        name = bytes(parts[0])
        if not self._names.has_drawn(name):
            # A ZeroMQ that lets clients name themselves, as none does that we know.
            log.warning("dropped", reason="routing_id_not_ours")
            return False
        key = b""
        if self._zap_handler is not None:
            key = sender_of(last)
            if key not in self._zap_handler.allowed:
                return False
        has_delimiter = len(parts) > 1 and parts[1].nbytes == 0
        route, split = ((name, b""), 2) if has_delimiter else ((name,), 1)
        self._waiting = Incoming(route, parts[split:], received_ns, key)
        return True

    def _cut_connections(self) -> None:
        """End all connections, and listen again. Raises EndpointError if that fails.

        ZeroMQ cannot end one of them; but those that it accepted end with the socket that listens.
        """
        self._to_cut = False
        log.warning("connections_cut", endpoint=self.endpoint)
        self._socket.unbind(self.endpoint)
        until = time.monotonic() + _REBIND_S
        while True:
            try:
                self._socket.bind(self.endpoint)
            except zmq.ZMQError as error:
                # In use until the old one is closed; and others' connections may have the
                # descriptors meanwhile, or what else passes.
                if time.monotonic() > until:
                    raise EndpointError(
                        self.endpoint,
                        got=os.strerror(error.errno or 0),
                        expected="the address that was ours a moment ago",
                    ) from None
                time.sleep(0.001)
            else:
                return

    def receive(self) -> Incoming | None:
        """See `Listener.receive`."""
        if self._waiting is None:
            self._has_come(0.0)
        incoming, self._waiting = self._waiting, None
        return incoming

    def send(self, route: Sequence[bytes], frames: Sequence[Buffer]) -> bool:
        """Send a reply; False if the client has gone or does not read.

        More than a message's bytes that it has not read are too many, as over a stream: so an
        honest client gets two replies of the largest size one after another.
        """
        client = route[0]
        if self._unread.bytes_of(client) > self._max_message_bytes:
            return False
        large: list[tuple[zmq.MessageTracker, int]] = []
        try:
            send_frames(self._socket, [*route, *frames], large)
        except zmq.ZMQError as error:
            if error.errno in (zmq.EHOSTUNREACH, zmq.EAGAIN):
                return False
            raise
        if large:
            self._unread.add(client, large)
        return True

    def close(self) -> None:
        """Stop listening; replies on their way get half a second."""
        doorway, self._doorway = self._doorway, None
        if doorway is not None:
            doorway.stop()
        self._socket.close()
        self._context.term()
        if doorway is not None:
            doorway.close()
        if self._zap_handler is not None:
            self._zap_handler.thread.join()
