"""How a request reaches the service and its reply comes back, whatever carries the bytes.

`Channel` is the client's end; `protocol.connect` makes one, by the scheme of the endpoint. The
service's end is the GPU side's own business. Several requests may be in flight: `submit` returns at
once, `wait` returns the reply to one of them. A channel belongs to one thread.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from protocol.errors import TsqpError
from protocol.messages import Request
from protocol.prepared import Exchange, PreparedRequest, Traffic

if TYPE_CHECKING:
    import torch


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
        self, prepared: PreparedRequest, payload: torch.Tensor, timeout_s: float | None = None
    ) -> int:
        """Send a prepared request with this tensor, and return its id. Raises as `submit` does.

        The tensor must be of the prepared shape and dtype (ProtocolError), and must not be written
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
