"""`tsqp demo` from start to verdict, and that the verdict can be negative."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kit.service import ENVIRONMENT, run


def words(text: str) -> str:
    """Return text as one line, without the frames around it."""
    return " ".join(text.replace("│", " ").split())


# It is what `make demo` does, which a change has to pass as well.
pytestmark = pytest.mark.slow


def test_three_acts_show_what_the_gpu_saw_and_then_a_chat_and_a_lie() -> None:
    # Settings of the two programs are not the demo's.
    theirs = {"TSQP_TEMPERATURE": "1.5", "TSQP_LOG_LEVEL": "error"}
    result = run("tsqp", "demo", "--max-new-tokens", "24", **theirs)
    assert result.returncode == 0, result.stdout + result.stderr
    _, *shown = re.split(r"╭─ (?=\d of 5)", result.stdout)
    in_tee, clear, shielded, served, lied_to = (words(act) for act in shown)
    assert "nothing: no request, not one byte" in in_tee

    assert "what the GPU received: float32 " in clear
    assert "uneven: there is a pattern" in clear
    # 5 of the prompt and all but the last of the answer.
    assert "28 of 28 tokens recovered" in clear
    assert "Once upon a time" in clear.split("public weights: ")[1]

    assert "what the GPU received: int32 " in shielded
    assert "as even as chance makes them" in shielded
    recovered = re.search(r"(\d+) of 23 tokens recovered", shielded)
    assert recovered is not None
    assert int(recovered[1]) < 5  # by chance, each with 1 in 1024

    assert "Tell me a story about a fox. Here is a story about a fox." in served

    assert re.search(r"tee-runner: error: \w+ in layer \d+ at \S+: got a wrong", lied_to)

    end = words(result.stdout.split("\nCost ")[1])
    assert "ok tee-only 24 token ids identical to transformers" in end
    assert "ok attention-in-tee 24 token ids identical to transformers" in end
    assert "ok shielded 24 token ids and all their logits identical, bit for bit, to" in end
    assert "ok shielded, served 24 tokens of a chat over HTTP identical to quantized-clear" in end
    assert "ok shielded, lied to one of " in end
    assert "the run ended, and no token came of it" in end


def test_a_signal_ends_the_service_too() -> None:
    program = Path(sys.executable).parent / "tsqp"
    with subprocess.Popen(
        [str(program), "demo", "--policy", "attention-in-tee"],
        stdout=subprocess.PIPE,
        text=True,
        env=ENVIRONMENT,
    ) as process:
        assert process.stdout is not None
        line = next(line for line in process.stdout if line.startswith("gpu-service: process "))
        service = int(line.split()[2].rstrip(","))
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=30)
    assert process.returncode == 128 + signal.SIGTERM
    with pytest.raises(ProcessLookupError):
        os.kill(service, 0)
