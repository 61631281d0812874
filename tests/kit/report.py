"""A report of `tsqp bench` that was really measured: the one that docs/benchmarks.md quotes."""

import json
from functools import cache
from pathlib import Path

from tsqp.lab.bench.results import Case, Report

_RECORDED = Path(__file__).parents[2] / "benchmarks/results/bench_null_unix.json"


@cache
def recorded_report() -> Report:
    """Return the report: several policies and all baselines, and no timelines."""
    document = json.loads(_RECORDED.read_text(encoding="utf-8"))
    return Report.model_validate(document["report"])


def some_case(policy: str) -> Case:
    """Return a case of a policy that was measured, or of another one."""
    runs = recorded_report().policies
    return next((run for run in runs if run.policy == policy), runs[0]).cases[0]
