"""What tools lay over a channel, to see or to delay what goes over it."""

from protocol.channel import Channel
from protocol.errors import TsqpError
from protocol.prepared import Exchange


class WrappedChannel(Channel):
    """A `Channel` over another one, which does what a subclass leaves to it."""

    def __init__(self, channel: Channel) -> None:
        self.endpoint, self.traffic = channel.endpoint, channel.traffic
        self._channel = channel

    def wait(self, request_id: int) -> Exchange:
        """See `Channel.wait`."""
        return self._channel.wait(request_id)

    def abandon(self, request_id: int) -> None:
        """See `Channel.abandon`."""
        self._channel.abandon(request_id)

    def distrust(self, exchange: Exchange, error: TsqpError) -> None:
        """See `Channel.distrust`."""
        self._channel.distrust(exchange, error)

    def close(self) -> None:
        """See `Channel.close`."""
        self._channel.close()
