"""What a policy costs, from `tsqp bench`: measured now, or in a report that was written before."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from protocol.errors import SettingsError
from protocol.messages import FloatDtype
from tee_side.policy.placement import Policy
from tsqp.lab.bench.job import BenchSettings, Plan
from tsqp.lab.bench.model import Report
from tsqp.lab.bench.run import Bench
from tsqp.lab.leak.model import Cost

_CONTEXT = 128


def measure_cost(
    name: str,
    policy: Policy,
    model: Path,
    *,
    threads: int,
    dtype: FloatDtype | None,
    provisioned: tuple[Path, Path] | None,
    say: Callable[[str], None],
) -> Cost | None:
    """Decode some tokens with a service that answers at once; None if nothing was measured.

    `name`: as the policy was given; `provisioned`: directory and key of a feature mask. Raises what
    `tsqp bench` raises.
    """
    served, key = provisioned or (None, None)
    bench = Bench(
        BenchSettings(
            command="tsqp leak",
            policies=((name, policy),),
            model=model,
            device="null",
            transport="tcp",
            threads=threads,
            gpu_threads=1,
            dtype=dtype,
            key=key,
            server_model=served,
            baselines=False,
            default_context=True,
            plan=Plan(prefill=(1,), decode=((_CONTEXT, 1),), generation=None, repeats=2),
        ),
        say,
    )
    bench.run()
    return cost_in(bench.report(), policy.name)


def read_report(path: Path, model: str) -> Report:
    """Read what `tsqp bench --json` wrote of a model. Raises SettingsError."""
    report = read_recorded(path)
    if report.setup.model != model:
        raise SettingsError(
            str(path), got=f"the cost of {report.setup.model}", expected=f"that of {model}"
        )
    return report


def read_recorded(path: Path) -> Report:
    """Read what `tsqp bench --json` wrote, bare or as it is recorded. Raises SettingsError."""
    try:
        document = json.loads(path.read_bytes())
        inner = document.get("report", document) if isinstance(document, dict) else document
        return Report.model_validate(inner)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "something else"
        raise SettingsError(
            str(path), got=reason or "an error", expected="a report of tsqp bench --json"
        ) from None


def cost_in(report: Report, policy: str) -> Cost | None:
    """Return a policy's decoded token of one sequence, with the shortest context measured."""
    cases = [
        case
        for run in report.policies
        if run.policy == policy
        for case in run.cases
        if case.phase == "decode" and case.batch == 1
    ]
    if not cases:
        return None
    case = min(cases, key=lambda one: one.tokens)
    return Cost(
        overhead_ms=case.overhead_ms,
        rpcs=case.rpcs,
        bytes_sent=case.bytes_sent,
        bytes_received=case.bytes_received,
        context=case.tokens,
    )
