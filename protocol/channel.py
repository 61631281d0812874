"""How a request reaches the service and its reply comes back, whatever carries the bytes.

`Channel` is the client's end; `open_channel` alone picks a transport, by the endpoint's scheme.
The service's end is the GPU side's own business. Several requests may be in
flight: `submit` returns at once, `wait` returns the reply to one of them. A channel belongs to one
thread.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from protocol.encoding import DEFAULT_MAX_MESSAGE_BYTES
from protocol.endpoint import parse_endpoint
from protocol.errors import SettingsError, TsqpError
from protocol.liveness import DEFAULT_HEARTBEAT_TIMEOUT_S
from protocol.messages import Request
from protocol.pending import PendingChannel
from protocol.prepared import Exchange, Payload, PreparedRequest, Traffic

if TYPE_CHECKING:
    from protocol.curve import ClientKeys, HttpAccess
    from protocol.stream import StreamChannel


class ChannelWrapper(Protocol):
    """Lays something over a channel, such as the model of a slower link."""

    def __call__(self, channel: Channel, timeout_s: float) -> Channel:
        """Return the channel to use instead. `timeout_s`: of a request that names no deadline."""


class Channel(Protocol):
    """A connection to one service."""

    endpoint: str
    traffic: Traffic

    def submit(self, request: Request, timeout_s: float | None = None) -> int:
        """Send a request and return its id. Raises EndpointError, ProtocolError (too large)."""

    def start(
        self, prepared: PreparedRequest, payload: Payload, timeout_s: float | None = None
    ) -> int:
        """Send a prepared request with these tensors, and return its id. Raises as `submit` does.

        Each must be of the prepared shape and dtype (ProtocolError), and must not be written
        to from now on (`protocol.tensors.raw_bytes`). `PreparedRequest.output` reads the reply. A
        channel that looks into messages may inherit this, which goes through `submit`.
        """
        return self.submit(prepared.request(payload), timeout_s)

    def wait(self, request_id: int) -> Exchange:
        """Return the reply to a submitted request.

        Raises DeadlineExceededError, EndpointError (the connection was lost), ServiceError (an
        error reply), ProtocolError (undecodable, or an id that was never sent) and ReplyError (a
        reply to another operator).
        """

    def call(self, request: Request, timeout_s: float | None = None) -> Exchange:
        """Submit and wait."""
        return self.wait(self.submit(request, timeout_s))

    def abandon(self, request_id: int) -> None:
        """Stop waiting for a submitted request; its reply is dropped. Unknown ids do nothing."""

    def distrust(self, exchange: Exchange, error: TsqpError) -> None:
        """Ask the service that sent this no more: a wrong result, or one of a wrong form.

        Raises `error` where no other service is left to ask; else the same request may be submitted
        again.
        """

    def close(self) -> None:
        """Disconnect; pending requests are dropped."""


# Only the transport of the endpoint is imported: a run does not trust the code of the others.


def open_channel(
    endpoint: str,
    *,
    timeout_s: float = 30.0,
    max_message_bytes: int = DEFAULT_MAX_MESSAGE_BYTES,
    spin_us: float = 0.0,
    keys: ClientKeys | None = None,
    heartbeat_timeout_s: float = DEFAULT_HEARTBEAT_TIMEOUT_S,
    http: HttpAccess | None = None,
) -> PendingChannel:
    """Connect to a service.

    `timeout_s`: deadline of a request that names none. `spin_us`: see `protocol.liveness`. `keys`:
    ours and the service's. `heartbeat_timeout_s`: see `protocol.zmq_sockets`; only ZeroMQ has any.
    `http`: of use for URLs alone. Raises EndpointError, and SettingsError for keys where the
    endpoint has no use for them, and without the extra `http` where it needs it.
    """
    parsed = parse_endpoint(endpoint)
    if keys is not None and not parsed.is_zmq:
        from protocol.curve import require_zmq_keys

        require_zmq_keys(endpoint)
    if parsed.is_http:
        try:
            # It need not be installed where no service has a URL.
            from protocol.http_channel import HttpChannel
        except ModuleNotFoundError:
            raise SettingsError(
                endpoint, "no httpcore2", "it installed: pip install '.[http]'"
            ) from None
        return HttpChannel(
            endpoint, timeout_s=timeout_s, max_message_bytes=max_message_bytes, access=http
        )
    if parsed.is_stream:
        return _stream_class(parsed.scheme)(
            endpoint, timeout_s=timeout_s, max_message_bytes=max_message_bytes, spin_us=spin_us
        )
    from protocol.zmq_channel import ZmqChannel

    return ZmqChannel(
        endpoint,
        timeout_s=timeout_s,
        max_message_bytes=max_message_bytes,
        spin_us=spin_us,
        keys=keys,
        heartbeat_timeout_s=heartbeat_timeout_s,
    )


def _stream_class(scheme: str) -> type[StreamChannel]:
    match scheme:
        case "shm":
            from protocol.shm import ShmChannel

            return ShmChannel
        case "ivshmem":
            from protocol.shm import IvshmemChannel

            return IvshmemChannel
        case _:
            from protocol.stream import StreamChannel

            return StreamChannel
