"""What to conclude from a report, and what to know before: sentences."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from tee_side.words import PHASES
from tsqp.lab.bench.model import STAGES, Case, PolicyRun, Report
from tsqp.lab.bench.summary import (
    REST_NAME,
    STAGE_NAMES,
    Measured,
    alike,
    baseline_name,
    by_operator,
    case_stages,
    compare,
    computes,
    main_cases,
    name_of,
    sustained_ms,
    whole_us,
)
from tsqp.lab.report import duration, figures, percent


def caveats(report: Report) -> list[str]:
    """Say what must be known before any figure is read, a sentence each."""
    device = report.setup.device
    found = []
    if computes(device) is False and any(c.rpcs for run in report.policies for c in run.cases):
        served = (
            "nothing is computed at the service: tokens/s are an upper bound"
            if device == "null"
            else "the service computes nothing and takes the time that was described to it:"
            " tokens/s are modelled"
        )
        found.append(
            f"With device {device} {served}, and policies that compute in the TEE what others"
            " leave to the service are not comparable with those."
        )
    names = [run.policy for run in report.policies if uses_pads(run)]
    if names:
        text = (
            f"{', '.join(names)}: pads are made ahead, and making them is not counted in times and"
            " tokens/s, but in sustained ones"
        )
        if computes(device) is False:
            text += "; the factors of these pads are zeros, which cost as much to use"
        found.append(f"{text}.")
    return found


def speed(report: Report, run: PolicyRun, case: Case) -> str:
    """Return tokens/s with what they are worth: `at most` where the service computed nothing."""
    said = at_most(report) if case.rpcs else ""
    pads = " (making pads not counted)" if uses_pads(run) and case.rpcs else ""
    return f"{said}{figures(case.tokens_per_s) or '0'} tokens/s{pads}"


def at_most(report: Report) -> str:
    """Return what to say before a speed that needs a service; empty where that computed."""
    kind = report.setup.device.partition(":")[0]
    return {"null": "at most ", "model": "a modelled "}.get(kind, "")


def uses_pads(run: PolicyRun) -> bool:
    """Say whether a policy uses up pads that were made ahead, by what it says that it discloses."""
    said = run.leakage_summary or ""
    alone = "uniform random numbers" in said and "collude" not in said
    return (alone or re.search(r"\bunder [^;]*\bpad\b", said) is not None) and any(
        case.rpcs for case in run.cases
    )


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


def findings(report: Report) -> Iterator[str]:
    """Say what to conclude, a sentence each, from the cases by which policies are compared."""
    for phase in PHASES:
        pairs = main_cases(report, phase)
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
    for baseline, beside in compare(report):
        ratios = [f"{figures(f.ratio)} times {f.policy}" for f in beside if f.ratio is not None]
        if ratios:
            yield (
                f"The baseline {baseline.name} takes {duration(baseline.step_ms.median * 1e3)} for"
                f" {baseline_name(baseline)}: {', '.join(ratios)}."
            )


def _offloading(report: Report, pairs: Sequence[Measured]) -> Iterator[str]:
    """Say whether each policy with a service wins against the fastest that never needs one.

    Nothing where no policy does without a service, or a step took no time.
    """
    alone = [pair for pair in pairs if not any(one.rpcs for one in pair[0].cases)]
    if not alone or min(case.step_ms.median for _, case in pairs) <= 0:
        return
    best, case = min(alone, key=lambda pair: pair[1].step_ms.median)
    alone_ms = case.step_ms.median
    said = []
    for run, other in (pair for pair in pairs if pair not in alone):
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
    stage = max(STAGES, key=lambda name: float(getattr(stages, name)))
    largest = sorted(operators, key=lambda op: -op.stages.total_us)[:2]
    names = " and ".join(f"{op.operator} ({percent(op.stages.total_us / whole)})" for op in largest)
    return (
        f"{run.policy}, {name_of(case)}: the largest stage is {STAGE_NAMES[stage]}"
        f" ({percent(getattr(stages, stage) / whole)}), the largest operators are {names}"
        + (f"; {REST_NAME} is {percent(case.rest_us / whole)}." if case.rest_us > 0 else ".")
    )
