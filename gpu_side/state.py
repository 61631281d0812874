"""How the service is: what it waits for, what it has counted, whether it takes new requests.

The loop's thread writes it; the threads that report health and metrics read it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Literal

from gpu_side.counters import Counters
from gpu_side.queues import FairQueue, QueueLimits
from gpu_side.sessions import SessionTotals
from protocol.messages import HealthReply


class ServiceState:
    """Of one service, from its start. `clients_refused`: says how many were turned away so far."""

    def __init__(
        self,
        limits: QueueLimits | None = None,
        *,
        device: str = "cpu",
        clients_refused: Callable[[], int] = lambda: 0,
    ) -> None:
        self.queue = FairQueue(limits or QueueLimits())
        self.counters = Counters()
        self.device = device
        self.clients_refused = clients_refused
        self.status: Literal["loading", "ready", "draining"] = "loading"
        # Says what there is of them; none without whole layers.
        self.sessions: Callable[[], SessionTotals] = SessionTotals
        # Given to an accelerator and not done.
        self.underway = 0
        self._started = time.monotonic()

    @property
    def uptime_s(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self._started

    def health(self) -> HealthReply:
        """Return the reply to Health."""
        return HealthReply(
            status="draining" if self.status == "draining" else "ready",
            uptime_s=self.uptime_s,
            queued_requests=self.queue.requests,
            queued_bytes=self.queue.bytes,
        )
