"""The one place that picks a transport, by the scheme of the endpoint (`protocol.endpoint`)."""

from __future__ import annotations

from protocol.channel import Channel, Listener
from protocol.encoding import DEFAULT_MAX_MESSAGE_BYTES
from protocol.endpoint import parse_endpoint
from protocol.link import Link, ModelledLink
from protocol.stream import StreamChannel
from protocol.stream_listener import StreamListener
from protocol.zmq_channel import ZmqChannel, ZmqListener


def open_channel(
    endpoint: str,
    *,
    timeout_s: float = 30.0,
    max_message_bytes: int = DEFAULT_MAX_MESSAGE_BYTES,
    spin_us: float = 0.0,
    link: Link | None = None,
) -> Channel:
    """Connect to a service, over a slower `link` than the real one if there is one.

    `timeout_s`: deadline of a request that names none. `spin_us`: see `protocol.spin`. Raises
    EndpointError.
    """
    cls = StreamChannel if parse_endpoint(endpoint).is_stream else ZmqChannel
    channel: Channel = cls(
        endpoint, timeout_s=timeout_s, max_message_bytes=max_message_bytes, spin_us=spin_us
    )
    return channel if link is None else ModelledLink(channel, link, timeout_s=timeout_s)


def open_listener(
    endpoint: str,
    *,
    max_message_bytes: int = DEFAULT_MAX_MESSAGE_BYTES,
    spin_us: float = 0.0,
) -> Listener:
    """Bind a service's endpoint. `spin_us`: see `protocol.spin`. Raises EndpointError."""
    is_stream = parse_endpoint(endpoint, for_bind=True).is_stream
    cls = StreamListener if is_stream else ZmqListener
    return cls(endpoint, max_message_bytes=max_message_bytes, spin_us=spin_us)
