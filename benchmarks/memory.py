"""Peak memory of both processes on a 2.5 GB model (shape of Llama-3.2-1B, random weights, bf16).

    python -m benchmarks.memory [--json FILE]

Each process is a fresh one. Peaks are the kernel's own (`VmHWM`, resident pages including mapped
files). The baseline is the same interpreter that has only imported torch.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

from benchmarks.harness import Found, Options, Place, main
from tsqp.lab.bench.prepare import required_bytes, write_random_model
from tsqp.lab.bench.shapes import find_shape
from tsqp.lab.measure import peak_bytes
from tsqp.processes import program, start_service

SHAPE = find_shape("llama-3.2-1b")
PROMPT = ",".join(str(1000 + 7 * i) for i in range(64))
KIB = 1024


def _peak_of_import() -> int:
    """Return the peak of an interpreter that imports torch and nothing else."""
    # Not getrusage: its peak survives exec, and would be that of this process.
    with subprocess.Popen(
        [sys.executable, "-c", "import sys, torch; print(flush=True); sys.stdin.read()"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as process:
        if process.stdout is not None:
            process.stdout.readline()
        return peak_bytes(process.pid)


def _peak_of_runner(model: Path, policy: str, endpoint: str) -> tuple[int, dict[str, int]]:
    """Generate eight tokens; return the runner's peak and the round trips it made."""
    command = [program("tee-runner"), "generate", str(model), "--gpu", endpoint, "--json"]
    command += ["--policy", policy, "--prompt-token-ids", PROMPT, "--max-new-tokens", "8"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        said = process.stdout.read() if process.stdout else b""
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command)
    return usage.ru_maxrss * KIB, json.loads(said)["rpc"]


def measure(_options: Options, place: Place) -> Found:
    """Measure each process. Raises TsqpError."""
    model = write_random_model(place.folder / "model", SHAPE)
    size, imported = required_bytes(SHAPE.config()), _peak_of_import()
    command = [str(model), "--bind", "tcp://127.0.0.1:*", "--arithmetic", "float"]
    pid, endpoint = start_service(place, command, timeout_s=600.0)
    loaded = peak_bytes(pid)
    offloaded, rpc = _peak_of_runner(model, "attention-in-tee", endpoint)
    served = peak_bytes(pid)
    alone, _ = _peak_of_runner(model, "tee-only", "tcp://127.0.0.1:9")
    embedding = SHAPE.settings["vocab_size"] * SHAPE.settings["hidden_size"] * 2
    return {
        "rpc": rpc,
        "model_bytes": size,
        "embedding_and_lm_head_bytes": embedding,
        "import_torch_peak_bytes": imported,
        "gpu_service_peak_loading_bytes": loaded,
        "gpu_service_peak_serving_bytes": served,
        "tee_runner_attention_in_tee_peak_bytes": offloaded,
        "tee_runner_tee_only_peak_bytes": alone,
        "ratios": {
            "gpu_service_peak / model": served / size,
            "(gpu_service_peak - import torch) / model": (served - imported) / size,
            "(tee_runner attention-in-tee - import torch - embedding) / model": (
                (offloaded - imported - embedding) / size
            ),
        },
    }, True


if __name__ == "__main__":
    main(__doc__, measure)
