"""Charts as SVG, by matplotlib (extra `bench`): one style, and the few kinds that reports have.

Colours are those of Okabe and Ito, which colour-blind readers tell apart. Lines also differ by
marker and dashes, bars by their order.
"""

from __future__ import annotations

import re
from base64 import b64encode
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from io import StringIO
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from tsqp.extras import needing
from tsqp.lab.report import figures

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

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
    extra = "the extra bench (pip install '.[bench]'), or no HTML report"
    with needing(where, extra):
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
    from matplotlib.ticker import FuncFormatter

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
    axis.xaxis.set_major_formatter(FuncFormatter(lambda number, _: render(number) or "0"))
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
    plain = FuncFormatter(lambda number, _: figures(number))
    halves = FuncFormatter(lambda number, _: figures(number) if f"{number:e}"[0] in "25" else "")
    axis.yaxis.set_major_formatter(plain)
    axis.yaxis.set_minor_formatter(halves if high / low < 30 else NullFormatter())
    axis.grid(which="major")
