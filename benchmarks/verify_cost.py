"""What verification costs: the share of the trusted side's time that checks take, at decode.

    python -m benchmarks.verify_cost [--shape llama-3.2-1b] [--steps 40] [--batch 1,8] [--threads N]
        [--json FILE]

Policy `shielded`, with pads made ahead, beside the same policy with `verify = "none"`. They take
turns, a step each, against one service that answers at once with zeros; the model's linear weights
are zeros, so that zeros are right and pass their checks (`tsqp.lab.bench.prepare.hollow`). A check
costs the same whatever the numbers are.

`tee_ms`: a step with checks less wire, queue and service. `share`: how much longer a step takes
with the checks, of that; exit status 1 if it is more than 15 %. `check_ms`: what an observer notes
as `mask`, `verify` and `unmask` with the checks, less what it notes without them: not all that
checks cost, as what they push out of the caches is missing elsewhere. `*_cpu_ms`: processor time of
the trusted side, all of it, without an observer.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

# Read once, when torch is imported: the programs have it too (tsqp/cli/program.py).
os.environ.setdefault("GOMP_SPINCOUNT", "0")

import torch

from protocol.errors import TsqpError
from tee_side.assembly import MaskSettings
from tee_side.policy.placement import Policy, load_policy
from tee_side.protect.pads.bank_files import BankPlace
from tee_side.protect.verification import Secrets
from tee_side.runner import Runner, RunnerSettings
from tsqp.lab.bench import prepare
from tsqp.lab.bench.collect import Collector
from tsqp.lab.bench.machine import describe_machine
from tsqp.lab.bench.shapes import find_shape
from tsqp.processes import start_service

POLICY = "shielded"
MOST_SHARE = 0.15
_WARM_UP = 4
_PROMPT = 16


@dataclass(frozen=True)
class Result:
    """Milliseconds of one decode step of `batch` sequences; medians of steps that took turns."""

    batch: int
    verified_ms: float
    believed_ms: float
    verified_cpu_ms: float
    believed_cpu_ms: float
    check_ms: float
    tee_ms: float
    share: float
    secrets_bytes: int
    runs: int


def believed(policy: Policy) -> Policy:
    """Return a policy that verifies nothing and is the same otherwise."""
    return policy.model_copy(
        update={
            "name": f"{policy.name}-believed",
            "operators": {
                operator: tuple(p.model_copy(update={"verify": "none"}) for p in placements)
                for operator, placements in policy.operators.items()
            },
        }
    )


class Contender:
    """A runner whose sequences decode on and on."""

    def __init__(
        self,
        closing: ExitStack,
        model: Path,
        policy: Policy,
        endpoint: str,
        folder: Path,
        *,
        batch: int,
        steps: int,
        threads: int,
    ) -> None:
        tokens = batch * (steps + _PROMPT)
        bank = prepare.bank(model, policy, tokens, folder / f"{policy.name}-{batch}", zeros=True)
        settings = RunnerSettings(
            model=model,
            policy=policy,
            gpu=(endpoint,),
            masks=MaskSettings(bank=BankPlace.at(bank, beside_bank=True) if bank else None),
            threads=threads,
        )
        self._runner = runner = closing.enter_context(Runner(settings))
        generator = torch.Generator().manual_seed(0)
        size = (batch, _PROMPT)
        prompts = torch.randint(runner.config.vocab_size, size, generator=generator).tolist()
        running = [
            runner.generate(prompt, max_new_tokens=steps + 2, with_text=False) for prompt in prompts
        ]
        while not all(one.arrived for one in running):
            runner.step()
        for one in running:
            closing.callback(one.close)

    def timed_ms(self) -> tuple[float, float]:
        """Run a step; return its time, and the processor time of this process."""
        started_ns, cpu_ns = time.perf_counter_ns(), time.process_time_ns()
        self._runner.step()
        ended_ns, cpu_ended_ns = time.perf_counter_ns(), time.process_time_ns()
        return (ended_ns - started_ns) / 1e6, (cpu_ended_ns - cpu_ns) / 1e6

    def observed_ms(self) -> tuple[float, float]:
        """Return ms of one step: of the stages that hold checks, and of the trusted side in all."""
        collector = Collector()
        self._runner.observe(collector)
        started_ns = time.perf_counter_ns()
        collector.reset(started_ns)
        self._runner.step()
        elapsed_us = (time.perf_counter_ns() - started_ns) / 1e3
        self._runner.observe(None)
        costs = [cost.stages for cost in collector.costs(1)]
        away_us = sum(cost.wire_us + cost.queue_us + cost.gpu_us for cost in costs)
        # Compiled, a check is part of the passes that mask and unmask.
        noted_us = sum(cost.mask_us + cost.verify_us + cost.unmask_us for cost in costs)
        return noted_us / 1e3, (elapsed_us - away_us) / 1e3

    @property
    def secrets_bytes(self) -> int:
        """Memory that the secrets take."""
        secrets = self._runner._assembly._secrets
        vectors = secrets.vectors.values() if isinstance(secrets, Secrets) else ()
        return sum(check.nbytes for check in vectors)


def measure(model: Path, folder: Path, *, batch: int, steps: int, threads: int) -> Result:
    """Measure one size of batch. Raises TsqpError."""
    policy = load_policy(POLICY)
    with ExitStack() as closing:
        bind = f"unix://{folder}/gpu-{batch}.sock"
        command = [str(model), "--device", "null", "--bind", bind, "--threads", "1"]
        _, endpoint = start_service(closing, [*command, "--arithmetic", "int8"])
        both = [
            Contender(
                closing,
                model,
                chosen,
                endpoint,
                folder,
                batch=batch,
                steps=2 * steps + _WARM_UP,
                threads=threads,
            )
            for chosen in (policy, believed(policy))
        ]
        for one in both:
            for _ in range(_WARM_UP):
                one.timed_ms()
        gc.collect()
        gc.freeze()  # as tee-runner does
        timed = [[one.timed_ms() for one in both] for _ in range(steps)]
        noted = [[one.observed_ms() for one in both] for _ in range(steps)]
        gc.unfreeze()
        secrets_bytes = both[0].secrets_bytes
    (verified_ms, verified_cpu_ms), (believed_ms, believed_cpu_ms) = (
        [statistics.median(times) for times in zip(*column, strict=True)]
        for column in zip(*timed, strict=True)
    )
    with_checks, without = (list(column) for column in zip(*noted, strict=True))
    check_ms = statistics.median(ms for ms, _ in with_checks) - statistics.median(
        ms for ms, _ in without
    )
    tee_ms = statistics.median(ms for _, ms in with_checks)
    return Result(
        batch=batch,
        verified_ms=verified_ms,
        believed_ms=believed_ms,
        verified_cpu_ms=verified_cpu_ms,
        believed_cpu_ms=believed_cpu_ms,
        check_ms=check_ms,
        tee_ms=tee_ms,
        share=(verified_ms - believed_ms) / tee_ms,
        secrets_bytes=secrets_bytes,
        runs=steps,
    )


def _say(line: str) -> None:
    print(f"verify_cost: {line}", file=sys.stderr, flush=True)


def measure_all(options: argparse.Namespace) -> list[Result]:
    """Make the model, and measure every size of batch. Raises TsqpError."""
    find_shape(options.shape)
    results = []
    with tempfile.TemporaryDirectory(prefix="tsqp-verify-") as name:
        folder = Path(name)
        (folder / "model").mkdir()
        _say(f"making {options.shape}, first with random weights, for its scales, then with zeros")
        prepare.random_model(folder / "model", options.shape, linear=True)
        calibrated = prepare.calibration(prepare.endless(folder / "model", folder), folder)
        model = prepare.hollow(calibrated, folder)
        for batch in map(int, options.batch.split(",")):
            _say(f"batch {batch}")
            results.append(
                measure(model, folder, batch=batch, steps=options.steps, threads=options.threads)
            )
    return results


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure; exit status 1 if checks take more than they should."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    cores = len(os.sched_getaffinity(0))
    parser.add_argument("--shape", default="llama-3.2-1b")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--batch", default="1,8", help="sequences, comma-separated")
    parser.add_argument("--threads", type=int, default=max(1, cores - 1))
    parser.add_argument("--json", type=Path, help="write here instead of to stdout")
    options = parser.parse_args(arguments)
    try:
        results = measure_all(options)
    except TsqpError as error:
        sys.exit(f"verify_cost: error: {error}")
    document: dict[str, Any] = {
        "machine": describe_machine(),
        "policy": POLICY,
        "shape": options.shape,
        "threads": options.threads,
        "most_share": MOST_SHARE,
        "results": [asdict(result) for result in results],
    }
    text = json.dumps(document, indent=1)
    if options.json is None:
        print(text)
    else:
        options.json.write_text(text + "\n", encoding="utf-8")
    for result in results:
        _say(
            f"batch {result.batch}: {result.share:.1%} of {result.tee_ms:.2f} ms a step;"
            f" {result.check_ms:.2f} ms in the checks themselves"
        )
    sys.exit(1 if any(result.share > MOST_SHARE for result in results) else 0)


if __name__ == "__main__":
    main()
