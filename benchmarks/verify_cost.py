"""What verification costs: the share of the trusted side's time that checks take, at decode.

    python -m benchmarks.verify_cost [--shape llama-3.2-1b] [--steps 40] [--batch 1,8] [--threads N]
        [--json FILE]

Policy `shielded`, with pads made ahead, beside the same policy with `verify = "none"`. They take
turns, a step each, against one service that answers at once with zeros; the model's linear weights
are zeros, so that zeros are right and pass their checks (`tsqp.lab.bench.prepare.write_hollow`). A
check costs the same whatever the numbers are.

`tee_ms`: a step with checks less wire, queue and service. `share`: how much longer a step takes
with the checks, of that; exit status 1 if it is more than 15 %. `check_ms`: what an observer notes
as `mask`, `verify` and `unmask` with the checks, less what it notes without them: not all that
checks cost, as what they push out of the caches is missing elsewhere.
"""

from contextlib import ExitStack
from functools import partial
from pathlib import Path
from statistics import median

from benchmarks.harness import CORES, Fields, Found, Options, Place, Repeated, main, noted
from tee_side.assembly import MaskSettings
from tee_side.policy.placement import Policy, load_policy
from tee_side.protect.pads.bank_files import BankPlace
from tee_side.protect.verification import LinearCheck
from tee_side.runner import RunnerSettings
from tsqp.lab.bench import prepare
from tsqp.lab.bench.shapes import find_shape
from tsqp.lab.bench.worker import observed
from tsqp.lab.measure import in_fresh_process, in_turns

POLICY = "shielded"
MOST_SHARE = 0.15
_WARM_UP, _PROMPT = 4, 16


def _believed(policy: Policy) -> Policy:
    """Return a policy that verifies nothing and is the same otherwise."""
    operators = {
        operator: tuple(p.model_copy(update={"verify": "none"}) for p in placements)
        for operator, placements in policy.operators.items()
    }
    return policy.model_copy(update={"name": f"{policy.name}-believed", "operators": operators})


def _observed_ms(repeated: Repeated) -> tuple[float, float]:
    """Return ms of one step: of the stages that hold checks, and of the trusted side in all."""
    ((elapsed_us, costs, _),) = observed(repeated.runner, repeated.step)
    stages = [cost.stages for cost in costs]
    away_us = sum(one.wire_us + one.queue_us + one.gpu_us for one in stages)
    # Compiled, a check is part of the passes that mask and unmask.
    noted_us = sum(one.mask_us + one.verify_us + one.unmask_us for one in stages)
    return noted_us / 1e3, (elapsed_us - away_us) / 1e3


def _measure_batch(
    model: Path, folder: Path, endpoint: str, batch: int, options: Options
) -> Fields:
    """Return milliseconds of one decode step of `batch` sequences; medians of steps in turns."""
    steps = 2 * options.steps + _WARM_UP
    both = []
    with ExitStack() as closing:
        for policy in (load_policy(POLICY), _believed(load_policy(POLICY))):
            tokens, place = batch * (steps + _PROMPT), folder / f"{policy.name}-{batch}"
            bank = prepare.pad_bank(model, policy, tokens, place, zeros=True)
            settings = RunnerSettings(
                model=model,
                policy=policy,
                gpu=(endpoint,),
                masks=MaskSettings(bank=BankPlace.at(bank, beside_bank=True) if bank else None),
                threads=options.threads,
            )
            both.append(Repeated(closing, settings, tokens=_PROMPT, batch=batch, steps=steps))
        timed = in_turns([one.timed_ms for one in both], options.steps, _WARM_UP)
        seen = in_turns([partial(_observed_ms, one) for one in both], options.steps)
        secrets = both[0].runner._assembly._secrets
    vectors = [one.exact for one in secrets.values() if isinstance(one, LinearCheck)]
    verified_ms, believed_ms = (median(row[n] for row in timed) for n in range(2))
    tee_ms = median(ms for (_, ms), _ in seen)
    return {
        "batch": batch,
        "verified_ms": verified_ms,
        "believed_ms": believed_ms,
        "check_ms": median(ms for (ms, _), _ in seen) - median(ms for _, (ms, _) in seen),
        "tee_ms": tee_ms,
        "share": (verified_ms - believed_ms) / tee_ms,
        "secrets_bytes": sum(
            part.nbytes
            for check in vectors
            for part in (check.vectors_kO, check.low_kI, check.high_kI)
        ),
        "runs": options.steps,
    }


def measure(options: Options, place: Place) -> Found:
    """Make the model, and measure every size of batch. Raises TsqpError."""
    made, folder = place.model(find_shape(options.shape), linear=False), place.folder
    model = in_fresh_process(prepare.write_hollow, prepare.endless(made, folder), folder / "hollow")
    endpoint = place.service(model, "--device", "null", "--arithmetic", "int8")
    line = "batch {batch}: {share:.1%} of {tee_ms:.2f} ms a step"
    results = [
        noted(line, _measure_batch(model, folder, endpoint, batch, options))
        for batch in options.batch
    ]
    return {
        "policy": POLICY,
        "shape": options.shape,
        "threads": options.threads,
        "most_share": MOST_SHARE,
        "results": results,
    }, all(one["share"] <= MOST_SHARE for one in results)


if __name__ == "__main__":
    main(
        __doc__,
        measure,
        shape="llama-3.2-1b",
        steps=40,
        batch=(1, 8),
        threads=max(1, CORES - 1),
    )
