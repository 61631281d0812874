"""What reports are made of: tables, charts and pages, and numbers for people.

A `Grid` is text in cells, drawn on a terminal or on a page. Charts are SVG, by
matplotlib, in one style. Their colours are those of Okabe and Ito, which colour-blind readers tell
apart; lines also differ by marker and dashes, bars by their order. Pages and charts need the extra
`bench` (jinja2, matplotlib).
"""

from __future__ import annotations

import re
from base64 import b64encode
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from io import StringIO
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import rich.box
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from tsqp.extras import needing

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

T = TypeVar("T")
# A column of text is not made narrower than this for the sake of its neighbours.
_TEXT_WIDTH = 24

WIDTH = 9.6
GREY, LIGHT = "#888888", "#cccccc"
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
MARKERS = "os^DvPXx+"
_DASHES: tuple[Any, ...] = ("-", "--", "-.", (0, (1, 1.5)), (0, (5, 1, 1, 1, 1, 1)))
# Any, because matplotlib types the names as literals, of which each release has others.
_STYLE: Any = {
    "font.family": "DejaVu Sans",
    "font.size": 9.5,
    "axes.titlesize": 10.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#666666",
    "axes.labelcolor": "#333333",
    "axes.axisbelow": True,
    "grid.color": "#e4e4e4",
    "xtick.color": "#444444",
    "ytick.color": "#222222",
    "legend.frameon": False,
    "legend.fontsize": 8.5,
    # Names are text, whatever is in them.
    "text.parse_math": False,
    "svg.hashsalt": "tsqp",
    "svg.fonttype": "path",
}


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


# ---------------------------------------------------------------------------------------- page


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
    return _with_unit(size_bytes, ((1e3, "kB"), (1e6, "MB"), (1e9, "GB")))


def duration(duration_us: float) -> str:
    """Render a time: `12.3 us`, `4.56 ms`, `1.23 s`; `0 us` if zero."""
    return _with_unit(duration_us, ((1.0, "us"), (1e3, "ms"), (1e6, "s")))


def _with_unit(number: float, units: Sequence[tuple[float, str]]) -> str:
    """Render in the first unit of which there are less than a thousand, or in the last one."""
    fitting = (one for one in units if abs(number) < 999.5 * one[0])
    factor, unit = next(fitting, units[-1])
    return f"{figures(number / factor) or '0'} {unit}"


def percent(share: float) -> str:
    """Render a share of one: `41%`, `0.4%`, `<0.1%`."""
    if 0 < share < 0.0005:
        return "<0.1%"
    return f"{share * 100:.0f}%" if share >= 0.0095 or share == 0 else f"{share * 100:.1f}%"


# ------------------------------------------------------------------------------------- charts


@dataclass(frozen=True)
class Picture:
    """A chart, its title and its caption. `width`: in inches; a page scales all pictures alike."""

    title: str
    svg: str
    caption: str
    width: float = WIDTH

    @property
    def source(self) -> str:
        """A data URL: the identifiers of several SVGs in one page would be mixed up."""
        return f"data:image/svg+xml;base64,{b64encode(self.svg.encode()).decode('ascii')}"

    @property
    def percent(self) -> float:
        """The width on a page, in percent of the page's."""
        return round(100 * self.width / WIDTH, 1)


def check_installed(where: str) -> None:
    """Raise SettingsError if matplotlib is not there: before a run, not after it."""
    with needing(where, "the extra bench (pip install '.[bench]'), or no HTML report"):
        # The package alone would be found where half of it, or what it needs, is missing.
        import_module("matplotlib.figure")


