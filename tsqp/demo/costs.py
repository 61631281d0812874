"""Where the time of a run went, out of the report that tee-runner wrote."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Times:
    """Seconds in the TEE, on the wire (with the service's queue), and in the service."""

    tee_s: float
    wire_s: float
    gpu_s: float


class Cost:
    """What one run cost. `report`: what `tee-runner generate --report` wrote."""

    def __init__(self, report: dict[str, Any]) -> None:
        self.report = report
        # Waiting in the service's queue is neither wire nor GPU; with one client it is next to 0.
        self.operators = {
            name: Times(row["tee_s"], row["wire_s"] + row["queue_s"], row["gpu_s"])
            for name, row in report["operators"].items()
        }
        times = self.operators.values()
        tee_s, wire_s, gpu_s = (
            sum(t.tee_s for t in times),
            sum(t.wire_s for t in times),
            sum(t.gpu_s for t in times),
        )
        # What no operator accounts for was spent in the TEE.
        self.rest_s = max(0.0, report["timing"]["total_s"] - tee_s - wire_s - gpu_s)
        self.total = Times(tee_s + self.rest_s, wire_s, gpu_s)

    def cells(self, times: Times) -> tuple[str, str, str]:
        """Render as milliseconds."""
        tee, wire, gpu = map(_milliseconds, (times.tee_s, times.wire_s, times.gpu_s))
        return tee, wire, gpu


def _milliseconds(seconds: float) -> str:
    """Render a time in 6 characters at most, so that the table fits a terminal of 80 columns."""
    if seconds == 0:
        return ""
    return f"{seconds * 1e3:.1f}" if seconds < 1 else f"{seconds * 1e3:,.0f}"
