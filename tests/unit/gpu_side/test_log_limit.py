"""What a limit of lines lets through, and what it counts."""

from __future__ import annotations

import logging

import pytest

from gpu_side.log_limit import (
    LIMITS,
    MAX_REASONS,
    REASONS,
    LineFilter,
    LineLimit,
    limited,
)

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


def _logged(lines: LineFilter, event: str, caplog: pytest.LogCaptureFixture, **fields: str) -> bool:
    """Log an event, and say whether it was written."""
    caplog.clear()
    log.addFilter(lines)
    try:
        with caplog.at_level(logging.WARNING, "gpu_service"):
            log.warning(event, extra={"fields": fields})
    finally:
        log.removeFilter(lines)
    return bool(caplog.records)


@pytest.mark.parametrize("field", REASONS)
def test_a_flood_for_one_reason_does_not_hide_another(
    caplog: pytest.LogCaptureFixture, field: str
) -> None:
    lines = LineFilter({"refused": (2, 10.0)}, lambda: 0.0)
    flood = [_logged(lines, "refused", caplog, **{field: "a"}) for _ in range(100)]
    assert flood == [True] * 2 + [False] * 98
    assert _logged(lines, "refused", caplog, **{field: "b"})
    assert _logged(lines, "refused", caplog)
    # What else a line says makes no difference.
    assert not _logged(lines, "refused", caplog, **{field: "a"}, detail="other", peer="00")


def test_failures_of_two_kinds_are_counted_apart(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "gpu_service"), limited(log):
        for error in [ValueError] * 60 + [KeyError]:
            try:
                raise error
            except (LookupError, ValueError):
                log.exception("failed")
    failures = [record.exc_info[0] for record in caplog.records if record.exc_info]
    assert failures == [ValueError] * 50 + [KeyError]


def test_reasons_are_bounded(caplog: pytest.LogCaptureFixture) -> None:
    lines = LineFilter({"refused": (1, 10.0)}, lambda: 0.0)
    written = [_logged(lines, "refused", caplog, reason=str(n)) for n in range(MAX_REASONS + 50)]
    assert written == [True] * (MAX_REASONS + 1) + [False] * 49


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
