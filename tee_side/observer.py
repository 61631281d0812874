"""An observer that adds everything up per operator, for reports."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from protocol.channel import Exchange
from tee_side.vocabulary import OPERATORS, Operator, Place


@dataclass(slots=True)
class OperatorTotals:
    """What one operator cost so far.

    `place`: both where layers or phases differ. `gpu_ns` and `queue_ns` are the service's own
    claim; what is left of a round trip is the wire.
    """

    place: Place | Literal["both"] = "tee"
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
        totals.place = place if totals.calls == 0 or totals.place == place else "both"
        totals.calls += 1
        totals.total_ns += elapsed_ns

    def exchanges(self, operator: Operator, exchanges: Sequence[Exchange]) -> None:
        """Count round trips; of several at once, the slowest is the time that they took."""
        totals = self.totals[operator]
        for exchange in exchanges:
            totals.round_trips += 1
            totals.bytes_sent += exchange.bytes_sent
            totals.bytes_received += exchange.bytes_received
        slowest = max(exchanges, key=lambda exchange: exchange.elapsed_ns)
        totals.round_trip_ns += slowest.elapsed_ns
        if slowest.timing is not None:
            totals.queue_ns += slowest.timing.queue_us * 1000
            totals.gpu_ns += slowest.timing.compute_us * 1000
