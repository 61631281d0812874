"""Caveats of a report: tokens/s without a computing service, pads that are not counted."""

from __future__ import annotations

import re

from tsqp.lab.bench.compare import computes
from tsqp.lab.bench.model import Case, PolicyRun, Report
from tsqp.lab.bench.units import figures


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
    pads = _pads(report)
    return [*found, pads] if pads else found


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


def _pads(report: Report) -> str:
    """Say what figures of policies with pads leave out; empty if none of the policies has any."""
    names = [run.policy for run in report.policies if uses_pads(run)]
    if not names:
        return ""
    text = (
        f"{', '.join(names)}: pads are made ahead, and making them is not counted in times and"
        " tokens/s, but in sustained ones"
    )
    if computes(report.setup.device) is False:
        text += "; the factors of these pads are zeros, which cost as much to use"
    return f"{text}."
