"""The one place that picks a transport, by the scheme of the endpoint (`protocol.endpoint`)."""

from __future__ import annotations

from protocol.channel import Channel, Listener
from protocol.curve import ClientKeys, ServiceKeys, require_zmq_keys
from protocol.encoding import DEFAULT_MAX_MESSAGE_BYTES
from protocol.endpoint import parse_endpoint
from protocol.link import Link, ModelledLink
from protocol.pending import PendingChannel
from protocol.stream import StreamChannel
from protocol.stream_listener import StreamListener
from protocol.zmq_channel import ZmqChannel
from protocol.zmq_listener import ZmqListener
from protocol.zmq_sockets import DEFAULT_HEARTBEAT_TIMEOUT_S


def open_connection(
    endpoint: str,
    *,
    timeout_s: float = 30.0,
    max_message_bytes: int = DEFAULT_MAX_MESSAGE_BYTES,
    spin_us: float = 0.0,
    keys: ClientKeys | None = None,
    heartbeat_timeout_s: float = DEFAULT_HEARTBEAT_TIMEOUT_S,
) -> PendingChannel:
    """Connect to a service.

    `timeout_s`: deadline of a request that names none. `spin_us`: see `protocol.spin`. `keys`: ours
    and the service's. `heartbeat_timeout_s`: see `protocol.zmq_sockets`; streams have none. Raises
    EndpointError, and SettingsError for keys where the endpoint has no use for them.
    """
    if parse_endpoint(endpoint).is_stream:
        if keys is not None:
            require_zmq_keys(endpoint)
        return StreamChannel(
            endpoint, timeout_s=timeout_s, max_message_bytes=max_message_bytes, spin_us=spin_us
        )
    return ZmqChannel(
        endpoint,
        timeout_s=timeout_s,
        max_message_bytes=max_message_bytes,
        spin_us=spin_us,
        keys=keys,
        heartbeat_timeout_s=heartbeat_timeout_s,
    )


def open_channel(
    endpoint: str,
    *,
    timeout_s: float = 30.0,
    max_message_bytes: int = DEFAULT_MAX_MESSAGE_BYTES,
    spin_us: float = 0.0,
    link: Link | None = None,
    keys: ClientKeys | None = None,
    heartbeat_timeout_s: float = DEFAULT_HEARTBEAT_TIMEOUT_S,
) -> Channel:
    """Connect as `open_connection` does, over a slower `link` than the real one if there is one."""
    channel = open_connection(
        endpoint,
        timeout_s=timeout_s,
        max_message_bytes=max_message_bytes,
        spin_us=spin_us,
        keys=keys,
        heartbeat_timeout_s=heartbeat_timeout_s,
    )
    return channel if link is None else ModelledLink(channel, link, timeout_s=timeout_s)


def open_listener(
    endpoint: str,
    *,
    max_message_bytes: int = DEFAULT_MAX_MESSAGE_BYTES,
    spin_us: float = 0.0,
    keys: ServiceKeys | None = None,
    heartbeat_timeout_s: float = DEFAULT_HEARTBEAT_TIMEOUT_S,
) -> Listener:
    """Bind a service's endpoint. `spin_us`: see `protocol.spin`.

    `keys`: ours and those of the clients that are let in; None lets in everybody.
    `heartbeat_timeout_s`: see `protocol.zmq_sockets`; streams have none. Raises EndpointError, and
    SettingsError for keys where the endpoint has no use for them.
    """
    if parse_endpoint(endpoint, for_bind=True).is_stream:
        if keys is not None:
            require_zmq_keys(endpoint)
        return StreamListener(endpoint, max_message_bytes=max_message_bytes, spin_us=spin_us)
    return ZmqListener(
        endpoint,
        max_message_bytes=max_message_bytes,
        spin_us=spin_us,
        keys=keys,
        heartbeat_timeout_s=heartbeat_timeout_s,
    )
