"""An observer that adds everything up per operator, for reports."""

from __future__ import annotations

from dataclasses import dataclass, field

from protocol.channel import Exchange
from tee_side.policy import OPERATORS, Operator, Place


@dataclass(slots=True)
class OperatorTotals:
    """What one operator cost so far.

    `gpu_ns` and `queue_ns` are the service's own claim; what is left of a round trip is the wire.
    """

    place: Place = "tee"
    calls: int = 0
    round_trips: int = 0
    bytes_sent: int = 0
    bytes_received: int = 0
    total_ns: int = 0
    round_trip_ns: int = 0
    queue_ns: int = 0
    gpu_ns: int = 0

    @property
    def wire_ns(self) -> int:
        """Round trips less what the service says it spent."""
        return max(0, self.round_trip_ns - self.queue_ns - self.gpu_ns)

    @property
    def tee_ns(self) -> int:
        """Time in the TEE: the operator itself, or encoding and decoding its messages."""
        return max(0, self.total_ns - self.round_trip_ns)


@dataclass(slots=True)
class OperatorTable:
    """Totals per operator. Satisfies `tee_side.operators.Observer`."""

    totals: dict[Operator, OperatorTotals] = field(
        default_factory=lambda: {name: OperatorTotals() for name in OPERATORS}
    )

    def operator(self, operator: Operator, place: Place, elapsed_ns: int) -> None:
        """Count one call."""
        totals = self.totals[operator]
        totals.place = place
        totals.calls += 1
        totals.total_ns += elapsed_ns

    def exchange(self, operator: Operator, exchange: Exchange) -> None:
        """Count one round trip."""
        totals = self.totals[operator]
        totals.round_trips += 1
        totals.bytes_sent += exchange.bytes_sent
        totals.bytes_received += exchange.bytes_received
        totals.round_trip_ns += exchange.elapsed_ns
        if exchange.timing is not None:
            totals.queue_ns += exchange.timing.queue_us * 1000
            totals.gpu_ns += exchange.timing.compute_us * 1000
