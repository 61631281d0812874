"""Tests of waiting for a moment, on a clock whose sleeps come back late."""

from __future__ import annotations

import time

import pytest

from gpu_side.clock import wait_until


class Clock:
    """Time that passes where somebody looks at it, and where somebody sleeps."""

    def __init__(self, late_ns: int = 0) -> None:
        self.now = 10**12
        self.slept_ns = 0
        self.late_ns = late_ns

    def __call__(self) -> int:
        self.now += 1000
        return self.now

    def sleep(self, seconds: float) -> None:
        assert seconds > 0
        self.slept_ns += int(seconds * 1e9)
        self.now += int(seconds * 1e9) + self.late_ns


@pytest.mark.parametrize("late_ns", [0, 60_000])
@pytest.mark.parametrize("duration_ns", [0, 5_000, 100_000, 250_000, 5_000_000])
def test_a_wait_ends_at_its_time_and_is_slept_but_for_the_end(
    duration_ns: int, late_ns: int
) -> None:
    clock = Clock(late_ns)
    deadline_ns = clock.now + duration_ns
    wait_until(deadline_ns, clock, clock.sleep)
    assert deadline_ns <= clock.now <= deadline_ns + 2000
    assert clock.slept_ns >= duration_ns - 130_000


def test_a_time_that_has_passed_is_not_waited_for() -> None:
    clock = Clock()
    wait_until(clock.now - 10**9, clock, clock.sleep)
    assert clock.slept_ns == 0


def test_the_real_clock_is_never_early() -> None:
    deadline_ns = time.perf_counter_ns() + 300_000
    wait_until(deadline_ns)
    assert time.perf_counter_ns() >= deadline_ns
