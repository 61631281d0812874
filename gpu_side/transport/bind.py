"""The one place that picks a service's transport, by the scheme of the endpoint."""

from __future__ import annotations

from gpu_side.access import HttpKeys, ServiceKeys
from gpu_side.transport.http_listener import HttpListener
from gpu_side.transport.listener import Listener
from gpu_side.transport.stream_listener import StreamListener
from gpu_side.transport.zmq_listener import ZmqListener
from protocol.curve import require_zmq_keys
from protocol.encoding import DEFAULT_MAX_MESSAGE_BYTES
from protocol.endpoint import parse_endpoint
from protocol.liveness import DEFAULT_HEARTBEAT_TIMEOUT_S


def open_listener(
    endpoint: str,
    *,
    max_message_bytes: int = DEFAULT_MAX_MESSAGE_BYTES,
    spin_us: float = 0.0,
    keys: ServiceKeys | None = None,
    heartbeat_timeout_s: float = DEFAULT_HEARTBEAT_TIMEOUT_S,
    http: HttpKeys | None = None,
) -> Listener:
    """Bind a service's endpoint. `spin_us`: see `protocol.liveness`.

    `keys`: ours and those of the clients that are let in; None lets in every client.
    `heartbeat_timeout_s`: see `protocol.zmq_sockets`; only ZeroMQ has any. `http`: of use for URLs
    alone. Raises EndpointError, and SettingsError for keys where the endpoint has no use for them.
    """
    parsed = parse_endpoint(endpoint, for_bind=True)
    if keys is not None and not parsed.is_zmq:
        require_zmq_keys(endpoint)
    if parsed.is_http:
        return HttpListener(endpoint, max_message_bytes=max_message_bytes, keys=http)
    if parsed.is_stream:
        return StreamListener(endpoint, max_message_bytes=max_message_bytes, spin_us=spin_us)
    return ZmqListener(
        endpoint,
        max_message_bytes=max_message_bytes,
        spin_us=spin_us,
        keys=keys,
        heartbeat_timeout_s=heartbeat_timeout_s,
    )
