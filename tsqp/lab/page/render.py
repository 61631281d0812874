"""Renders a report as one page that needs nothing but itself: no network, no script."""

from __future__ import annotations

from base64 import b64encode
from dataclasses import dataclass
from typing import Any

from jinja2 import Environment, PackageLoader, PrefixLoader, StrictUndefined

from tsqp.lab.bench.plot_style import WIDTH, Plot

_TEMPLATE = "report.html.j2"


@dataclass(frozen=True)
class Picture:
    """As the macro `picture` takes it. `source`: a data URL; `width`: of the page's, in percent.

    Letters are of one size in all pictures.
    """

    title: str
    source: str
    caption: str
    width: float


def picture(plot: Plot) -> Picture:
    """Return a plot as an image: the identifiers of several SVGs in one page would be mixed up."""
    data = b64encode(plot.svg.encode()).decode("ascii")
    width = round(100 * plot.width / WIDTH, 1)
    return Picture(plot.title, f"data:image/svg+xml;base64,{data}", plot.caption, width)


def render(package: str, **values: Any) -> str:
    """Fill in the template of a package of `tsqp`, which extends `page/base.html.j2`.

    `values`: what the template names, and for the frame `program`, `report` with its setup, `facts`
    and `setup`: pairs of a name and a text.
    """
    environment = Environment(
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        loader=PrefixLoader({name: PackageLoader("tsqp.lab", name) for name in ("page", package)}),
    )
    return environment.get_template(f"{package}/{_TEMPLATE}").render(**values)
