"""A report as one page that needs nothing but itself: no network, no script."""

from __future__ import annotations

from dataclasses import dataclass, replace

from tee_side.words import PHASES
from tsqp.lab.bench.caveats import caveats
from tsqp.lab.bench.findings import findings, missing
from tsqp.lab.bench.model import STAGES, PolicyRun, Report
from tsqp.lab.bench.plots import plots
from tsqp.lab.bench.summary import (
    REST_MEANING,
    REST_NAME,
    STAGE_MEANINGS,
    STAGE_NAMES,
    case_key,
    case_stages,
    distinct,
    main_kind,
    name_of,
)
from tsqp.lab.bench.tables import (
    CPU_COLUMNS,
    STEP_COLUMNS,
    SUSTAINED_COLUMNS,
    SUSTAINED_NOTE,
    TRAFFIC_COLUMNS,
    Grid,
    baselines_grid,
    facts,
    growth_grid,
    layers_grid,
    leakage_summaries,
    memory_grid,
    operators_grid,
    ping_pong_grid,
    requests_grid,
    setup_pairs,
    steps_grid,
)
from tsqp.lab.bench.timeline_plot import timelines
from tsqp.lab.page.render import picture, render


@dataclass(frozen=True)
class _CaseView:
    name: str
    operators: Grid
    layers: Grid


@dataclass(frozen=True)
class _PolicyView:
    name: str
    summary: str
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
        sustained = steps.select("With the making of pads", SUSTAINED_COLUMNS)
        overview = [
            steps.select("Steps", (*STEP_COLUMNS, *CPU_COLUMNS[1:])),
            replace(traffic, note=""),
            replace(sustained, note=SUSTAINED_NOTE),
            *overview,
        ]
    pictures = [picture(plot) for plot in plots(report)]
    splits = [case_stages(case) for run in report.policies for case in run.cases]
    used = {name for name in STAGES if any(getattr(stages, name) for stages in splits)}
    return render(
        "bench",
        program="tsqp bench",
        report=report,
        facts=facts(report),
        missing=missing(report),
        caveats=caveats(report),
        # The captions of the plots say what takes the time.
        findings=list(findings(report, parts=False)),
        overview=[grid for grid in overview if grid is not None],
        first=next(iter(pictures), None),
        pictures=pictures[1:],
        timelines=[
            (policy, [picture(plot) for plot in found]) for policy, found in timelines(report)
        ],
        grids=[grid for grid in grids if grid is not None],
        policies=[_policy_view(report, run) for run in report.policies],
        stages=[
            *((STAGE_NAMES[name], STAGE_MEANINGS[name]) for name in STAGES if name in used),
            (REST_NAME, REST_MEANING),
        ],
        rest=REST_MEANING,
        leakage_summaries=leakage_summaries(report),
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
    return _PolicyView(run.policy, run.summary, cases)
