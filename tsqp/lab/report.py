"""Tables for people. A `Grid` is text in cells, drawn on a terminal, on a page, or in Markdown.

The pages need the extra `bench` (jinja2).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import rich.box
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

T = TypeVar("T")
# A column of text is not made narrower than this for the sake of its neighbours.
_TEXT_WIDTH = 24


@dataclass(frozen=True)
class Row:
    """A row of cells. `group`: a heading over the rows below; `total`: the sum of those above."""

    cells: tuple[str, ...]
    kind: Literal["plain", "group", "total"] = "plain"


@dataclass(frozen=True)
class Grid:
    """A table. `texts`: how many columns from the left hold text; all others hold numbers."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[Row, ...]
    texts: int = 1
    note: str = ""

    def select(self, title: str, names: Sequence[str], *, texts: int = 1) -> Grid:
        """Return a table of some of the columns, in the order of `names`."""
        places = [self.columns.index(name) for name in names]
        rows = tuple(Row(tuple(row.cells[i] for i in places), row.kind) for row in self.rows)
        return Grid(title, tuple(names), rows, texts, self.note)

    def without_empty(self, keep: Sequence[str] = ()) -> Grid:
        """Leave out the columns of numbers that hold nothing, unless `keep` names them."""
        names = [
            name
            for place, name in enumerate(self.columns)
            if place < self.texts or name in keep or any(row.cells[place] for row in self.rows)
        ]
        return self.select(self.title, names, texts=self.texts)


def grid(
    title: str, columns: Mapping[str, Callable[[T], str]], items: Iterable[T], note: str = ""
) -> Grid:
    """Return a table with a row for each item. `columns`: what a cell of each says of it."""
    rows = tuple(Row(tuple(cell(one) for cell in columns.values())) for one in items)
    return Grid(title, tuple(columns), rows, note=note)


def heading(name: str, columns: Sequence[str]) -> Row:
    """Return a heading over the rows below."""
    return Row((name, *[""] * (len(columns) - 1)), "group")


# ----------------------------------------------------------------------------------- terminal


def terminal(grid: Grid, console: Console) -> Iterator[RenderableType]:
    """Yield what to print: the title, the table and the note.

    Columns for which the terminal has no room follow in further tables, each behind the first
    column, without the rows that say nothing there.
    """
    if grid.title:
        yield Text(grid.title, style="bold")
    least = [_least_width(grid, place) for place in range(len(grid.columns))]
    shown = [0]
    for place in range(1, len(grid.columns)):
        # Two columns of space go with each.
        if len(shown) > 1 and sum(least[i] + 2 for i in (*shown, place)) > console.width:
            yield _drawn(grid, shown, least)
            shown = [0]
        shown.append(place)
    yield _drawn(grid, shown, least)
    if grid.note:
        yield Text(grid.note, style="dim")
        yield ""


def _least_width(grid: Grid, place: int) -> int:
    """Return how narrow a column may be: headings are broken into lines, numbers are not."""
    longest = max((len(row.cells[place]) for row in grid.rows), default=0)
    cells = min(longest, _TEXT_WIDTH) if place < grid.texts else longest
    indent = 2 if place == 0 and any(row.kind == "group" for row in grid.rows) else 0
    return max(cells + indent, *map(len, grid.columns[place].split()), 1)


def _drawn(grid: Grid, places: Sequence[int], least: Sequence[int]) -> Table:
    grouped = any(row.kind == "group" for row in grid.rows)
    made = Table(box=rich.box.SIMPLE_HEAD, collapse_padding=True, pad_edge=False)
    for place in places:
        justify: Literal["left", "right"] = "left" if place < grid.texts else "right"
        heading = grid.columns[place]
        made.add_column(heading, justify=justify, overflow="fold", min_width=least[place])
    for row in grid.rows:
        name, *cells = (row.cells[place] for place in places)
        if row.kind == "plain" and 1 not in places and not any(cells):
            continue
        if row.kind == "total" or (row.kind == "group" and made.row_count):
            made.add_section()
        plain = row.kind == "plain"
        name = f"  {name}" if grouped and plain else name
        made.add_row(name, *cells, style=None if plain else "bold")
    return made


# ------------------------------------------------------------------------------ page, Markdown


def page(package: str, **values: Any) -> str:
    """Fill in `report.html.j2` of a package of `tsqp.lab`; return a page that needs nothing else.

    `values`: what the template names, and for its frame (`tsqp/lab/page`) `program`, `report` with
    its setup, `facts`, and `setup`: pairs of a name and a text. Grids and pictures are drawn by
    the macros of `page/macros.html.j2`.
    """
    from jinja2 import Environment, PackageLoader, PrefixLoader, StrictUndefined

    environment = Environment(
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        loader=PrefixLoader({name: PackageLoader("tsqp.lab", name) for name in ("page", package)}),
    )
    return environment.get_template(f"{package}/report.html.j2").render(**values)


def markdown(columns: Sequence[str], rows: Iterable[Sequence[str]], *, texts: int = 1) -> str:
    """Return a table in Markdown; all columns after the first `texts` hold numbers."""
    rule = ["---" if place < texts else "---:" for place in range(len(columns))]
    return "\n".join(
        "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
        for cells in (columns, rule, *rows)
    )


# ------------------------------------------------------------------------------------ numbers


def figures(number: float) -> str:
    """Render with about three figures: `1,234`, `123`, `12.3`, `1.23`, `0.12`; empty if zero."""
    size = abs(number)
    if size == 0:
        return ""
    if size < 0.0005:
        return "<0.001"
    digits = 0 if size >= 99.95 else 1 if size >= 9.995 else 2 if size >= 0.0995 else 3
    return f"{number:,.{digits}f}"


def whole(number: float) -> str:
    """Render a count: `12`, or `12.5` where a mean is none; empty if zero."""
    return figures(number) if number != round(number) else f"{number:,.0f}" if number else ""


def size(size_bytes: float) -> str:
    """Render bytes: `512 B`, `12.3 kB`, `4.56 MB`; empty if zero."""
    if size_bytes < 999.5:
        return f"{size_bytes:.0f} B" if size_bytes else ""
    for limit, factor, unit in ((999.5e3, 1e3, "kB"), (999.5e6, 1e6, "MB")):
        if size_bytes < limit:
            return f"{figures(size_bytes / factor)} {unit}"
    return f"{figures(size_bytes / 1e9)} GB"


def duration(duration_us: float) -> str:
    """Render a time: `12.3 us`, `4.56 ms`, `1.23 s`; `0 us` if zero."""
    for limit, factor, unit in ((999.5, 1.0, "us"), (999.5e3, 1e3, "ms")):
        if abs(duration_us) < limit:
            return f"{figures(duration_us / factor) or '0'} {unit}"
    return f"{figures(duration_us / 1e6)} s"


def percent(share: float) -> str:
    """Render a share of one: `41%`, `0.4%`, `<0.1%`."""
    if 0 < share < 0.0005:
        return "<0.1%"
    return f"{share * 100:.0f}%" if share >= 0.0095 or share == 0 else f"{share * 100:.1f}%"
