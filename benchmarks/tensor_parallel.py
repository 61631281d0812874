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

import os
from collections.abc import Sequence
from itertools import cycle

import torch

from benchmarks.harness import Fields, Found, Options, Place, main, say
from protocol.channel import PendingChannel
from protocol.messages import (
    FUSED_MODULES,
    LinearOperator,
    Request,
    RingLinearRequest,
    RingLMHeadRequest,
)
from protocol.model.config import ModelConfig
from protocol.tensors import from_torch
from protocol.transport import open_channel
from tsqp.lab.bench.ping_pong import interleaved
from tsqp.lab.bench.shapes import find_shape

SHAPE = "llama-3.2-1b"
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
    channels: Sequence[PendingChannel], requests: list[Request], rounds: int, quantile: float
) -> list[float]:
    """Return a quantile of the round trips of each channel; they are asked in turns, in blocks.

    `requests`: of other layers, one after the other, so that no weight stays in a cache.
    """
    work = [map(channel.call, cycle(requests)).__next__ for channel in channels]
    # The first block warms up.
    times = [
        sorted(taken[_BLOCK:]) for taken in interleaved(work, rounds + _BLOCK, _BLOCK, settle=0)
    ]
    return [taken[int(quantile * (len(taken) - 1))] for taken in times]


def measure(options: Options, place: Place) -> Found:
    """Measure each operator, and a layer's together."""
    cores = {int(core) for core in options.cores.split(",")}
    os.sched_setaffinity(0, cores)  # children's, too
    shape = find_shape(SHAPE).with_layers(options.layers)
    config = shape.config()
    results: list[Fields] = []
    torch.set_num_threads(1)
    model = place.model(shape, linear=True)
    channels: list[PendingChannel] = []
    for ranks, threads in ((1, len(cores)), (2, len(cores) // 2), (1, len(cores) // 2)):
        endpoint = place.service(
            model,
            *("--arithmetic", "int8"),
            *("--tensor-parallel", str(ranks)),
            *("--threads", str(max(1, threads))),
        )
        channels.append(place.enter_context(open_channel(endpoint, timeout_s=600.0)))
    for rows in options.rows:
        rounds = max(_BLOCK, options.round_trips // (1 if rows < 32 else 8))
        found: dict[str, list[float]] = {}
        for operator in (*FUSED_MODULES, None):
            requests = [
                request_of(config, operator, layer, rows)
                for layer in range(config.num_hidden_layers)
            ]
            found[operator or "lm_head"] = times_us(channels, requests, rounds, options.quantile)
        columns = zip(*(found[operator] for operator in FUSED_MODULES), strict=True)
        found["a layer"] = [sum(column) for column in columns]
        for what, (one, two, half) in found.items():
            say(f"{rows} rows, {what}: ratio {two / one:.2f}, gain {half / two:.2f}")
            results.append(
                {"rows": rows, "operator": what, "one_us": one, "two_us": two, "half_us": half}
            )
    return {"results": results}, True


if __name__ == "__main__":
    main(
        __doc__,
        measure,
        layers=2,
        round_trips=40,
        cores=",".join(map(str, sorted(os.sched_getaffinity(0)))),
        rows=(1, 2, 4, 8, 32, 128),
        quantile=0.5,
    )
