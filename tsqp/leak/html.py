"""A leakage report as one page that needs nothing but itself: no network, no script."""

from __future__ import annotations

from base64 import b64encode
from dataclasses import dataclass
from importlib.resources import files

from jinja2 import DictLoader, Environment, StrictUndefined

from tsqp.bench.grids import Grid
from tsqp.bench.html import TEMPLATE
from tsqp.bench.plot_style import WIDTH, Plot
from tsqp.leak.model import PolicyLeak, Report
from tsqp.leak.plots import plots
from tsqp.leak.reconstruction import (
    PARTS,
    Panel,
    more_words,
    outcome,
    panels,
    part_of,
    read_words,
    unseen_words,
    visible,
)
from tsqp.leak.table import (
    attacks_grid,
    curve_grid,
    facts,
    lengths_grid,
    refusals,
    setup_pairs,
    summary_grid,
    verdict,
    warnings,
    work_grid,
)


@dataclass(frozen=True)
class _Picture:
    """As the macro `picture` of the bench page takes it; `width`: of the page's, in percent."""

    title: str
    source: str
    caption: str
    width: float


@dataclass(frozen=True)
class _Part:
    """The prompt or the answer: of each token what was said, what was read, whether it is right."""

    name: str
    tokens: tuple[tuple[str, str, bool], ...]
    more: str


@dataclass(frozen=True)
class _Reading:
    policy: str
    verdict: str
    outcome: str
    unseen: str
    parts: tuple[_Part, ...]


@dataclass(frozen=True)
class _Details:
    policy: PolicyLeak
    verdict: str
    attacks: Grid | None
    work: Grid | None
    refusals: tuple[tuple[str, str], ...]


def render_html(report: Report) -> str:
    """Return the page. Needs matplotlib (extra `bench`): see `plot_style.check_installed`."""
    macros, style = _of_bench()
    environment = Environment(
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        loader=DictLoader({"macros": macros, "style": style}),
    )
    template = environment.from_string(files("tsqp.leak").joinpath(TEMPLATE).read_text("utf-8"))
    return template.render(
        report=report,
        facts=facts(report),
        warnings=warnings(report),
        summary=summary_grid(report) if report.policies else None,
        lengths=lengths_grid(report),
        pictures=[_picture(plot) for plot in plots(report)],
        curves=[curve_grid(curve) for curve in report.curves],
        readings=[_reading(panel) for panel in panels(report)],
        policies=[_details(policy) for policy in report.policies],
        setup=setup_pairs(report),
    )


def _of_bench() -> tuple[str, str]:
    """Return the macros and the style of the bench page, which this page shares."""
    text = files("tsqp.bench").joinpath(TEMPLATE).read_text("utf-8")
    macros, _, page = text.partition("<!doctype html>")
    return macros, page.partition("<style>")[2].partition("</style>")[0]


def _picture(plot: Plot) -> _Picture:
    # As an image, because the identifiers of several SVGs within one page would be mixed up.
    data = b64encode(plot.svg.encode()).decode("ascii")
    width = round(100 * plot.width / WIDTH, 1)
    return _Picture(plot.title, f"data:image/svg+xml;base64,{data}", plot.caption, width)


def _reading(panel: Panel) -> _Reading:
    made = panel.reconstruction
    if made is None:
        return _Reading(panel.policy, panel.verdict, "", "", ())
    parts = []
    for name in PARTS:
        pieces, more = part_of(made, name)
        if pieces:
            tokens = tuple((visible(one.real), read_words(one), one.right) for one in pieces)
            parts.append(_Part(name, tokens, more_words(more)))
    return _Reading(panel.policy, panel.verdict, outcome(made), unseen_words(made), tuple(parts))


def _details(policy: PolicyLeak) -> _Details:
    return _Details(
        policy=policy,
        verdict=verdict(policy),
        attacks=attacks_grid(policy),
        work=work_grid(policy),
        refusals=tuple(refusals(policy)),
    )
