"""How fast pads are made, beside the fastest int8 product on the same shapes in the same run.

    python -m benchmarks.pad_making [--tokens 1024] [--json FILE]

A model of Llama-3.2-1B's shape (random weights, bf16, 2.5 GB in the temporary folder) and a bank on
disk. Both rates count int8 operations: four products a pad, one for each base-256 digit of the
ring. The fastest is `torch._int_mm` or our kernel over one digit. Each case runs in a fresh
process; the best of `REPEATS`, as what else runs on the machine only takes time.
"""

from __future__ import annotations

import math
import multiprocessing
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness import Found, elapsed_us, main, temporary
from benchmarks.memory import peak_bytes
from protocol.integer import DIGITS, empty_weight, ring_product
from protocol.model.checkpoint import Checkpoint
from protocol.model.config import read_config
from protocol.model.identity import linear_digest, model_digest
from protocol.model.quantized import load_quantized
from protocol.model.weights import CPU
from tee_side.protect.masks.pad import Pad
from tee_side.protect.pads.bank import BankFile
from tee_side.protect.pads.bank_files import BankPlace
from tee_side.protect.pads.bank_format import MAX_GROUP, Purpose
from tee_side.protect.pads.layout import PadLayout
from tee_side.protect.pads.maker import PadMaker, read_weights
from tee_side.protect.randomness import Keystream
from tsqp.lab.bench.random_model import write_random_model
from tsqp.lab.bench.shapes import find_shape
from tsqp.run.bank import BATCH_TOKENS, product_operations

SHAPE = find_shape("llama-3.2-1b")
REPEATS = 5


def _best_s(work: Callable[[], object]) -> float:
    """Return the shortest time of `REPEATS` runs after one that warms up."""
    work()
    return min(elapsed_us(work) for _ in range(REPEATS)) / 1e6


def measure_kernel(model: Path, tokens: int) -> dict[str, float]:
    """Time products of one digit, torch's and ours, and `ring_product`, on a layer's four sites."""
    layout = PadLayout.of(read_config(model))
    plain_s = digit_s = ring_s = 0.0
    operations = 0
    for site in (site for site in layout.sites if site.layer == 0):
        weight = empty_weight(site.out_features, site.in_features, CPU)
        weight.copy_(torch.randint(-127, 128, weight.shape))
        rows = torch.randint(-128, 128, (DIGITS * tokens, site.in_features)).to(torch.int8)
        out = torch.empty(len(rows), site.out_features, dtype=torch.int32)
        plain_s += _best_s(partial(torch._int_mm, rows, weight.t(), out=out))
        digit = rows.to(torch.int32)
        digit_s += _best_s(partial(ring_product, digit, weight, 1))
        low, high = -(2**31), 2**31
        elements = torch.randint(low, high, (tokens, site.in_features)).to(torch.int32)
        ring_s += _best_s(partial(ring_product, elements, weight))
        operations += 2 * DIGITS * tokens * site.in_features * site.out_features
    return {
        "int_mm_gops": operations / plain_s / 1e9,
        "one_digit_gops": operations / digit_s / 1e9,
        "ring_product_gops": operations / ring_s / 1e9,
    }


def measure_parts(model: Path, tokens: int) -> dict[str, float]:
    """Time what else is done for one layer: reading and quantising weights, the keystream."""
    config, checkpoint = read_config(model), Checkpoint(model)
    sites = [site for site in PadLayout.of(config).sites if site.layer == 0]
    stream = Keystream(bytes(32))
    return {
        "weights_ms": 1e3
        * _best_s(lambda: [load_quantized(checkpoint, config, 0, s.operator) for s in sites]),
        "keystream_ms": 1e3
        * _best_s(lambda: [stream.rows(range(tokens), s.number, s.in_features) for s in sites]),
    }


def measure_making(model: Path, tokens: int) -> dict[str, float]:
    """Make pads for `tokens` tokens into a bank on disk."""
    config, checkpoint = read_config(model), Checkpoint(model)
    layout, mask = PadLayout.of(config), Pad()
    purpose = Purpose.of(
        layout,
        mask=mask.described(),
        model_digest=model_digest(config, checkpoint),
        linear_digest=linear_digest(config, checkpoint) or "",
    )
    place = BankPlace.at(model / "bank", beside_bank=True)
    with BankFile.create(
        place, purpose, capacity=(REPEATS + 1) * tokens, group=math.gcd(tokens, MAX_GROUP)
    ) as bank:
        maker = PadMaker(mask, read_weights(checkpoint, config, mask.arithmetic))
        elapsed_s = _best_s(lambda: maker.fill(bank, tokens))
    return {
        "tokens_per_s": tokens / elapsed_s,
        "making_gops": product_operations(layout) * tokens / elapsed_s / 1e9,
        "token_bytes": layout.token_bytes,
        "peak_bytes": peak_bytes(multiprocessing.current_process().pid or 0),
    }


def _fresh(function: Callable[[Path, int], dict[str, float]], *arguments: Any) -> dict[str, float]:
    """Run a case in a process of its own."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(function, arguments)


def measure(options: Any) -> Found:
    """Measure each case in a process of its own."""
    with ExitStack() as closing:
        model = temporary(closing)
        write_random_model(model, SHAPE.settings)
        rows: dict[str, float] = {}
        for case in (measure_kernel, measure_parts, measure_making):
            rows |= _fresh(case, model, options.tokens)
    ratio = rows["making_gops"] / max(rows["int_mm_gops"], rows["one_digit_gops"])
    about = {"tokens": options.tokens, "threads": torch.get_num_threads()}
    return {**about, **rows, "making / fastest": ratio}, True


if __name__ == "__main__":
    main(__doc__, measure, tokens=BATCH_TOKENS)
