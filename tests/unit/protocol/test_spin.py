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


@pytest.mark.parametrize(
    ("left_s", "asked"), [(None, [0, 20, 40]), (1.0, [0, 20, 40]), (30e-6, [0, 20]), (0.0, [0])]
)
def test_asks_no_longer_than_there_is_time(
    clock: list[int], left_s: float | None, asked: list[int]
) -> None:
    times = []

    def ready() -> bool:
        times.append(clock[0] // 1000)
        clock[0] += 20_000
        return False

    assert not AdaptiveSpin(50).until(ready, left_s)
    assert times == asked


def test_spins_after_a_short_wait_only(clock: list[int]) -> None:
    spin = AdaptiveSpin(50)
    assert spin.is_on
    assert spin.expects_soon
    clock[0] = 50_000
    spin.waited(0)
    assert not spin.expects_soon
    spin.waited(1)
    assert spin.expects_soon
