"""How plots look, and how they become SVG, by matplotlib (extra `bench`).

Colours: the stages from Paul Tol's muted scheme, the policies from Okabe and Ito's; both are told
apart by colour-blind readers. Lines also differ by marker and dashes, bars by their order.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from io import StringIO
from typing import TYPE_CHECKING, Any

from tsqp.extras import needing
from tsqp.lab.bench.model import STAGES
from tsqp.lab.bench.summary import REST_NAME, STAGE_NAMES

if TYPE_CHECKING:
    from matplotlib.figure import Figure

STAGE_COLOURS: dict[str, str] = dict(
    zip(
        STAGES,
        (
            "#332288",  # tee
            "#cc6677",  # mask
            "#882255",  # verify
            "#ddcc77",  # encode
            "#88ccee",  # wire
            "#aa4499",  # queue
            "#117733",  # gpu
            "#999933",  # decode
            "#44aa99",  # unmask
        ),
        strict=True,
    )
)
REST_COLOUR = "#cccccc"
WIDTH = 9.6
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
    # Names are text, whatever is in them.
    "text.parse_math": False,
    "svg.hashsalt": "tsqp",
    "svg.fonttype": "path",
}


@dataclass(frozen=True)
class Plot:
    """A picture, its heading, and the sentence that says what to conclude from it.

    `width`: in inches, of which a page makes the same length in all pictures.
    """

    title: str
    svg: str
    caption: str
    width: float = WIDTH


def check_installed(where: str) -> None:
    """Raise SettingsError if matplotlib is not there: before a run, not after it."""
    extra = "the extra bench (pip install '.[bench]'), or no HTML report"
    with needing(where, extra):
        # The package alone would be found where half of it, or what it needs, is missing.
        for name in ("matplotlib", "matplotlib.figure"):
            import_module(name)


@contextmanager
def new_figure(height: float, width: float = WIDTH) -> Iterator[Figure]:
    """Give a figure of so many inches in the style of the report."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    # Without pyplot: no global figures, and no windows.
    with mpl.rc_context(_STYLE):
        yield Figure(figsize=(width, height), layout="constrained")


def to_svg(figure: Figure) -> str:
    """Return the figure as an element for a page."""
    output = StringIO()
    # Without a date, so that equal reports give equal pages.
    figure.savefig(output, format="svg", metadata={"Date": None})
    text = output.getvalue()
    # Inside a page neither the prologue nor the description of the tool is of use.
    return re.sub(r"\s*<metadata>.*?</metadata>", "", text[text.index("<svg") :], flags=re.DOTALL)


def stage_legend(figure: Figure, stages: Sequence[str], *, rest: str | None = REST_NAME) -> None:
    """Explain the colours of some stages, above the plots. `rest`: what belongs to none of them."""
    from matplotlib.patches import Patch

    handles = [Patch(color=STAGE_COLOURS[name], label=STAGE_NAMES[name]) for name in stages]
    if rest is not None:
        handles.append(Patch(color=REST_COLOUR, label=rest))
    figure.legend(
        handles=handles,
        loc="outside upper left",
        ncols=len(handles),
        fontsize=9,
        handlelength=1,
        handleheight=1,
        columnspacing=1.2,
    )
