"""Tables in Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tsqp.lab.bench.tables import Grid

# From left to right: cells of one row.
Cells = Sequence[str]


def markdown(columns: Cells, rows: Iterable[Cells], *, texts: int = 1) -> str:
    """Render a table; all columns after the first `texts` hold numbers."""
    rule = ["---" if place < texts else "---:" for place in range(len(columns))]
    return "\n".join(
        "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
        for cells in (columns, rule, *rows)
    )


def grid_markdown(grid: Grid) -> str:
    """Render a table of a report; headings and totals are bold."""
    rows = [
        row.cells if row.kind == "plain" else [f"**{cell}**" if cell else "" for cell in row.cells]
        for row in grid.rows
    ]
    return markdown(grid.columns, rows, texts=grid.texts)
