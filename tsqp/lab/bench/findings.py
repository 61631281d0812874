"""What to conclude from a report, and what it lacks, in sentences."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tee_side.words import PHASES
from tsqp.lab.bench.caveats import at_most, speed
from tsqp.lab.bench.compare import Comparison, alike, baseline_name, compare
from tsqp.lab.bench.model import Case, PolicyRun, Report
from tsqp.lab.bench.summary import (
    REST_NAME,
    STAGE_NAMES,
    Measured,
    by_operator,
    case_stages,
    fastest_alone,
    largest_stage,
    main_cases,
    name_of,
    sustained_ms,
    whole_us,
)
from tsqp.lab.bench.units import duration, figures, percent


def missing(report: Report) -> list[str]:
    """Say what a report lacks, a sentence each; empty if it is complete."""
    found = [f"The run is incomplete: {report.incomplete}."] if report.incomplete else []
    if not report.policies:
        found.append("No policy was measured.")
    for run in report.policies:
        lacking: list[str] = [
            phase for phase in PHASES if not any(c.phase == phase for c in run.cases)
        ]
        lacking += ["generation"] if run.generation is None else []
        lacking += ["timeline"] if not run.timelines else []
        if lacking:
            found.append(f"{run.policy} lacks: {', '.join(lacking)}.")
    if not report.baselines:
        found.append("No baseline was measured: ratios to other systems are missing.")
    if not report.ping_pong:
        found.append("No ping-pong was measured: the floor of the transport is unknown.")
    return found


def findings(report: Report, *, parts: bool = True) -> Iterator[str]:
    """Say what to conclude, a sentence each, from the cases by which policies are compared.

    `parts`: also what takes the time within each policy.
    """
    for phase in PHASES:
        pairs = main_cases(report, phase)
        if not pairs:
            continue
        for same in alike(report, pairs):
            ranked = sorted(same, key=lambda pair: pair[1].step_ms.median)
            best, case = ranked[0]
            text = (
                f"{name_of(case).capitalize()}: {best.policy} takes"
                f" {duration(case.step_ms.median * 1e3)} a step, {speed(report, best, case)}"
            )
            others = [
                f"{run.policy} {figures(other.step_ms.median / case.step_ms.median)} times as long"
                for run, other in ranked[1:]
                if case.step_ms.median > 0
            ]
            yield text + (f"; {', '.join(others)}." if others else ".")
        yield from _offloading(report, pairs)
        if parts:
            yield from (dominant(run, case) for run, case in pairs)
    groups: dict[int, list[Comparison]] = {}
    for found in compare(report):
        groups.setdefault(id(found.baseline), []).append(found)
    for group in groups.values():
        baseline = group[0].baseline
        ratios = [f"{figures(f.ratio)} times {f.policy}" for f in group if f.ratio is not None]
        if ratios:
            yield (
                f"The baseline {baseline.name} takes {duration(baseline.step_ms.median * 1e3)} for"
                f" {baseline_name(baseline)}: {', '.join(ratios)}."
            )


def _offloading(report: Report, pairs: Sequence[Measured]) -> Iterator[str]:
    """Say whether each policy with a service wins against the fastest that never needs one."""
    split = fastest_alone(pairs)
    if split is None:
        return
    (best, case), sent = split
    alone_ms = case.step_ms.median
    said = []
    for run, other in sent:
        ratio = alone_ms / other.step_ms.median
        sustained = alone_ms / sustained_ms(run, other)
        text = f"{run.policy} {_outcome(ratio)}, {at_most(report)}{ratio:.2f} times as fast"
        if sustained < ratio:
            text += f" ({_outcome(sustained)} with its pads made on the same cores:"
            text += f" {sustained:.2f} times)"
        said.append(text)
    if said:
        yield (
            f"Offloading beside {best.policy}, the fastest without a service"
            f" ({duration(alone_ms * 1e3)} for {name_of(case)}): {'; '.join(said)}."
        )


def _outcome(ratio: float) -> str:
    return "wins" if ratio > 1 else "loses"


def dominant(run: PolicyRun, case: Case) -> str:
    """Say which stage and which operator of a case cost most."""
    stages = case_stages(case)
    operators = by_operator(case)
    if not operators or stages.total_us <= 0:
        return f"{run.policy}, {name_of(case)}: not split into operators."
    whole = whole_us(case)
    stage = largest_stage(stages)
    largest = sorted(operators, key=lambda op: -op.stages.total_us)[:2]
    names = " and ".join(f"{op.operator} ({percent(op.stages.total_us / whole)})" for op in largest)
    return (
        f"{run.policy}, {name_of(case)}: the largest stage is {STAGE_NAMES[stage]}"
        f" ({percent(getattr(stages, stage) / whole)}), the largest operators are {names}"
        + (f"; {REST_NAME} is {percent(case.rest_us / whole)}." if case.rest_us > 0 else ".")
    )
