"""The published way to run a LLaMA over the wire schema, as a baseline.

    python -m tsqp.lab.bench.published_client ENDPOINT [--tokens 1,128,512] [--new-tokens 64]
        [--repeats 3] [--threads N] [--against null|cpu|none] [--json FILE]

A REQ socket, the inline form, float32, one RPC for each module (7 Linear and 2 Matmul a layer,
Embedding, LM head). RMSNorm, RoPE, softmax and SiLU run here. No KV cache: every new token runs the
whole sequence again. No fused modules, and no causal mask. Written by us from the schema, with the
cheaper choice where the schema leaves one: the LM head sees the last token only, and tensors are
copied only where msgpack does it.

Prints a list of `tsqp.lab.bench.model.Baseline` as JSON. `--tokens`: one forward pass over so many
tokens, `--repeats` times unless that takes longer than `--case-s`. `--new-tokens`: as many tokens
after the longest of those prompts; `--sampled` of these passes are run, evenly spaced in length,
and those between are interpolated, as each pass costs what its length costs. Sizes come from Init,
the vocabulary's from the LM head's reply.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Literal

# Read once, when torch is imported: the programs have it too (tsqp/cli/program.py).
os.environ.setdefault("GOMP_SPINCOUNT", "0")

import torch

from protocol.errors import TsqpError
from tsqp.lab.bench.machine import write_results
from tsqp.lab.bench.model import Baseline, Spread
from tsqp.lab.bench.published_model import Counters, PublishedClient, PublishedModel

NAME = "published"
_ONE_THREAD_ROWS = 16


def measure_forward(
    model: PublishedModel,
    tokens: int,
    *,
    repeats: int,
    case_s: float,
    against: Literal["null", "cpu", "none"],
) -> Baseline:
    """Time one pass over a prompt of so many random tokens.

    Runs it `repeats` times, or until `case_s` is over; at least once.
    """
    ids = _prompt(model, tokens)
    before = Counters(**vars(model.client.counters))
    times_ms = [_timed_ms(model, ids)]
    while len(times_ms) < repeats and sum(times_ms) < case_s * 1e3:
        times_ms.append(_timed_ms(model, ids))
    return _baseline(
        model,
        before,
        len(times_ms),
        description="REQ socket, inline schema, one RPC per module, no fused modules",
        tokens=tokens,
        new_tokens=0,
        against=against,
        step_ms=_spread(times_ms),
    )


def measure_new_tokens(
    model: PublishedModel,
    tokens: int,
    *,
    new_tokens: int,
    sampled: int,
    against: Literal["null", "cpu", "none"],
) -> Baseline:
    """Estimate the time per new token after a prompt, from some of the passes that they take.

    `step_ms`: mean of all of them, with the fastest and the slowest that were run.
    """
    lengths = sample_lengths(tokens, new_tokens, sampled)
    before = Counters(**vars(model.client.counters))
    times_ms = [_timed_ms(model, _prompt(model, length)) for length in lengths]
    mean_ms = mean_over(lengths, times_ms)
    spread = Spread(median=mean_ms, low=min(times_ms), high=max(times_ms), runs=len(times_ms))
    return _baseline(
        model,
        before,
        len(lengths),
        description="every new token runs the whole sequence again (no KV cache); mean per token"
        f" from {len(lengths)} of {new_tokens} passes",
        tokens=tokens,
        new_tokens=new_tokens,
        against=against,
        step_ms=spread,
    )


def sample_lengths(tokens: int, new_tokens: int, sampled: int) -> list[int]:
    """Return sequence lengths of passes to run: the first, the last, evenly between."""
    last = tokens + new_tokens - 1
    if sampled < 2 or new_tokens < 2:
        return [(tokens + last) // 2]
    count = min(sampled, new_tokens)
    return [tokens + round(i * (new_tokens - 1) / (count - 1)) for i in range(count)]


def mean_over(lengths: Sequence[int], times_ms: Sequence[float]) -> float:
    """Return the mean over every length from first to last, interpolated linearly between."""
    if len(lengths) == 1:
        return times_ms[0]
    total, known = 0.0, list(zip(lengths, times_ms, strict=True))
    for (left, a), (right, b) in pairwise(known):
        total += sum(a + (b - a) * (n - left) / (right - left) for n in range(left, right))
    return (total + times_ms[-1]) / (lengths[-1] - lengths[0] + 1)


def _baseline(
    model: PublishedModel,
    before: Counters,
    passes: int,
    *,
    description: str,
    tokens: int,
    new_tokens: int,
    against: Literal["null", "cpu", "none"],
    step_ms: Spread,
) -> Baseline:
    """Put together a result; round trips and bytes are means of the passes since `before`."""
    now = model.client.counters
    return Baseline(
        name=NAME,
        description=description,
        phase="decode" if new_tokens else "prefill",
        tokens=tokens,
        new_tokens=new_tokens,
        dtype="float32",
        against=against,
        step_ms=step_ms,
        round_trips=(now.round_trips - before.round_trips) // passes,
        bytes_sent=(now.bytes_sent - before.bytes_sent) // passes,
        bytes_received=(now.bytes_received - before.bytes_received) // passes,
    )


def _timed_ms(model: PublishedModel, ids: torch.Tensor) -> float:
    # One for a few rows makes this client faster. For 128 tokens and more it does not: most of what
    # it computes is softmax.
    threads = torch.get_num_threads()
    torch.set_num_threads(1 if ids.shape[1] <= _ONE_THREAD_ROWS else threads)
    try:
        started = time.perf_counter()
        model.forward(ids)
        return (time.perf_counter() - started) * 1e3
    finally:
        torch.set_num_threads(threads)


def _prompt(model: PublishedModel, tokens: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(tokens)
    return torch.randint(model.vocab_size, (1, tokens), generator=generator)


def _spread(values: Sequence[float]) -> Spread:
    return Spread(
        median=statistics.median(values), low=min(values), high=max(values), runs=len(values)
    )


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("endpoint", help="of a running gpu-service, over ZeroMQ")
    parser.add_argument("--tokens", default="1,128,512", help="prompt lengths, with commas")
    parser.add_argument("--new-tokens", type=int, default=0)
    parser.add_argument("--sampled", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--case-s", type=float, default=10.0)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--against", choices=("null", "cpu", "none"), default="cpu")
    parser.add_argument("--timeout-s", type=float, default=120.0, help="of one RPC")
    parser.add_argument("--json", type=Path, help="write the result to this file instead")
    return parser.parse_args(arguments)


@torch.inference_mode()
def measure_all(options: argparse.Namespace) -> list[Baseline]:
    """Measure what the command line asks for."""
    torch.set_num_threads(options.threads)
    lengths = [int(text) for text in options.tokens.split(",")]
    with PublishedClient(options.endpoint, timeout_s=options.timeout_s) as client:
        model = PublishedModel(client)
        model.forward(_prompt(model, 1))  # warms up
        found = [
            measure_forward(
                model,
                tokens,
                repeats=options.repeats,
                case_s=options.case_s,
                against=options.against,
            )
            for tokens in lengths
        ]
        if options.new_tokens:
            found.append(
                measure_new_tokens(
                    model,
                    max(lengths),
                    new_tokens=options.new_tokens,
                    sampled=options.sampled,
                    against=options.against,
                )
            )
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print."""
    options = _parse(arguments)
    try:
        found = measure_all(options)
    except TsqpError as error:
        sys.exit(f"published_client: error: {error}")
    write_results(found, options.json)


if __name__ == "__main__":
    main()
