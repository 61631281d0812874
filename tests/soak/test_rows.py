"""Every row of the scorecard in its short form, and the page that is written from the full one."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.soak.crowd import relative_slope
from tests.soak.page import PAGE, read_results, record, render, write_results
from tests.soak.row import (
    ORDER,
    Measured,
    Row,
    RowResult,
    find_rows,
    minutes,
    module_of,
    percentile,
)

ROWS = find_rows()


@pytest.mark.parametrize("row", ROWS, ids=module_of)
def test_short_form(row: Row) -> None:
    result = row.run(row.SHORT)
    assert result.passed, result.measured
    assert result.count == row.SHORT
    assert (result.name, result.test, result.passes) == (row.NAME, row.TEST, row.PASS)


def test_every_row_of_the_scorecard_is_there_once() -> None:
    assert [module_of(row) for row in ROWS] == list(ORDER)
    assert len({row.NAME for row in ROWS}) == len(ROWS)


def test_full_form_is_larger_than_the_short_one() -> None:
    assert all(0 < row.SHORT < row.FULL for row in ROWS)


def test_page_is_what_the_results_say() -> None:
    assert PAGE.read_text(encoding="utf-8") == render(ROWS, read_results()), "python -m tests.soak"


@pytest.mark.parametrize(
    ("values", "percent", "expected"),
    [
        ([], 95, 0.0),
        ([3.0], 95, 3.0),
        ([float(n) for n in range(1, 21)], 95, 19.0),
        ([float(n) for n in range(1, 21)], 100, 20.0),
        ([2.0, 1.0], 50, 1.0),
    ],
)
def test_percentile(values: list[float], percent: float, expected: float) -> None:
    assert percentile(values, percent) == expected


def result(row: Row, *, passed: bool) -> RowResult:
    measured: dict[str, Measured] = {"missed": "0 of 7", "p95, s": 0.12345, "most": 12_000}
    return RowResult(row.NAME, row.TEST, row.PASS, row.FULL, measured, 90.0, passed)


@pytest.mark.parametrize(("passed", "verdict"), [(True, "pass"), (False, "FAIL")])
def test_page_shows_what_is_recorded(tmp_path: Path, passed: bool, verdict: str) -> None:
    path = tmp_path / "results.json"
    write_results(record({}, ROWS[0], result(ROWS[0], passed=passed)), path)
    lines = render(ROWS, read_results(path)).splitlines()
    (shown,) = (line for line in lines if line.startswith(f"| {ROWS[0].NAME} (`"))
    assert f"`{module_of(ROWS[0])}`, {minutes(ROWS[0]):g} min) | {ROWS[0].TEST} (" in shown
    assert f"| missed: 0 of 7; p95, s: 0.123; most: 12,000 | {verdict} |" in shown
    assert sum("| not run |" in line for line in lines) == len(ROWS) - 1


def test_new_result_leaves_the_others(tmp_path: Path) -> None:
    first = record({}, ROWS[0], result(ROWS[0], passed=False))
    both = record(first, ROWS[1], result(ROWS[1], passed=True))
    again = record(both, ROWS[0], result(ROWS[0], passed=True))
    assert set(again) == {module_of(ROWS[0]), module_of(ROWS[1])}
    assert [again[module_of(row)]["passed"] for row in ROWS[:2]] == [True, True]


@pytest.mark.parametrize(("last", "slope"), [(1000, 0.0), (1100, 0.0762)])
def test_slope_is_of_the_time_after_the_warm_up(last: int, slope: float) -> None:
    # Memory that comes in the first fifth is no leak.
    sizes = [500] * 20 + [1000 + (last - 1000) * n // 99 for n in range(20, 100)]
    samples = [(float(n), size) for n, size in enumerate(sizes)]
    assert relative_slope(samples) == pytest.approx(slope, abs=2e-3)
