"""How a request reaches the service and its reply comes back, whatever carries the bytes.

`Channel` is the interface that every transport fulfils; `protocol.zmq_channel` is the one there is.
Several requests may be in flight: `submit` returns at once, `wait` returns the reply to one of
them. A channel belongs to one thread.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from protocol.messages import Request, Response, Timing


@dataclass(frozen=True, slots=True)
class Exchange:
    """One request with its reply, and what it cost.

    Bytes count every frame, header included. `elapsed_ns` runs from handing the request to the
    transport to having received the reply; `timing` is the service's own claim.
    """

    response: Response
    bytes_sent: int
    bytes_received: int
    encode_ns: int
    elapsed_ns: int
    decode_ns: int
    timing: Timing | None


@dataclass(slots=True)
class Traffic:
    """Running totals of a channel: finished round trips, and bytes of all frames."""

    round_trips: int = 0
    bytes_sent: int = 0
    bytes_received: int = 0


class Channel(Protocol):
    """A connection to one service."""

    endpoint: str
    traffic: Traffic

    def submit(self, request: Request, timeout_s: float | None = None) -> int:
        """Send a request and return its id. Raises EndpointError, ProtocolError (too large)."""
        ...

    def wait(self, request_id: int) -> Exchange:
        """Return the reply to a submitted request.

        Raises DeadlineExceededError, ServiceError (an error reply), ProtocolError (undecodable,
        or an id that was never sent) and ReplyError (a reply to another operator).
        """
        ...

    def call(self, request: Request, timeout_s: float | None = None) -> Exchange:
        """Submit and wait."""
        ...

    def abandon(self, request_id: int) -> None:
        """Stop waiting for a submitted request; its reply is dropped. Unknown ids do nothing."""
        ...

    def limit_messages(self, max_message_bytes: int) -> None:
        """Send no larger messages than this from now on; a higher limit than before is ignored."""
        ...

    def close(self) -> None:
        """Disconnect; pending requests are dropped."""
        ...
