"""How cost grows with layers, context, prompt length and batch: measured exponents.

    python -m benchmarks.growth [--shape llama-3.2-1b] [--policy attention-in-tee]
        [--layers 4,8,16] [--contexts 128,512,2048] [--prompts 128,256,512,1024,2048]
        [--batches 1,2,4,8] [--transport unix] [--json FILE]

Against `--device null`: what grows is our own cost. The shape with its layers cut to each of
`--layers`, random weights, each in processes of its own, as `tsqp bench` measures them. Exponents
are of cost = factor x size^exponent, by least squares over logarithms. Cost is a step less
Embedding and LM head in the TEE. A prompt's is split, as its observed operators are, into attention
and the rest: attention looks at each earlier token, so it alone may grow faster than the prompt.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from protocol.errors import TsqpError
from tee_side.policy.placement import load_policy
from tsqp.lab.bench.job import Plan
from tsqp.lab.bench.machine import describe_machine
from tsqp.lab.bench.model import Case, PolicyRun
from tsqp.lab.bench.random_model import write_random_model
from tsqp.lab.bench.run import Bench
from tsqp.lab.bench.settings import TRANSPORTS, BenchSettings
from tsqp.lab.bench.shapes import Shape, find_shape
from tsqp.lab.bench.summary import fit_exponent, sum_stages

ATTENTION = ("attention", "attn_scores", "softmax", "attn_values")
# An exponent this far above 1 is still called linear: that is how well such a line can be drawn.
TOLERANCE = 0.05


@dataclass(frozen=True)
class Sizes:
    """What to vary. Each list is measured with the first of the others (layers: the last)."""

    layers: tuple[int, ...]
    contexts: tuple[int, ...]
    prompts: tuple[int, ...]
    batches: tuple[int, ...]


@dataclass(frozen=True)
class Growth:
    """One cost against one size. `points`: pairs of size and ms.

    `may_exceed`: whether it may grow faster than linearly; `linear`: whether it does not.
    """

    cost: str
    against: str
    at: str
    points: tuple[tuple[int, float], ...]
    exponent: float | None
    r_squared: float | None
    worst: float | None
    may_exceed: bool
    linear: bool


def grown(
    cost: str,
    against: str,
    at: str,
    points: Iterable[tuple[int, float]],
    *,
    may_exceed: bool = False,
) -> Growth:
    """Fit one cost."""
    pairs = tuple(sorted(points))
    law = fit_exponent(pairs)
    return Growth(
        cost=cost,
        against=against,
        at=at,
        points=pairs,
        exponent=law.exponent if law else None,
        r_squared=law.r_squared if law else None,
        worst=law.worst if law else None,
        may_exceed=may_exceed,
        linear=law is not None and law.exponent <= 1 + TOLERANCE,
    )


def attention_ms(case: Case) -> float:
    """Return attention's part of a case's overhead.

    The median step is divided as its observed steps were, which are others, and slower.
    """
    parts = [c for c in case.operators if c.operator not in ("embedding", "lm_head")]
    total_us = sum_stages(c.stages for c in parts).total_us + max(0.0, case.rest_us)
    found_us = sum_stages(c.stages for c in parts if c.operator in ATTENTION).total_us
    return case.overhead_ms * found_us / total_us if total_us else 0.0


def growths(runs: dict[int, PolicyRun], sizes: Sizes) -> list[Growth]:
    """Fit everything, from a run for each number of layers."""
    full = runs[sizes.layers[-1]]
    context, prompt = sizes.contexts[0], sizes.prompts[0]
    layers = f"{sizes.layers[-1]} layers"

    def case(run: PolicyRun, phase: str, tokens: int, batch: int = 1) -> Case:
        (found,) = (c for c in run.cases if (c.phase, c.tokens, c.batch) == (phase, tokens, batch))
        return found

    def decode(run: PolicyRun) -> Case:
        return case(run, "decode", context)

    prompts = [case(full, "prefill", length) for length in sizes.prompts]
    contexts = [case(full, "decode", length) for length in sizes.contexts]
    batches = [case(full, "decode", context, size) for size in sizes.batches]
    return [
        grown(
            "decode step",
            "layers",
            f"context {context}",
            [(count, decode(run).overhead_ms) for count, run in runs.items()],
        ),
        grown(
            "prefill",
            "layers",
            f"prompt {prompt}",
            [(count, case(run, "prefill", prompt).overhead_ms) for count, run in runs.items()],
        ),
        grown("decode step", "context", layers, _points(contexts, "tokens", _overhead)),
        grown(
            "decode step, attention", "context", layers, _points(contexts, "tokens", attention_ms)
        ),
        grown(
            "prefill, attention",
            "prompt",
            layers,
            _points(prompts, "tokens", attention_ms),
            may_exceed=True,
        ),
        grown(
            "prefill, all else",
            "prompt",
            layers,
            _points(prompts, "tokens", lambda c: c.overhead_ms - attention_ms(c)),
        ),
        grown(
            "decode step",
            "batch",
            f"{layers}, context {context}",
            _points(batches, "batch", _overhead),
        ),
    ]


def _overhead(case: Case) -> float:
    return case.overhead_ms


def _points(
    cases: Sequence[Case], size: str, cost: Callable[[Case], float]
) -> list[tuple[int, float]]:
    return [(getattr(case, size), cost(case)) for case in cases]


def plan_for(count: int, sizes: Sizes, repeats: int, decode_steps: int) -> Plan:
    """Return which cases to measure with so many layers: all of them only with the most."""
    context = sizes.contexts[0]
    everything = count == sizes.layers[-1]
    contexts = [(length, 1) for length in (sizes.contexts if everything else (context,))]
    batches = [(context, size) for size in sizes.batches] if everything else []
    return Plan(
        prefill=sizes.prompts if everything else sizes.prompts[:1],
        decode=tuple(dict.fromkeys([*contexts, *batches])),
        generation=None,
        repeats=repeats,
        decode_steps=decode_steps,
    )


def measure(shape: Shape, policy: str, plan: Plan, *, transport: str, threads: int) -> PolicyRun:
    """Measure one number of layers. Raises TsqpError."""
    with tempfile.TemporaryDirectory(prefix="tsqp-growth-") as folder:
        # Random weights of the linear modules are for a service that computes.
        write_random_model(Path(folder), dict(shape.settings), linear=False)
        bench = Bench(
            BenchSettings(
                command="growth",
                policies=((policy, load_policy(policy)),),
                model=Path(folder),
                device="null",
                transport=transport,
                threads=threads,
                gpu_threads=1,
                baselines=False,
                plan=plan,
            ),
            _say,
        )
        bench.run()
        (run,) = bench.report().policies
        return run


def comma_separated(text: str) -> tuple[int, ...]:
    """Read whole numbers from 1, with commas; sorted, each once. Raises ArgumentTypeError."""
    parts = text.split(",")
    if not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise argparse.ArgumentTypeError(
            f"got {text!r}, expected whole numbers from 1, with commas"
        )
    return tuple(sorted({int(part) for part in parts}))


def _say(line: str) -> None:
    print(f"growth: {line}", file=sys.stderr, flush=True)


def _show(found: Growth) -> None:
    points = ", ".join(f"{size}: {cost:.2f}" for size, cost in found.points)
    exponent = "no fit" if found.exponent is None else f"{found.exponent:.2f}"
    print(f"{found.cost:24} {found.against:8} {exponent:>6}   {points} ms", flush=True)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", default="llama-3.2-1b")
    parser.add_argument("--policy", default="attention-in-tee")
    parser.add_argument("--transport", choices=TRANSPORTS, default="unix")
    parser.add_argument("--layers", type=comma_separated, default="4,8,16")
    parser.add_argument("--contexts", type=comma_separated, default="128,512,2048")
    parser.add_argument("--prompts", type=comma_separated, default="128,256,512,1024,2048")
    parser.add_argument("--batches", type=comma_separated, default="1,2,4,8")
    parser.add_argument("--repeats", type=int, default=5, help="of each prompt")
    parser.add_argument("--decode-steps", type=int, default=24)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="of the TEE")
    parser.add_argument("--json", type=Path, help="also write the result to this file")
    options = parser.parse_args(arguments)
    sizes = Sizes(options.layers, options.contexts, options.prompts, options.batches)
    try:
        shape, runs = find_shape(options.shape), {}
        for count in sizes.layers:
            _say(f"{count} layers")
            runs[count] = measure(
                shape.with_layers(count),
                options.policy,
                plan_for(count, sizes, options.repeats, options.decode_steps),
                transport=options.transport,
                threads=options.threads,
            )
        found = growths(runs, sizes)
    except TsqpError as error:
        sys.exit(f"growth: error: {error}")
    for one in found:
        _show(one)
    if options.json:
        document = {
            "machine": describe_machine(),
            "shape": options.shape,
            "policy": options.policy,
            "transport": options.transport,
            "tee_threads": options.threads,
            "growth": [asdict(one) for one in found],
        }
        options.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
