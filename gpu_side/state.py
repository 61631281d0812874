"""How the service is: what it waits for, what it has counted, whether it takes new requests.

The loop's thread writes these plain numbers; the threads that report health and metrics read them.
They hold no contents, and no name that a client can choose: methods are those of the schema,
outcomes its error codes.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable
from itertools import accumulate
from typing import Literal

from gpu_side.queues import FairQueue, QueueLimits
from gpu_side.sessions import SessionTotals
from protocol.errors import ErrorCode
from protocol.messages import REQUEST_TYPES, HealthReply

SUCCESS = "OK"

# Requests whose method could not be read, or is none of ours.
UNKNOWN_METHOD = "unknown"

OUTCOMES = (SUCCESS, *(code.value for code in ErrorCode))

# Upper bounds of the histograms: 20 us to 100 s, three a decade.
BOUNDS_NS = (*(step * 10**exponent for exponent in range(4, 11) for step in (2, 5, 10)),)


class Histogram:
    """How many durations were up to each bound, and their sum."""

    __slots__ = ("buckets", "sum_ns")

    def __init__(self) -> None:
        # One more than bounds: what is longer than all of them.
        self.buckets = [0] * (len(BOUNDS_NS) + 1)
        self.sum_ns = 0

    def add(self, ns: int) -> None:
        """Count one."""
        self.buckets[bisect_left(BOUNDS_NS, ns)] += 1
        self.sum_ns += ns

    def cumulative(self) -> list[int]:
        """Return for each bound, and for none, how many were up to it."""
        return list(accumulate(self.buckets))


class MethodCounters:
    """Of one method: requests by outcome, and the durations of those that succeeded."""

    __slots__ = ("compute", "outcomes", "queue")

    def __init__(self) -> None:
        self.outcomes = dict.fromkeys(OUTCOMES, 0)
        self.compute = Histogram()
        self.queue = Histogram()


class Counters:
    """Everything that the loop counts; all keys are there from the beginning."""

    def __init__(self) -> None:
        self.methods = {name: MethodCounters() for name in (*REQUEST_TYPES, UNKNOWN_METHOD)}
        # Of requests with a method that is none of ours.
        self.unknown = self.methods[UNKNOWN_METHOD]
        self.received_bytes = 0
        self.sent_bytes = 0
        # Replies that were not delivered: the client has gone, does not read, or may not any more.
        self.dropped_replies = 0


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
