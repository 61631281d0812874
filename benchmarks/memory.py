"""Peak memory of both processes on a 2.5 GB model (shape of Llama-3.2-1B, random weights, bf16).

    python -m benchmarks.memory [--json FILE]

Each process is a fresh one. Peaks are the kernel's own (`VmHWM`, resident pages including mapped
files). The baseline is the same interpreter that has only imported torch.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from tsqp.lab.bench.machine import describe_machine
from tsqp.lab.bench.random_model import write_random_model
from tsqp.lab.bench.shapes import find_shape

SHAPE = find_shape("llama-3.2-1b")
PROMPT = ",".join(str(1000 + 7 * i) for i in range(64))
KIB = 1024


def peak_bytes(pid: int) -> int:
    """Return the largest resident set that a living process ever had."""
    return _high_water_mark(Path(f"/proc/{pid}/status").read_text(encoding="ascii"))


def _high_water_mark(status: str) -> int:
    return int(re.findall(r"VmHWM:\s+(\d+) kB", status)[0]) * KIB


def program(name: str) -> str:
    """Return the path of one of our programs."""
    return str(Path(sys.executable).parent / name)


def measure_import() -> int:
    """Return the peak of an interpreter that imports torch and nothing else."""
    # Not getrusage: its peak survives exec, and would be that of this process.
    code = "import torch; print(open('/proc/self/status').read())"
    output = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout
    return _high_water_mark(output)


def measure_runner(model: Path, policy: str, endpoint: str) -> tuple[int, dict[str, int]]:
    """Generate eight tokens; return the runner's peak and the round trips it made."""
    arguments = [program("tee-runner"), "generate", str(model), "--gpu", endpoint]
    arguments += ["--policy", policy, "--prompt-token-ids", PROMPT, "--max-new-tokens", "8"]
    script = (
        "import resource, subprocess, sys;"
        "p = subprocess.run(sys.argv[1:], capture_output=True, text=True, check=True);"
        "print(p.stdout.strip());"
        "print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)"
    )
    command = [sys.executable, "-c", script, *arguments, "--json"]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    result, peak = output.strip().splitlines()
    return int(peak) * KIB, json.loads(result)["rpc"]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="also write the result to this file")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder)
        size = write_random_model(model, SHAPE.settings)
        imported = measure_import()
        service = subprocess.Popen(
            [
                *(program("gpu-service"), str(model), "--bind", "tcp://127.0.0.1:*"),
                *("--arithmetic", "float"),
            ],
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            endpoint = ""
            for line in service.stderr or ():
                if " ready " in line:
                    endpoint = line.split("endpoint=", 1)[1].split()[0]
                    break
            loaded = peak_bytes(service.pid)
            offloaded, rpc = measure_runner(model, "attention-in-tee", endpoint)
            served = peak_bytes(service.pid)
        finally:
            service.terminate()
            service.communicate()
        alone, _ = measure_runner(model, "tee-only", "tcp://127.0.0.1:9")

    embedding = SHAPE.settings["vocab_size"] * SHAPE.settings["hidden_size"] * 2
    rows = {
        "model_bytes": size,
        "embedding_and_lm_head_bytes": embedding,
        "import_torch_peak_bytes": imported,
        "gpu_service_peak_loading_bytes": loaded,
        "gpu_service_peak_serving_bytes": served,
        "tee_runner_attention_in_tee_peak_bytes": offloaded,
        "tee_runner_tee_only_peak_bytes": alone,
    }
    ratios = {
        "gpu_service_peak / model": served / size,
        "(gpu_service_peak - import torch) / model": (served - imported) / size,
        "(tee_runner attention-in-tee - import torch - embedding) / model": (
            (offloaded - imported - embedding) / size
        ),
    }
    for name, value in rows.items():
        print(f"{name:<45}{value / 1e6:>10.1f} MB")
    for name, ratio in ratios.items():
        print(f"{name:<70}{ratio:>7.3f}")
    if options.json:
        document = {"machine": describe_machine(), "rpc": rpc, **rows, "ratios": ratios}
        options.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
