"""A report as one page that needs nothing but itself: no network, no script."""

from __future__ import annotations

from dataclasses import dataclass, replace

from tee_side.vocabulary import PHASES
from tsqp.bench.caveats import caveats, pads_note
from tsqp.bench.findings import findings, missing
from tsqp.bench.grids import (
    CPU_COLUMNS,
    STEP_COLUMNS,
    TRAFFIC_COLUMNS,
    Grid,
    baselines_grid,
    disclosures,
    facts,
    growth_grid,
    layers_grid,
    memory_grid,
    operators_grid,
    ping_pong_grid,
    requests_grid,
    setup_pairs,
    steps_grid,
)
from tsqp.bench.model import STAGES, PolicyRun, Report
from tsqp.bench.plots import plots
from tsqp.bench.summary import (
    REST_MEANING,
    REST_NAME,
    STAGE_MEANINGS,
    STAGE_NAMES,
    case_key,
    distinct,
    main_kind,
    name_of,
)
from tsqp.bench.timeline_plot import timelines
from tsqp.page.render import picture, render


@dataclass(frozen=True)
class _CaseView:
    name: str
    operators: Grid
    layers: Grid


@dataclass(frozen=True)
class _PolicyView:
    name: str
    summary: str
    note: str
    cases: tuple[_CaseView, ...]


def render_html(report: Report) -> str:
    """Return the page. Needs matplotlib (extra `bench`): see `plot_style.check_installed`.

    Operators of each layer are listed for the cases by which policies are compared; for the others
    each layer as a whole, to keep the page small. The JSON document has all of them.
    """
    report = distinct(report)
    grids = (growth_grid(report), baselines_grid(report), ping_pong_grid(report))
    overview = [requests_grid(report), memory_grid(report)]
    if any(run.cases for run in report.policies):
        steps = steps_grid(report)
        traffic = steps.select("Traffic", TRAFFIC_COLUMNS)
        overview = [
            steps.select("Steps", (*STEP_COLUMNS, *CPU_COLUMNS[1:])),
            replace(traffic, note=""),
            *overview,
        ]
    return render(
        "bench",
        program="tsqp bench",
        report=report,
        facts=facts(report),
        missing=missing(report),
        caveats=caveats(report),
        # What takes the time stands below the plots.
        findings=list(findings(report, parts=False)),
        overview=[grid for grid in overview if grid is not None],
        pictures=[picture(plot) for plot in plots(report)],
        timelines=[
            (policy, [picture(plot) for plot in found]) for policy, found in timelines(report)
        ],
        grids=[grid for grid in grids if grid is not None],
        policies=[_policy_view(report, run) for run in report.policies],
        stages=[
            *((STAGE_NAMES[name], STAGE_MEANINGS[name]) for name in STAGES),
            (REST_NAME, REST_MEANING),
        ],
        rest=REST_MEANING,
        disclosures=disclosures(report),
        setup=setup_pairs(report),
    )


def _policy_view(report: Report, run: PolicyRun) -> _PolicyView:
    chosen = {phase: main_kind(report, phase) for phase in PHASES}
    cases = tuple(
        _CaseView(
            name=name_of(case),
            operators=operators_grid(case, "Per operator"),
            layers=layers_grid(case, "Per layer", operators=case_key(case) == chosen[case.phase]),
        )
        for case in run.cases
        if case.operators
    )
    return _PolicyView(run.policy, run.summary, pads_note(report, [run]), cases)
