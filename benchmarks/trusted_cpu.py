"""CPU time that the trusted side spends on a decoded token, policy by policy.

    python -m benchmarks.trusted_cpu [--json FILE] [--policy NAME ...] [--threads N] [--model DIR]

Llama-3.2-1B's shape, random weights, bf16 (2.5 GB in the temporary folder). Pads were made ahead:
what is measured is the online part. The service answers at once, with zeros, from a process of its
own (`benchmarks.at_once`), and the bank's u are zeros as well, so that activations stay finite; the
trusted side's work does not depend on the numbers. Each policy runs `REPEATS` times, in turns, each
time in a fresh process: a prompt of 32 tokens, then `TOKENS` steps. Reported: the median run of the
median step, CPU time of all threads of the runner's process.
"""

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.machine import describe_machine
from benchmarks.random_model import LLAMA_3_2_1B, write_random_model
from protocol.model.checkpoint import Checkpoint
from protocol.model.config import read_config
from protocol.model.identity import linear_digest, model_digest
from tee_side.assembly import MaskSettings
from tee_side.masks.pad import Pad
from tee_side.observer import OperatorTable
from tee_side.pads.bank import BankFile
from tee_side.pads.layout import PadLayout
from tee_side.policy import load_policy
from tee_side.runner import Runner, RunnerSettings
from tsqp.calibrate import calibrate_on

POLICIES = ("tee-only", "attention-in-tee", "quantized-clear", "shielded")
BASELINE = "tee-only"
TOKENS = 24
WARM_UP = 3
REPEATS = 5
PROMPT = [1000 + 7 * i for i in range(32)]


def measure(
    model: Path, policy: str, endpoint: str, bank: Path | None, threads: int
) -> dict[str, float]:
    """Generate; return medians a token, in milliseconds."""
    table = OperatorTable()
    settings = RunnerSettings(
        model=model,
        policy=load_policy(policy),
        gpu=(endpoint,),
        masks=MaskSettings(bank=bank, when_out="fail"),
        threads=threads,
    )
    with Runner(settings, table) as runner:
        gc.collect()
        gc.freeze()  # as tee-runner does
        generation = runner.generate(PROMPT, max_new_tokens=TOKENS + WARM_UP, with_text=False)
        steps = generation.steps()
        for _ in range(WARM_UP):
            next(steps)
        cpu_ms, wall_ms = [], []
        for _ in range(TOKENS):
            cpu, wall = time.process_time(), time.perf_counter()
            next(steps)
            cpu_ms.append((time.process_time() - cpu) * 1e3)
            wall_ms.append((time.perf_counter() - wall) * 1e3)
        head = table.totals["lm_head"]
        return {
            "cpu_ms": statistics.median(cpu_ms),
            "wall_ms": statistics.median(wall_ms),
            "lm_head_wall_ms": head.total_ns / head.calls / 1e6,
        }


def calibrate(model: Path) -> None:
    """Choose activation scales on random token ids: the model has no tokenizer."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, LLAMA_3_2_1B["vocab_size"], (2, 128), generator=generator).tolist()
    calibration = calibrate_on(read_config(model), Checkpoint(model), ids)
    calibration.save(model / "calibration.safetensors")


def write_bank(model: Path, bank: Path, tokens: int) -> None:
    """Write a bank whose u are zeros, sealed like any other."""
    config, checkpoint = read_config(model), Checkpoint(model)
    layout = PadLayout.of(config)
    store = BankFile.create(
        bank,
        layout=layout,
        mask=Pad.name,
        model_digest=model_digest(config, checkpoint),
        linear_digest=linear_digest(config, checkpoint) or "",
        capacity=tokens,
    )
    with store, store.begin(tokens) as batch:
        for site in layout.sites:
            batch.put(site.number, torch.zeros(tokens, site.out_features, dtype=torch.int32))
        batch.commit()


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="also write the result to this file")
    parser.add_argument("--policy", action="append", help=f"default: {', '.join(POLICIES)}")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--model", type=Path, help="a directory of that shape, made if empty")
    options = parser.parse_args()
    policies = options.policy or POLICIES
    # As the programs do, before torch is imported: here by the processes that are started.
    os.environ.setdefault("GOMP_SPINCOUNT", "0")
    with tempfile.TemporaryDirectory() as folder:
        model = options.model or Path(folder)
        if not (model / "model.safetensors").exists():
            write_random_model(model, LLAMA_3_2_1B)
        context = multiprocessing.get_context("spawn")
        if not (model / "calibration.safetensors").exists():
            with context.Pool(1) as pool:
                pool.apply(calibrate, (model,))
        bank, endpoint = Path(folder) / "bank", f"ipc://{folder}/gpu.sock"
        # A run can lose a block of 15 pads beyond those that it uses.
        write_bank(model, bank, REPEATS * (TOKENS + WARM_UP + 16))
        command = [sys.executable, "-m", "benchmarks.at_once", str(model), endpoint]
        service = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        runs: dict[str, list[dict[str, float]]] = {policy: [] for policy in policies}
        try:
            if service.stdout is None or service.stdout.readline() != "ready\n":
                raise SystemExit("the service did not become ready")
            for policy in [*policies] * REPEATS:
                given = bank if policy == "shielded" else None
                with context.Pool(1) as pool:
                    arguments = (model, policy, endpoint, given, options.threads)
                    runs[policy].append(pool.apply(measure, arguments))
        finally:
            service.terminate()
            service.wait()
    _report(runs, options.threads, options.json)


def _report(runs: dict[str, list[dict[str, float]]], threads: int, path: Path | None) -> None:
    rows: dict[str, Any] = {}
    for policy, found in runs.items():
        cpu = [run["cpu_ms"] for run in found]
        rows[policy] = {
            **{name: statistics.median(run[name] for run in found) for name in found[0]},
            "cpu_ms_runs": [round(value, 1) for value in cpu],
        }
        row = rows[policy]
        print(
            f"{policy:<20}CPU {row['cpu_ms']:7.1f} ms ({min(cpu):.1f} to {max(cpu):.1f}),"
            f" wall {row['wall_ms']:7.1f} ms, LM head {row['lm_head_wall_ms']:6.1f} ms"
        )
    ratios = {}
    if BASELINE in rows:
        for policy, row in rows.items():
            ratios[f"{policy} / {BASELINE}"] = row["cpu_ms"] / rows[BASELINE]["cpu_ms"]
    for name, ratio in ratios.items():
        print(f"{name:<40}{ratio:.3f}")
    if path:
        document = {
            "machine": describe_machine(),
            "threads": threads,
            "tokens": TOKENS,
            "repeats": REPEATS,
            **rows,
            "ratios": ratios,
        }
        path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
