"""RPC times of a service of two ranks beside those of one process, on the CPUs of one machine.

    python -m benchmarks.tensor_parallel [--rows 1,2,4,8,32,128] [--quantile 0.5] [--json FILE]

All hold random weights in the shape of Llama-3.2-1B, and are asked in turns, a block each: one
process with a thread for each core, two ranks that share the cores, and one process with as many
threads as one rank has. Printed are medians of the round trip over a Unix stream, in milliseconds,
for each operator and for a layer's four together (of a busy machine, a lower quantile says more).

- ratio: of two ranks to one process on the same cores. What ranks cost is the exchange.
- gain: of one process with the cores of one rank to two ranks, as where the second rank brings
  cores of its own. The crossover is where it passes 1.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from protocol.channel import Channel
from protocol.connect import open_channel
from protocol.messages import (
    FUSED_MODULES,
    LinearOperator,
    Request,
    RingLinearRequest,
    RingLMHeadRequest,
)
from protocol.model.config import ModelConfig
from protocol.tensors import from_torch
from tsqp.lab.bench.machine import describe_machine
from tsqp.lab.bench.ping_pong import running
from tsqp.lab.bench.random_model import write_random_model
from tsqp.lab.bench.shapes import find_shape

SHAPE = "llama-3.2-1b"
# At one row a request.
WANTED_AT_DECODE = 1.6
_BLOCK = 4


def request_of(
    config: ModelConfig, operator: LinearOperator | None, layer: int, rows: int
) -> Request:
    """Return a product in the ring with one operator's weight; None: that of the LM head."""
    names = None if operator is None else FUSED_MODULES[operator]
    width = config.hidden_size if names is None else config.module_shape(names[0])[1]
    bounds = torch.iinfo(torch.int32)
    elements = from_torch(torch.randint(bounds.min, bounds.max, (rows, width), dtype=torch.int32))
    if names is None:
        return RingLMHeadRequest(elements=elements)
    return RingLinearRequest(layer_idx=layer, module_names=names, elements=elements)


def times_us(
    channels: Sequence[Channel], requests: list[Request], rounds: int, quantile: float
) -> list[float]:
    """Return a quantile of the round trips of each channel; they are asked in turns, in blocks.

    `requests`: of other layers, one after the other, so that no weight stays in a cache.
    """
    times: list[list[float]] = [[] for _ in channels]
    for block in range(max(1, rounds // _BLOCK) + 1):
        for channel, taken in zip(channels, times, strict=True):
            for number in range(_BLOCK):
                request = requests[(block * _BLOCK + number) % len(requests)]
                began = time.perf_counter_ns()
                channel.wait(channel.submit(request))
                if block:  # the first one warms up
                    taken.append((time.perf_counter_ns() - began) / 1e3)
    return [sorted(taken)[int(quantile * (len(taken) - 1))] for taken in times]


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description="Measure two ranks beside one process.")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--round-trips", type=int, default=40)
    parser.add_argument("--cores", default=",".join(map(str, sorted(os.sched_getaffinity(0)))))
    parser.add_argument("--rows", default="1,2,4,8,32,128", help="decode first, then prefill")
    parser.add_argument("--quantile", type=float, default=0.5)
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    cores = {int(core) for core in options.cores.split(",")}
    os.sched_setaffinity(0, cores)  # children's, too
    shape = find_shape(SHAPE).with_layers(options.layers)
    config = shape.config()
    torch.set_num_threads(1)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        write_random_model(folder, shape.settings)
        channels: list[Channel] = []
        for ranks, threads in ((1, len(cores)), (2, len(cores) // 2), (1, len(cores) // 2)):
            program = str(Path(sys.executable).with_name("gpu-service"))
            command = [program, str(folder), "--bind", f"unix://{folder}/{len(channels)}"]
            command += ["--arithmetic", "int8", "--threads", str(max(1, threads))]
            command += ["--tensor-parallel", str(ranks)]
            endpoint = stack.enter_context(running(command, " ready endpoint=", "stderr"))
            channels.append(stack.enter_context(open_channel(endpoint, timeout_s=600.0)))
        print(f"{SHAPE}, int8, {len(cores)} cores")
        print("rows  operator          one      two  ratio  one of half    gain")
        results: list[dict[str, Any]] = []
        for rows in map(int, options.rows.split(",")):
            rounds = max(_BLOCK, options.round_trips // (1 if rows < 32 else 8))
            layer_us = [0.0, 0.0, 0.0]
            for operator in (*FUSED_MODULES, None):
                layers = range(config.num_hidden_layers)
                requests = [request_of(config, operator, layer, rows) for layer in layers]
                found = times_us(channels, requests, rounds, options.quantile)
                show(rows, operator or "lm_head", found)
                results.append(_result(rows, operator or "lm_head", found))
                if operator is not None:
                    layer_us = [sum(pair) for pair in zip(layer_us, found, strict=True)]
            show(rows, "a layer", layer_us, f"(wanted <= {WANTED_AT_DECODE})" if rows == 1 else "")
            results.append(_result(rows, "a layer", layer_us))
    if options.json is not None:
        document = {"machine": describe_machine(), "results": results}
        options.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def _result(rows: int, what: str, taken_us: Sequence[float]) -> dict[str, Any]:
    one, two, half = taken_us
    return {"rows": rows, "operator": what, "one_us": one, "two_us": two, "half_us": half}


def show(rows: int, what: str, taken_us: list[float], beside: str = "") -> None:
    """Print one line."""
    one, two, half = taken_us
    figures = (
        f"{one / 1e3:8.2f} {two / 1e3:8.2f} {two / one:6.2f} {half / 1e3:12.2f} {half / two:7.2f}"
    )
    print(f"{rows:4}  {what:12} {figures} {beside}".rstrip(), flush=True)


if __name__ == "__main__":
    main()
