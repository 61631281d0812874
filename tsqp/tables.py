"""Tables for people."""

from collections.abc import Iterable, Sequence

import rich.box
from rich.console import Console, RenderableType
from rich.table import Column, Table
from rich.text import Text

# A column's heading, and whether it holds numbers.
Heading = tuple[str, bool]


def open_console() -> Console:
    """Return a console on stdout, 80 columns where that is no terminal."""
    # Shapes stand in brackets, which are no markup.
    return Console(markup=False, highlight=False, emoji=False)


def table(
    title: str,
    columns: Sequence[Heading],
    rows: Iterable[Sequence[RenderableType]],
    *,
    lines: bool = False,
    compact: bool = False,
) -> Table:
    """Return a table, without a heading where no column has one.

    The last cell of a row may be the one that is broken into lines. `compact`: fewer spaces.
    """
    made = Table(
        *(
            Column(
                heading, justify="right" if numbers else "left", no_wrap=numbers, overflow="fold"
            )
            for heading, numbers in columns
        ),
        title=title or None,
        title_justify="left",
        title_style="bold",
        box=rich.box.SIMPLE_HEAD,
        pad_edge=False,
        show_lines=lines,
        show_header=any(heading for heading, _ in columns),
        header_style="dim" if compact else "table.header",
        collapse_padding=compact,
        show_edge=not compact,
    )
    for row in rows:
        made.add_row(*row)
    return made


def definitions(pairs: Iterable[tuple[str | Text, RenderableType]], style: str = "") -> Table:
    """Return a list of terms, in a style, with what they mean, indented behind them."""
    made = Table.grid(Column(no_wrap=True, style=style), Column(overflow="fold"), padding=(0, 2))
    for term, meaning in pairs:
        made.add_row(term, meaning)
    return made
