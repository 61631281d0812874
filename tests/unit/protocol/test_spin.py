"""Tests of when a wait spins, on a clock that the test moves."""

from __future__ import annotations

import time

import pytest

from protocol.spin import AdaptiveSpin


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    now = [0]
    monkeypatch.setattr(time, "perf_counter_ns", lambda: now[0])
    return now


def test_off_by_zero() -> None:
    spin = AdaptiveSpin(0)
    assert not spin.is_on
    assert not spin.expects_soon


def test_asks_until_the_time_is_over(clock: list[int]) -> None:
    spin = AdaptiveSpin(50)
    asked = []

    def ready() -> bool:
        asked.append(clock[0])
        clock[0] += 20_000
        return len(asked) == limit

    limit = 2
    assert spin.until(ready)
    assert asked == [0, 20_000]
    limit = 0
    asked.clear()
    assert not spin.until(ready)
    assert len(asked) == 3


def test_spins_after_a_short_wait_only(clock: list[int]) -> None:
    spin = AdaptiveSpin(50)
    assert spin.is_on
    assert spin.expects_soon
    clock[0] = 50_000
    spin.waited(0)
    assert not spin.expects_soon
    spin.waited(1)
    assert spin.expects_soon
