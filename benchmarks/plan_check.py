"""`tsqp plan` against measurement: what it says of a model, from three layers, and what that does.

    python -m benchmarks.plan_check [--case NAME ...] [--json FILE]

The whole model runs as under `tsqp bench`, against a service that takes as long as the accelerator
described and over a link that takes as long as the one described; both in the same run.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks.harness import CORES, Fields, Found, Options, Place, chosen, main, noted, say
from gpu_side.devices import DeviceProfile, find_profile
from tee_side.policy.placement import load_policy
from tee_side.words import PHASES
from tsqp.lab.bench.job import BenchSettings, Plan
from tsqp.lab.bench.run import Bench
from tsqp.lab.plan.costs import Machine, PlanSettings, fit_machine
from tsqp.lab.plan.planning import Planning
from tsqp.link import Link

# As slow as a few cores, so that it matters beside them.
SLOW = DeviceProfile(
    name="slow", tflops=2.0, int8_tops=4.0, gb_per_s=25.0, launch_us=20.0, pcie_gb_per_s=4.0
)
TOLERANCE = 0.2
_REPEATS = 5
_DECODE_STEPS = 40


@dataclass(frozen=True)
class Deployment:
    """One deployment, and which of its figures to compare.

    `fitted`: planned from what `tsqp plan --fit` measures of this machine, in place of its own
    round trips.
    """

    name: str
    shape: str
    policy: str
    gpu: str
    link: Link
    prompt_tokens: int = 128
    context: int = 128
    batch: int = 1
    micro_batches: int = 1
    transport: str = "tcp"
    fitted: bool = False


CASES = (
    Deployment("h100", "llama-3.2-1b", "attention-in-tee", "h100", Link(10.0, 100.0)),
    Deployment(
        "long-prompt", "llama-3.2-1b", "attention-in-tee", "h100", Link(10.0, 100.0), 512, 512
    ),
    Deployment("slow-gpu", "llama-3.2-1b", "attention-in-tee", "slow", Link(10.0, 100.0)),
    Deployment("shielded", "llama-3.2-1b", "shielded", "h100", Link(10.0, 100.0)),
    Deployment("batch-8", "tinyllama-1.1b", "attention-in-tee", "l4", Link(10.0, 100.0), batch=8),
    Deployment("slow-link", "qwen2.5-0.5b", "attention-in-tee", "h100", Link(1.0, 1000.0)),
    Deployment(
        "micro-batches",
        "tinyllama-1.1b",
        "attention-in-tee",
        "slow",
        Link(10.0, 100.0),
        256,
        batch=16,
        micro_batches=2,
    ),
    Deployment(
        *("fitted", "llama-3.2-1b", "attention-in-tee", "h100", Link(None, 0.0)),
        transport="unix",
        fitted=True,
    ),
    Deployment(
        *("fitted-shielded", "llama-3.2-1b", "shielded", "h100", Link(None, 0.0)),
        transport="unix",
        fitted=True,
    ),
)


def check(case: Deployment, slow: Path, machine: Machine | None) -> Iterator[Fields]:
    """Plan and measure a case; yield a row for the prompt and one for decoding."""
    policy = load_policy(case.policy)
    gpu = str(slow) if case.gpu == SLOW.name else case.gpu
    planning = Planning(
        PlanSettings(
            policies=((case.policy, policy),),
            profile=find_profile(gpu),
            link=case.link,
            cores=CORES,
            shape=case.shape,
            prompt_tokens=case.prompt_tokens,
            context=case.context,
            batch=case.batch,
            micro_batches=case.micro_batches,
            transport=case.transport,
            machine=machine if case.fitted else None,
        ),
        say,
    )
    bench = Bench(
        BenchSettings(
            command="plan_check",
            policies=((case.policy, policy),),
            shape=case.shape,
            device=f"model:{gpu}",
            threads=CORES,
            gpu_threads=1,
            micro_batches=case.micro_batches,
            transport=case.transport,
            link=case.link if case.link.gbps or case.link.rtt_us else None,
            baselines=False,
            plan=Plan(
                prefill=(case.prompt_tokens,),
                decode=((case.context, case.batch),),
                generation=None,
                repeats=_REPEATS,
                decode_steps=_DECODE_STEPS,
            ),
        ),
        say,
    )
    (planned,) = planning.run().policies
    (measured,) = bench.run().policies
    for phase in PHASES:
        (found,) = (one for one in measured.cases if one.phase == phase)
        prediction = planned.prefill if phase == "prefill" else planned.decode
        predicted_ms = prediction.total_us / 1e3
        yield noted(
            "{case}, {phase}: predicted {predicted_ms:.2f} ms, measured {measured_ms:.2f} ms"
            " ({error:+.1%})",
            {
                "case": case.name,
                "shape": case.shape,
                "policy": case.policy,
                "gpu": case.gpu,
                "link_gbps": case.link.gbps,
                "link_rtt_us": case.link.rtt_us,
                "phase": phase,
                "tokens": found.tokens,
                "batch": found.batch,
                "micro_batches": case.micro_batches,
                "transport": case.transport,
                "fitted": case.fitted,
                "predicted_ms": round(predicted_ms, 3),
                "measured_ms": round(found.step_ms.median, 3),
                "low_ms": round(found.step_ms.low, 3),
                "high_ms": round(found.step_ms.high, 3),
                "runs": found.step_ms.runs,
                "error": round(predicted_ms / found.step_ms.median - 1, 4),
                "bottleneck": prediction.bottleneck,
            },
        )


def measure(options: Options, place: Place) -> Found:
    """Check every case; a prediction may be a fifth off. Raises TsqpError."""
    names = chosen("--case", options.case, (case.name for case in CASES))
    cases = [case for case in CASES if case.name in names]
    machine = fit_machine(CORES, 0.0, None, say) if any(c.fitted for c in cases) else None
    # As `--device model:FILE` takes it.
    slow, fields = place.folder / "slow.toml", SLOW.model_dump()
    slow.write_text("".join(f"{key} = {json.dumps(fields[key])}\n" for key in fields))
    rows = [row for case in cases for row in check(case, slow, machine)]
    largest = max(abs(row["error"]) for row in rows)
    return {
        "slow": fields,
        "tolerance": TOLERANCE,
        "largest_error": largest,
        "rows": rows,
    }, largest <= TOLERANCE


if __name__ == "__main__":
    main(__doc__, measure, case=[])
