"""Waiting with open eyes for a moment before going to sleep.

To be woken up costs tens of microseconds, more than a small request itself. Where the previous wait
was short the next one probably is too, and asking again and again is then faster than sleeping. It
keeps a core busy, so it ends after `spin_us` and does not begin after a long wait.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable


class AdaptiveSpin:
    """Decides whether to spin. `spin_us`: for how long at most, in microseconds; 0: never."""

    def __init__(self, spin_us: float) -> None:
        self._limit_ns = int(spin_us * 1000)
        self.limit_us = int(spin_us)
        self.is_on = self._limit_ns > 0
        # Whether the previous wait was shorter than `spin_us`.
        self.expects_soon = self.is_on

    def until(self, ready: Callable[[], bool], left_s: float | None = None) -> bool:
        """Ask `ready`, once at least, until it says yes.

        False when the time is over, and the caller must block: after `spin_us`, or `left_s` seconds
        if that is less.
        """
        limit_ns = self._limit_ns
        if left_s is not None and left_s * 1e9 < limit_ns:
            limit_ns = int(left_s * 1e9)
        give_up_ns = time.perf_counter_ns() + limit_ns
        while not ready():
            if time.perf_counter_ns() >= give_up_ns:
                return False
            # Where there are fewer cores than who wants one, the other end may need this one.
            os.sched_yield()
        return True

    def waited(self, started_ns: int) -> None:
        """Take note of a wait that began at `started_ns` (perf_counter_ns) and ends now."""
        self.expects_soon = time.perf_counter_ns() - started_ns < self._limit_ns
