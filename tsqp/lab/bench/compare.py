"""What of a report may be compared, and policies beside baselines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tee_side.words import OPERATORS
from tsqp.lab.bench.model import Baseline, Case, PolicyRun, Report
from tsqp.lab.bench.summary import Measured, case_name, find_case

# What a policy may leave to the service: whether the TEE computes it differs between policies.
_PLACED: tuple[str, ...] = (*OPERATORS, "attention")


def computes(device: str) -> bool | None:
    """Say whether a device computes anything: `null` and `model:X` do not; None if unknown."""
    kind = device.partition(":")[0]
    return {"null": False, "model": False, "cpu": True, "cuda": True}.get(kind)


def alike(report: Report, cases: Sequence[Measured]) -> list[list[Measured]]:
    """Group one kind of case by what may be ranked by time: all, where the service computes.

    Where it does not, only policies whose TEE computes the same: what a policy leaves to the
    service costs it nothing there.
    """
    if computes(report.setup.device) is not False:
        return [list(cases)] if cases else []
    groups: dict[object, list[Measured]] = {}
    for number, (run, case) in enumerate(cases):
        here = frozenset(
            (cost.operator, cost.layer)
            for cost in case.operators
            if cost.place == "tee" and cost.operator in _PLACED
        )
        # What was not split into operators is known to be like nothing else.
        groups.setdefault(here if case.operators else number, []).append((run, case))
    return list(groups.values())


@dataclass(frozen=True)
class Comparison:
    """A baseline beside one policy. `ratio`: baseline / ours, None where they can't be compared."""

    baseline: Baseline
    policy: str | None
    ours_ms: float | None
    ratio: float | None


def comparable(report: Report, cases: Sequence[Case], baseline: Baseline) -> bool:
    """Say whether a baseline did the same work as these cases of a policy, at least one.

    One that was timed against a service that answers at once: as cases that all leave work to such
    a service. Others compute everything: as cases that do so themselves, or with a service that
    computes.
    """
    device = report.setup.device
    if not cases:
        return False
    if baseline.against == "null":
        return device == "null" and all(case.rpcs for case in cases)
    if not any(case.rpcs for case in cases):
        return True
    return bool(computes(device)) and (baseline.against == "none" or device.startswith("cpu"))


def compare(report: Report) -> list[Comparison]:
    """Put each baseline beside each policy's same case; beside none (policy None) if it has none.

    Against a service that answers at once, what is compared is the overhead; otherwise the step.
    A baseline of a prompt and more new tokens than one is compared with the generation, which did
    the same work if all cases did.
    """
    found: list[Comparison] = []
    for baseline in report.baselines:
        matched = [
            (run, ours) for run in report.policies if (ours := _ours_ms(run, baseline)) is not None
        ]
        if not matched:
            found.append(Comparison(baseline, None, None, None))
        for run, ours in matched:
            same = comparable(report, _cases(run, baseline), baseline) and ours > 0
            ratio = baseline.step_ms.median / ours if same else None
            found.append(Comparison(baseline, run.policy, ours, ratio))
    return found


def is_generation(baseline: Baseline) -> bool:
    """Say whether a baseline timed a prompt and all its new tokens together."""
    return baseline.phase == "prefill" and baseline.new_tokens > 1


def _cases(run: PolicyRun, baseline: Baseline) -> Sequence[Case]:
    """Return a policy's cases that do what a baseline did: all of them for a whole request."""
    if is_generation(baseline):
        return run.cases
    case = find_case(run, baseline.phase, (baseline.tokens, 1, 1))
    return () if case is None else (case,)


def _ours_ms(run: PolicyRun, baseline: Baseline) -> float | None:
    if is_generation(baseline):
        made = run.generation
        same = made is not None and (made.prompt_tokens, made.new_tokens) == (
            baseline.tokens,
            baseline.new_tokens,
        )
        return made.total_ms if made is not None and same else None
    for case in _cases(run, baseline):
        against_nothing = baseline.against == "null" and case.rpcs
        return case.overhead_ms if against_nothing else case.step_ms.median
    return None


def baseline_name(baseline: Baseline) -> str:
    """Return the kind of step that a baseline timed."""
    if is_generation(baseline):
        return f"{baseline.tokens} + {baseline.new_tokens} new"
    name = case_name(baseline.phase, baseline.tokens)
    return f"{name} (mean of {baseline.new_tokens})" if baseline.new_tokens > 1 else name
