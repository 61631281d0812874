"""An observer that adds up what each operator costs, for reports."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

from protocol.prepared import Exchange
from tee_side.observer import AnyOperator
from tee_side.words import OPERATORS, LightOperator, Operator, Place, TeeStage

LIGHT_OPERATORS: tuple[LightOperator, ...] = get_args(LightOperator)


@dataclass(slots=True)
class OperatorTotals:
    """What one operator cost so far.

    `place`: both where layers or phases differ. `tee_ns`: computing, masking and checking in the
    TEE, encoding and decoding messages included. `gpu_ns` and `queue_ns` are the service's own
    claim; what is left of a round trip is the wire. Of round trips side by side, the slowest is the
    time that they took.
    """

    place: Place | Literal["both"] = "tee"
    calls: int = 0
    round_trips: int = 0
    bytes_sent: int = 0
    bytes_received: int = 0
    tee_ns: int = 0
    round_trip_ns: int = 0
    queue_ns: int = 0
    gpu_ns: int = 0

    def described(self) -> dict[str, object]:
        """Return it as the JSON of a report: times in seconds, and the wire's among them."""
        return {
            "place": self.place,
            "calls": self.calls,
            "round_trips": self.round_trips,
            "bytes_sent": self.bytes_sent,
            "bytes_received": self.bytes_received,
            "tee_s": self.tee_ns / 1e9,
            "wire_s": max(0, self.round_trip_ns - self.queue_ns - self.gpu_ns) / 1e9,
            "queue_s": self.queue_ns / 1e9,
            "gpu_s": self.gpu_ns / 1e9,
        }


@dataclass(slots=True)
class OperatorTable:
    """Totals per operator, and of segments where there are some.

    An `Observer` of all micro-batches, which count alike.
    """

    totals: dict[AnyOperator, OperatorTotals] = field(
        default_factory=lambda: defaultdict(
            OperatorTotals, {name: OperatorTotals() for name in (*OPERATORS, *LIGHT_OPERATORS)}
        )
    )

    def __call__(self, index: int) -> OperatorTable:
        """See `Observers`."""
        return self

    def called(self, operator: AnyOperator, layer: int | None, place: Place) -> None:
        """See `Observer.called`."""
        totals = self.totals[operator]
        totals.place = place if totals.calls == 0 or totals.place == place else "both"
        totals.calls += 1

    def spent(
        self,
        operator: AnyOperator,
        layer: int | None,
        stage: TeeStage,
        started_ns: int,
        ended_ns: int,
    ) -> None:
        """See `Observer.spent`."""
        self.totals[operator].tee_ns += ended_ns - started_ns

    def exchanged(
        self, operator: Operator, layer: int | None, exchanges: Sequence[Exchange]
    ) -> None:
        """See `Observer.exchanged`."""
        totals = self.totals[operator]
        for exchange in exchanges:
            totals.round_trips += 1
            totals.bytes_sent += exchange.bytes_sent
            totals.bytes_received += exchange.bytes_received
            totals.tee_ns += exchange.encode_ns + exchange.decode_ns
        slowest = max(exchanges, key=lambda exchange: exchange.elapsed_ns)
        totals.round_trip_ns += slowest.elapsed_ns
        if slowest.timing is not None:
            totals.queue_ns += slowest.timing.queue_us * 1000
            totals.gpu_ns += slowest.timing.compute_us * 1000
