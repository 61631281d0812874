"""A network link that is not there: what a step would cost if the service were further away."""

from __future__ import annotations

import time
from dataclasses import dataclass

from gpu_side.kernels import wait_until
from protocol.channel import Channel
from protocol.errors import DeadlineExceededError, SettingsError, TsqpError
from protocol.prepared import Exchange, Payload, PreparedRequest


@dataclass(frozen=True, slots=True)
class Link:
    """`gbps`: bandwidth of each direction in 10^9 bits per second (None: unlimited).

    `rtt_us`: round-trip time of an empty message, half of it each way, in microseconds.
    """

    gbps: float | None
    rtt_us: float

    def __post_init__(self) -> None:
        SettingsError.unless(
            self.gbps is None or 0 < self.gbps < float("inf"),
            "link.gbps",
            str(self.gbps),
            "a positive number",
        )
        SettingsError.unless(
            0 <= self.rtt_us < float("inf"), "link.rtt_us", str(self.rtt_us), "0 or more"
        )

    def __str__(self) -> str:
        rate = "unbounded rate" if self.gbps is None else f"{self.gbps:g} Gbit/s"
        return f"{rate}, {self.rtt_us:g} us round trip"

    def __call__(self, channel: Channel, timeout_s: float) -> ModelledLink:
        """Return the channel over this link (`protocol.channel.ChannelWrapper`)."""
        return ModelledLink(channel, self, timeout_s=timeout_s)

    @property
    def one_way_ns(self) -> int:
        """How long an empty message is on its way in one direction, in nanoseconds."""
        return round(self.rtt_us * 500)

    def transfer_ns(self, size: int) -> int:
        """Return how long `size` bytes take to leave one end, in nanoseconds."""
        return 0 if self.gbps is None else round(size * 8 / self.gbps)


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


class ModelledLink(WrappedChannel):
    """A `Channel` over which no reply comes earlier than over `link`, whatever carries it.

    Requests queue behind each other on the way there, and replies, in the order in which they are
    waited for, on the way back. In between lies what the service says that it took, but no more
    than the real round trip did. A reply that really comes later comes later here too: the link is
    laid over the real transport, not added.

    Not modelled: loss, congestion and slow start; packets and their headers; other traffic; the
    processor's work for a real network card; and that requests which come apart over a slow link
    would wait less for each other at the service than they do here.

    `timeout_s`: the deadline of a request that names none, the same as that of `channel`.
    """

    def __init__(self, channel: Channel, link: Link, *, timeout_s: float = 30.0) -> None:
        super().__init__(channel)
        self.link = link
        self._timeout_s = timeout_s
        # Of each request under way: its operator, when its last bit would be at the service, its
        # deadline (both perf_counter_ns), and how long it may take.
        self._sent: dict[int, tuple[str, int, int, float]] = {}
        # When the last bit of what is under way has left, in each direction.
        self._there_free_ns = 0
        self._back_free_ns = 0

    def start(
        self, prepared: PreparedRequest, payload: Payload, timeout_s: float | None = None
    ) -> int:
        """See `Channel.start`."""
        timeout_s = self._timeout_s if timeout_s is None else timeout_s
        request_id = self._channel.start(prepared, payload, timeout_s)
        now_ns = time.perf_counter_ns()
        begin_ns = max(self._there_free_ns, now_ns)
        self._there_free_ns = begin_ns + self.link.transfer_ns(prepared.request_bytes)
        arrival_ns = self._there_free_ns + self.link.one_way_ns
        deadline_ns = now_ns + int(timeout_s * 1e9)
        self._sent[request_id] = prepared.method, arrival_ns, deadline_ns, timeout_s
        return request_id

    def wait(self, request_id: int) -> Exchange:
        """See `Channel.wait`. `elapsed_ns` of the exchange includes the link."""
        method, arrival_ns, deadline_ns, timeout_s = self._sent.pop(request_id)
        exchange = self._channel.wait(request_id)
        timing = exchange.timing
        service_ns = 0 if timing is None else (timing.queue_us + timing.compute_us) * 1000
        # A claim that is not true would keep the way back occupied, for all that come later.
        service_ns = min(service_ns, exchange.elapsed_ns)
        self._back_free_ns = max(self._back_free_ns, arrival_ns + service_ns)
        self._back_free_ns += self.link.transfer_ns(exchange.bytes_received)
        due_ns = self._back_free_ns + self.link.one_way_ns
        wait_until(min(due_ns, deadline_ns))
        if due_ns > deadline_ns:
            raise DeadlineExceededError(
                self.endpoint,
                got=f"no reply to {method} within {timeout_s:g} s over a modelled link",
                expected="a faster link, or more time",
            )
        exchange.elapsed_ns = max(exchange.elapsed_ns, due_ns - exchange.sent_ns)
        return exchange

    def abandon(self, request_id: int) -> None:
        """See `Channel.abandon`. What it sent still takes its time on the link."""
        self._sent.pop(request_id, None)
        self._channel.abandon(request_id)
