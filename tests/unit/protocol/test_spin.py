"""Waits that spin, on a clock that the test moves."""

from __future__ import annotations

import time

import pytest

from protocol.spin import AdaptiveSpin
from tests.kit.rows import each_row


@each_row(
    ("yes_at", "left_s", "asked"),
    [
        (2, None, [0, 20]),
        (0, None, [0, 20, 40]),
        (0, 1.0, [0, 20, 40]),
        (0, 30e-6, [0, 20]),
        (0, 0.0, [0]),
    ],
)
def test_a_wait_asks_until_the_answer_or_the_end_of_its_time(
    monkeypatch: pytest.MonkeyPatch, yes_at: int, left_s: float | None, asked: list[int]
) -> None:
    clock, times = [0], []
    monkeypatch.setattr(time, "perf_counter_ns", lambda: clock[0])

    def ready() -> bool:
        times.append(clock[0] // 1000)
        clock[0] += 20_000
        return len(times) == yes_at

    assert AdaptiveSpin(50).until(ready, left_s) == (yes_at > 0)
    assert times == asked


def test_a_wait_spins_after_a_short_one_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "perf_counter_ns", lambda: 50_000)
    spin, off = AdaptiveSpin(50), AdaptiveSpin(0)
    assert spin.is_on
    assert spin.expects_soon
    assert not off.is_on
    assert not off.expects_soon
    spin.waited(0)
    assert not spin.expects_soon
    spin.waited(1)
    assert spin.expects_soon
