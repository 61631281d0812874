"""The short run of every row of the scorecard, and the page that is made of the long ones."""

import pytest

from tests.faults.row import Row
from tests.faults.scorecard import PAGE, ROWS, read_results, render


@pytest.mark.parametrize("row", ROWS, ids=[row.name for row in ROWS])
def test_short_run(row: Row) -> None:
    assert not row.run(row.short, False).failed(timed=False)


def test_page_is_what_the_results_say() -> None:
    results = read_results()
    assert PAGE.read_text(encoding="utf-8") == render(results), "tests.faults --page"
    assert set(results) == {row.name for row in ROWS}
    assert len(results) == len(ROWS)