@contextmanager
def drawing(height: float, width: float = WIDTH) -> Iterator[Figure]:
    """Give a figure of so many inches in the shared style. End with `picture` inside the block."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    # Without pyplot: no global figures, and no windows.
    with mpl.rc_context(_STYLE):
        yield Figure(figsize=(width, height), layout="constrained")


def picture(figure: Figure, title: str, caption: str) -> Picture:
    """Return a figure as an element for a page; equal figures give equal bytes."""
    output = StringIO()
    figure.savefig(output, format="svg", metadata={"Date": None})
    text = output.getvalue()
    # Inside a page neither the prologue nor the description of the tool is of use.
    svg = re.sub(r"\s*<metadata>.*?</metadata>", "", text[text.index("<svg") :], flags=re.DOTALL)
    return Picture(title, svg, caption, float(figure.get_figwidth()))


def legend(figure: Figure, colours: Sequence[tuple[str, str]], where: str = "upper left") -> None:
    """Explain colours beside the plots. `colours`: pairs of a label and its colour."""
    from matplotlib.patches import Patch

    handles = [Patch(color=colour, label=label) for label, colour in colours]
    # Any, for the same reason as `_STYLE`.
    place: Any = f"outside {where}"
    figure.legend(handles=handles, loc=place, ncols=min(len(handles), 10) or 1, handlelength=1)


def bars(
    axis: Axes,
    names: Sequence[str],
    parts: Sequence[tuple[str, Sequence[float]]],
    render: Callable[[float], str],
    limit: float | None = None,
    none: str = "none",
) -> None:
    """Draw a bar for each name, put together from parts, with its whole written behind it.

    `parts`: pairs of a colour and a length for each name. `limit`: where bars are cut off. `none`:
    what to write where there is no bar.
    """
    ends = [0.0] * len(names)
    for colour, lengths in parts:
        axis.barh(range(len(names)), lengths, left=ends, height=0.7, color=colour)
        ends = [end + length for end, length in zip(ends, lengths, strict=True)]
    most = max(ends) if limit is None else limit
    for place, end in enumerate(ends):
        cut = end > most * 1.001
        axis.annotate(
            f"{render(end)}, cut off" if cut else render(end) or none,
            (min(end, most), place),
            xytext=(3, 0),
            textcoords="offset points",
            va="center",
            ha="right" if cut else "left",
            fontsize=8,
            color="white" if cut else "#444444",
        )
    axis.set_yticks(range(len(names)), names)
    axis.set_ylim(len(names) - 0.4, -0.6)
    axis.set_xlim(0, most * 1.3 or 1.0)
    axis.tick_params(axis="y", length=0)
    axis.locator_params(axis="x", nbins=4)
    axis.xaxis.set_major_formatter(lambda number, _: render(number) or "0")
    axis.grid(axis="x")


def marks(
    axis: Axes,
    points: Sequence[tuple[float, float]],
    number: int,
    label: str,
    line: Sequence[tuple[float, float]] = (),
    colour: str | None = None,
) -> None:
    """Draw marks at points, and a line. `number`: which colour, marker and dashes they get."""
    colour = colour or COLOURS[number % len(COLOURS)]
    if line:
        dashes = _DASHES[number % len(_DASHES)]
        axis.plot(*zip(*line, strict=True), linestyle=dashes, color=colour, linewidth=1.2)
    marker = MARKERS[number % len(MARKERS)]
    xs, ys = [x for x, _ in points], [y for _, y in points]
    axis.plot(xs, ys, linestyle="none", marker=marker, markersize=5.5, color=colour, label=label)


def logarithmic(axis: Axes, sizes: Sequence[float]) -> None:
    """Make both axes logarithmic, with plain numbers. `sizes`: what to write at the lower one."""
    from matplotlib.ticker import FuncFormatter, MaxNLocator, NullFormatter, NullLocator

    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    # Labels that lie too close together would cover each other.
    shown = [x for before, x in pairwise([0.0, *sorted(sizes)]) if before == 0 or x / before > 1.3]
    axis.set_xticks(shown, [f"{x:,.0f}" for x in shown])
    axis.set_xticks([], minor=True)
    low, high = axis.get_ylim()
    if high / low < 5:
        # Powers of ten alone would leave such an axis without a number.
        axis.yaxis.set_major_locator(MaxNLocator(5))
        axis.yaxis.set_minor_locator(NullLocator())
    halves = FuncFormatter(lambda number, _: figures(number) if f"{number:e}"[0] in "25" else "")
    axis.yaxis.set_major_formatter(lambda number, _: figures(number))
    axis.yaxis.set_minor_formatter(halves if high / low < 30 else NullFormatter())
    axis.grid(which="major")
