"""What a limit of lines lets through, and what it counts."""

from __future__ import annotations

import logging

import pytest

from gpu_side.log_limit import LIMITS, MAX_REASONS, REASONS, LineFilter, LineLimit, limited
from tests.kit.rows import each_row

log = logging.getLogger("gpu_service")


@each_row(
    ("lines", "times", "due"),
    [
        # The next line says how many were left out.
        (2, (5.0, 6.0, 7.0, 14.9, 15.0, 16.0, 17.0, 40.0), [0, 0, None, None, 2, 0, None, 1]),
        # An interval begins with a line, and not where the last one ended.
        (1, (0.0, 19.0, 20.0, 28.9, 29.0), [0, 0, None, None, 2]),
    ],
)
def test_the_first_lines_of_an_interval_pass(
    lines: int, times: tuple[float, ...], due: list[int | None]
) -> None:
    limit = LineLimit(lines, 10.0)
    assert [limit.due(now) for now in times] == due


def test_of_no_event_there_is_more_than_a_line_a_second() -> None:
    for event, (lines, interval_s) in LIMITS.items():
        limit = LineLimit(lines, interval_s)
        passed = sum(limit.due(hundredth / 100) is not None for hundredth in range(6000))
        assert 6 <= passed <= 60, event


def test_each_event_and_reason_is_limited_for_itself(caplog: pytest.LogCaptureFixture) -> None:
    now = 100.0
    lines = LineFilter({"refused": (2, 10.0)}, lambda: now)

    def written(event: str, **fields: object) -> bool:
        caplog.clear()
        log.warning(event, extra={"fields": fields})
        return bool(caplog.records)

    log.addFilter(lines)
    try:
        for field in REASONS:
            flood = [written("refused", **{field: "a"}, number=n) for n in range(5)]
            assert flood == [True, True, False, False, False], field
            assert written("refused", **{field: "b"}), field
            # What else a line says makes no difference.
            assert not written("refused", **{field: "a"}, detail="other", peer="00"), field
        assert all(written("other") for _ in range(5))
        now = 110.0
        assert written("refused", reason="a", number=5)
        (record,) = caplog.records
        assert vars(record)["fields"] == {"reason": "a", "number": 5, "left_out": 4}
        # Reasons that are kept apart are bounded.
        count = MAX_REASONS + 50
        assert sum(written("refused", reason=str(number)) for number in range(count)) < count
        assert len(lines._lines) <= MAX_REASONS + 1
    finally:
        log.removeFilter(lines)


def test_a_logger_is_limited_for_as_long_as_the_block_runs(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with limited(log):
        # Of failures each kind for itself.
        for error in [ValueError] * 60 + [KeyError]:
            try:
                raise error
            except (LookupError, ValueError):
                log.exception("failed")
        failures = [record.exc_info[0] for record in caplog.records if record.exc_info]
        assert failures == [ValueError] * 50 + [KeyError]
    caplog.clear()
    for _ in range(60):
        log.error("failed")
    assert len(caplog.records) == 60
