"""Which transport carries an endpoint: the scheme says it, and `open_channel` alone asks.

Only the transport of the endpoint is imported: a run does not trust the code of the others.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from protocol.channel import PendingChannel
from protocol.encoding import DEFAULT_MAX_MESSAGE_BYTES
from protocol.endpoint import parse_endpoint
from protocol.errors import SettingsError
from protocol.liveness import DEFAULT_HEARTBEAT_TIMEOUT_S

if TYPE_CHECKING:
    from protocol.curve import ClientKeys, HttpAccess


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
    ours and the service's. `heartbeat_timeout_s`: see `protocol.zmq_channel`; only ZeroMQ has any.
    `http`: of use for URLs alone. Raises EndpointError, and SettingsError for keys where the
    endpoint has no use for them, and without the extra `http` where it needs it.
    """
    parsed = parse_endpoint(endpoint)
    if keys is not None:
        from protocol.curve import require_zmq_keys

        require_zmq_keys(endpoint)
    if parsed.is_http:
        with SettingsError.instead_of(
            ModuleNotFoundError, endpoint, "no httpcore2", "it installed: pip install '.[http]'"
        ):
            # It need not be installed where no service has a URL.
            from protocol.http_channel import HttpChannel
        return HttpChannel(
            endpoint, timeout_s=timeout_s, max_message_bytes=max_message_bytes, access=http
        )
    if parsed.is_stream:
        from protocol.stream import StreamChannel

        stream = StreamChannel
        if parsed.memory or parsed.scheme == "shm":
            from protocol.shm import IvshmemChannel, ShmChannel

            stream = IvshmemChannel if parsed.memory else ShmChannel
        return stream(
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
