"""What a limit of lines lets through, and what it counts."""

from __future__ import annotations

from gpu_side.log_limit import LineLimit


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
