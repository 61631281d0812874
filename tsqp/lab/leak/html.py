"""A leakage report as one page that needs nothing but itself: no network, no script."""

from __future__ import annotations

from dataclasses import dataclass

from tsqp.lab.leak.model import PolicyLeak, Report
from tsqp.lab.leak.plots import plots
from tsqp.lab.leak.reconstruction import (
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
from tsqp.lab.leak.table import (
    attacks_grid,
    curve_grid,
    lengths_grid,
    refusals,
    summary_grid,
    work_grid,
)
from tsqp.lab.leak.words import facts, setup_pairs, verdict, warnings
from tsqp.lab.report import Grid, page


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
    return page(
        "leak",
        program="tsqp leak",
        report=report,
        facts=facts(report),
        warnings=warnings(report),
        summary=summary_grid(report) if report.policies else None,
        lengths=lengths_grid(report),
        pictures=plots(report),
        curves=[curve_grid(curve) for curve in report.curves],
        readings=[_reading(panel) for panel in panels(report)],
        policies=[_details(policy) for policy in report.policies],
        setup=setup_pairs(report),
    )


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
