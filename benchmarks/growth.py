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

import torch

from benchmarks.harness import Fields, Found, Options, Place, main, say
from tee_side.policy.placement import load_policy
from tsqp.lab.bench.job import BenchSettings, Plan
from tsqp.lab.bench.results import Case, PolicyRun
from tsqp.lab.bench.run import Bench
from tsqp.lab.bench.shapes import Shape, find_shape
from tsqp.lab.bench.summary import ATTENTION, fit_exponent, sum_stages

# An exponent this far above 1 is still called linear: that is how well such a line can be drawn.
TOLERANCE = 0.05


def _attention(case: Case) -> float:
    """Return attention's part of a case's overhead.

    The median step is divided as its observed steps were, which are others, and slower.
    """
    parts = [c for c in case.operators if c.operator not in ("embedding", "lm_head")]
    total_us = sum_stages(c.stages for c in parts).total_us + max(0.0, case.rest_us)
    found_us = sum_stages(c.stages for c in parts if c.operator in ATTENTION).total_us
    return case.overhead_ms * found_us / total_us if total_us else 0.0


def _cost(name: str, case: Case) -> float:
    """Return a cost by its name: a case's overhead, or of it attention or all else."""
    if name.endswith("attention"):
        return _attention(case)
    return case.overhead_ms - (_attention(case) if name.endswith("all else") else 0.0)


def _fitted(cost: str, against: str, at: str, cases: dict[int, Case]) -> Fields:
    """Fit one cost against one size."""
    pairs = sorted((size, _cost(cost, case)) for size, case in cases.items())
    law = fit_exponent(pairs)
    return {
        "cost": cost,
        "against": against,
        "at": at,
        "points": pairs,
        **{name: getattr(law, name, None) for name in ("exponent", "r_squared", "worst")},
        # Attention alone may grow faster than the prompt.
        "may_exceed": cost == "prefill, attention",
        "linear": law is not None and law.exponent <= 1 + TOLERANCE,
    }


def _growths(runs: dict[int, PolicyRun], sizes: dict[str, list[int]]) -> list[Fields]:
    """Fit everything, from a run for each number of layers."""
    context, prompt, most = sizes["contexts"][0], sizes["prompts"][0], sizes["layers"][-1]
    layers = f"{most} layers"

    def case(phase: str, tokens: int, batch: int = 1, count: int = most) -> Case:
        key, cases = (phase, tokens, batch), runs[count].cases
        (found,) = (c for c in cases if (c.phase, c.tokens, c.batch) == key)
        return found

    contexts = {n: case("decode", n) for n in sizes["contexts"]}
    prompts = {n: case("prefill", n) for n in sizes["prompts"]}
    rows: tuple[tuple[str, str, str, dict[int, Case]], ...] = (
        (
            "decode step",
            "layers",
            f"context {context}",
            {n: case("decode", context, count=n) for n in sizes["layers"]},
        ),
        (
            "prefill",
            "layers",
            f"prompt {prompt}",
            {n: case("prefill", prompt, count=n) for n in sizes["layers"]},
        ),
        ("decode step", "context", layers, contexts),
        ("decode step, attention", "context", layers, contexts),
        ("prefill, attention", "prompt", layers, prompts),
        ("prefill, all else", "prompt", layers, prompts),
        (
            "decode step",
            "batch",
            f"{layers}, context {context}",
            {n: case("decode", context, n) for n in sizes["batches"]},
        ),
    )
    return [_fitted(*row) for row in rows]


def _measure(shape: Shape, count: int, sizes: dict[str, list[int]], options: Options) -> PolicyRun:
    """Measure one number of layers: every case only with the most. Raises TsqpError."""
    if count != sizes["layers"][-1]:
        sizes = {**{name: found[:1] for name, found in sizes.items()}, "batches": []}
    lengths = [(length, 1) for length in sizes["contexts"]]
    batches = [(sizes["contexts"][0], size) for size in sizes["batches"]]
    with Place() as place:
        settings = BenchSettings(
            command="growth",
            policies=((options.policy, load_policy(options.policy)),),
            # Random weights of the linear modules are for a service that computes.
            model=place.model(shape.with_layers(count), linear=False),
            device="null",
            transport=options.transport,
            threads=options.threads,
            gpu_threads=1,
            baselines=False,
            plan=Plan(
                prefill=tuple(sizes["prompts"]),
                decode=tuple(dict.fromkeys([*lengths, *batches])),
                generation=None,
                repeats=options.repeats,
                decode_steps=options.decode_steps,
            ),
        )
        (run,) = Bench(settings, say).run().policies
        return run


def measure(options: Options, _place: Place) -> Found:
    """Measure each number of layers, and fit. Raises TsqpError."""
    sizes = {n: list(getattr(options, n)) for n in ("layers", "contexts", "prompts", "batches")}
    shape = find_shape(options.shape)
    runs = {n: _measure(shape, n, sizes, options) for n in sizes["layers"]}
    return {
        "shape": options.shape,
        "policy": options.policy,
        "transport": options.transport,
        "tee_threads": options.threads,
        "growth": _growths(runs, sizes),
    }, True


if __name__ == "__main__":
    main(
        __doc__,
        measure,
        shape="llama-3.2-1b",
        policy="attention-in-tee",
        transport="unix",
        layers=(4, 8, 16),
        contexts=(128, 512, 2048),
        prompts=(128, 256, 512, 1024, 2048),
        batches=(1, 2, 4, 8),
        repeats=5,
        decode_steps=24,
        threads=torch.get_num_threads(),
    )
