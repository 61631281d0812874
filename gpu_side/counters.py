"""What the service counts: plain numbers, which one thread writes and any may read.

No contents, and no name that a client can choose: methods are those of the schema, outcomes its
error codes.
"""

from __future__ import annotations

from bisect import bisect_left
from itertools import accumulate

from protocol.errors import ErrorCode
from protocol.messages import REQUEST_TYPES

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
