"""The one place that picks a client's transport, by the scheme of the endpoint."""

from __future__ import annotations

from typing import TYPE_CHECKING

from protocol.curve import ClientKeys, require_zmq_keys
from protocol.encoding import DEFAULT_MAX_MESSAGE_BYTES
from protocol.endpoint import parse_endpoint
from protocol.errors import SettingsError
from protocol.ivshmem import IvshmemChannel
from protocol.pending import PendingChannel
from protocol.shm import ShmChannel
from protocol.stream import StreamChannel
from protocol.zmq_channel import ZmqChannel
from protocol.zmq_sockets import DEFAULT_HEARTBEAT_TIMEOUT_S

if TYPE_CHECKING:
    from protocol.http_access import HttpAccess


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

    `timeout_s`: deadline of a request that names none. `spin_us`: see `protocol.spin`. `keys`: ours
    and the service's. `heartbeat_timeout_s`: see `protocol.zmq_sockets`; only ZeroMQ has any.
    `http`: of use for URLs alone. Raises EndpointError, and SettingsError for keys where the
    endpoint has no use for them, and without the extra `http` where it needs it.
    """
    parsed = parse_endpoint(endpoint)
    if keys is not None and not parsed.is_zmq:
        require_zmq_keys(endpoint)
    if parsed.is_http:
        try:
            # Not imported, and need not be installed, where no service has a URL.
            from protocol.http_channel import HttpChannel  # noqa: PLC0415
        except ModuleNotFoundError:
            expected = "it installed: pip install '.[http]'"
            raise SettingsError(endpoint, got="no httpcore2", expected=expected) from None
        return HttpChannel(
            endpoint, timeout_s=timeout_s, max_message_bytes=max_message_bytes, access=http
        )
    if parsed.is_stream:
        classes = {"shm": ShmChannel, "ivshmem": IvshmemChannel}
        return classes.get(parsed.scheme, StreamChannel)(
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
