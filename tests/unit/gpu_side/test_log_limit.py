"""What a limit of lines lets through, and what it counts."""

from __future__ import annotations

import logging

import pytest

from gpu_side.log_limit import LIMITS, LineFilter, LineLimit, limited

log = logging.getLogger("gpu_service")


def test_the_first_lines_of_an_interval_pass_and_the_next_line_counts_the_others() -> None:
    limit = LineLimit(2, 10.0)
    times = (5.0, 6.0, 7.0, 14.9, 15.0, 16.0, 17.0, 40.0, 41.0)
    assert [limit.due(now) for now in times] == [0, 0, None, None, 2, 0, None, 1, 0]


def test_an_interval_begins_with_a_line_and_not_where_the_last_one_ended() -> None:
    limit = LineLimit(1, 10.0)
    assert [limit.due(now) for now in (0.0, 19.0, 20.0, 28.9, 29.0)] == [0, 0, None, None, 2]


def test_limits_count_for_themselves() -> None:
    one, other = LineLimit(1, 10.0), LineLimit(1, 10.0)
    assert [one.due(0.0), one.due(0.0), other.due(0.0)] == [0, None, 0]


def test_the_next_line_of_its_kind_says_how_many_are_not_there(
    caplog: pytest.LogCaptureFixture,
) -> None:
    now = 100.0
    lines = LineFilter({"flood": (2, 10.0)}, lambda: now)
    log.addFilter(lines)
    try:
        with caplog.at_level(logging.WARNING, "gpu_service"):
            for number in range(5):
                log.warning("flood", extra={"fields": {"number": number}})
                log.warning("other", extra={"fields": {"number": number}})
            now = 110.0
            log.warning("flood", extra={"fields": {"number": 5}})
            log.warning("flood")
    finally:
        log.removeFilter(lines)
    floods = [vars(r).get("fields") for r in caplog.records if r.getMessage() == "flood"]
    assert floods == [{"number": 0}, {"number": 1}, {"number": 5, "left_out": 3}, None]
    assert caplog.messages.count("other") == 5


def test_a_logger_is_limited_for_as_long_as_the_block_runs(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING, "gpu_service"):
        with limited(log):
            for _ in range(1000):
                log.warning("connection_refused")
        assert len(caplog.records) == 5
        for _ in range(10):
            log.warning("connection_refused")
    assert len(caplog.records) == 15


@pytest.mark.parametrize("event", LIMITS)
def test_of_no_event_there_is_more_than_a_line_a_second(event: str) -> None:
    limit = LineLimit(*LIMITS[event])
    minute = [limit.due(hundredth / 100) for hundredth in range(6000)]
    assert 6 <= sum(left_out is not None for left_out in minute) <= 60
