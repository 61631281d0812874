"""Waiting for a moment more exactly than a sleep can."""

from __future__ import annotations

import time
from collections.abc import Callable

# A sleeping thread wakes up as late as this; the rest of a wait is spent awake.
_WAKE_UP_NS = 120_000


def wait_until(
    deadline_ns: int,
    clock: Callable[[], int] = time.perf_counter_ns,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Return at that reading of the clock, a few microseconds late and never early.

    Sleeps for all but the last tenth of a millisecond or so: a sleep alone comes back too late, and
    staying awake takes a core from the program that is being measured.
    """
    spare_ns = deadline_ns - clock() - _WAKE_UP_NS
    if spare_ns > 0:
        sleep(spare_ns / 1e9)
    while clock() < deadline_ns:
        pass
