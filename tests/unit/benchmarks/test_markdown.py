"""Tables in Markdown."""

from __future__ import annotations

from benchmarks.markdown import grid_markdown, markdown
from tsqp.lab.bench.tables import Grid, Row


def test_a_cell_with_a_bar() -> None:
    assert markdown(["a", "b"], [["x|y", "1"]]) == "| a | b |\n| --- | ---: |\n| x\\|y | 1 |"


def test_headings_and_totals_of_a_report_are_bold() -> None:
    rows = (
        Row(("decode", "", ""), "group"),
        Row(("tsqp", "gpu", "1")),
        Row(("total", "", "1"), "total"),
    )
    assert grid_markdown(Grid("not shown", ("policy", "place", "ms"), rows, texts=2)).split(
        "\n"
    ) == [
        "| policy | place | ms |",
        "| --- | --- | ---: |",
        "| **decode** |  |  |",
        "| tsqp | gpu | 1 |",
        "| **total** |  | **1** |",
    ]
