"""`tsqp demo` from start to verdict, and that the verdict can be negative."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from io import StringIO
from pathlib import Path

import pytest
import torch
from rich.console import Console
from rich.text import Text
from safetensors.torch import save_file

from tee_side.policy import load_policy
from tests.support import ENVIRONMENT, run
from tsqp import demo
from tsqp.demo import DemoError, Feed, _cost_table, _service, _side_by_side, _verdict
from tsqp.tap import Seen


@pytest.mark.parametrize("policy", ["attention-in-tee", "tsqp", "tee-only"])
def test_demo_shows_story_feed_table_and_verdict(policy: str) -> None:
    # Settings of the two programs are not the demo's.
    theirs = {"TEE_RUNNER_GENERATE_TEMPERATURE": "1.5", "GPU_SERVICE_LOG_LEVEL": "error"}
    result = run("tsqp", "demo", "--policy", policy, "--max-new-tokens", "24", **theirs)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "24 token ids identical, largest logit difference" in " ".join(result.stdout.split())
    assert "\nOnce upon a time" in result.stdout
    assert "Cost per operator" in result.stdout
    assert "…" not in result.stdout
    if policy == "tee-only":
        assert "nothing leaves the TEE" in result.stdout
    else:
        assert "What the GPU side received first" in result.stdout
        assert f"policy {policy}: the GPU sees" in result.stdout
        assert ("Embedding" in result.stdout) == (policy == "tsqp")


@pytest.mark.parametrize("changed", [None, 0, 3])
def test_verdict_compares_token_ids(changed: int | None, tmp_path: Path) -> None:
    prompt = ("generate", "demo", "--policy", "tee-only", "--prompt", "Once upon a time")
    logits = tmp_path / "logits"
    result = run(
        "tee-runner",
        *prompt,
        *("--max-new-tokens", "5", "--json", "--save-logits", str(logits)),
    )
    report = json.loads(result.stdout)
    if changed is not None:
        report["token_ids"][changed] = (report["token_ids"][changed] + 1) % 100
    output = StringIO()
    identical = _verdict(Console(file=output, width=200), report, logits)
    assert identical == (changed is None)
    assert ("NOT identical" in output.getvalue()) == (changed is not None)


def test_verdict_shows_a_logit_difference(tmp_path: Path) -> None:
    logits = tmp_path / "logits"
    save_file({"logits": torch.zeros(1, 1024)}, logits)
    output = StringIO()
    _verdict(
        Console(file=output, width=200), {"prompt_token_ids": [0, 5], "token_ids": [1]}, logits
    )
    assert "e-0" not in output.getvalue().split("largest logit difference")[1]


def test_a_signal_ends_the_service_too() -> None:
    program = Path(sys.executable).parent / "tsqp"
    with subprocess.Popen(
        [str(program), "demo"], stdout=subprocess.PIPE, text=True, env=ENVIRONMENT
    ) as process:
        assert process.stdout is not None
        line = next(line for line in process.stdout if line.startswith("gpu-service: process "))
        service = int(line.split()[2].rstrip(","))
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=30)
    assert process.returncode == 128 + signal.SIGTERM
    with pytest.raises(ProcessLookupError):
        os.kill(service, 0)


def stand_in(monkeypatch: pytest.MonkeyPatch, path: Path, script: str) -> None:
    """Let the demo start this shell script instead of gpu-service."""
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    monkeypatch.setattr(demo, "_program", lambda name: str(path))


def test_a_service_that_says_nothing_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in(monkeypatch, tmp_path / "service", "exec sleep 60")
    monkeypatch.setattr(demo, "START_TIMEOUT_S", 0.2)
    with (
        pytest.raises(DemoError, match="gpu-service: got no output, expected a line that says"),
        _service(Console(file=StringIO()), load_policy("tsqp")),
    ):
        pass


def test_a_service_that_ends_early_is_quoted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in(monkeypatch, tmp_path / "service", "echo first >&2; echo 'no memory' >&2; exit 3")
    with (
        pytest.raises(DemoError, match="gpu-service: got no memory, expected"),
        _service(Console(file=StringIO()), load_policy("tsqp")),
    ):
        pass


def test_a_talkative_service_is_not_blocked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = tmp_path / "done"
    os.mkfifo(done)
    stand_in(
        monkeypatch,
        tmp_path / "service",
        "echo 'info ready endpoint=tcp://127.0.0.1:1 start_s=0' >&2\n"
        f"head -c 1000000 /dev/zero | tr '\\0' '\\n' >&2; echo all > {done}; exec sleep 60",
    )
    with _service(Console(file=StringIO()), load_policy("tsqp")) as endpoint:
        assert endpoint == "tcp://127.0.0.1:1"
        # Opening a fifo waits for its other end, which the script opens once it has said it all.
        assert done.read_text() == "all\n"


def test_tables_fit_80_columns() -> None:
    names = ("embedding", "qkv_proj", "attn_scores", "attn_values", "o_proj", "gate_up_proj")
    row = {
        "place": "gpu",
        "calls": 2560,
        "round_trips": 24064,
        "bytes_sent": 54_321_000,
        "bytes_received": 65_432_000,
        "tee_s": 12.345,
        "wire_s": 23.456,
        "queue_s": 0.1,
        "gpu_s": 9.9,
    }
    report = {
        "operators": dict.fromkeys(names, row),
        "timing": {"total_s": 99.0},
        "rpc": {"count": 24064, "bytes_sent": 54_321_000, "bytes_received": 65_432_000},
    }
    feed = Feed()
    feed.add(Seen("q_proj k_proj v_proj", 11, (512, 192), "float32", (-10.5, 1.0, 1.0, 1.0)))
    output = StringIO()
    console = Console(file=output, width=80)
    console.print(_cost_table(report))
    console.print(_side_by_side(Text("Once"), feed, console.width))
    shown = output.getvalue()
    assert "…" not in shown
    for word in (*names, "everything else", "24064", "54.3 MB", "12,345", "q_proj k_proj v_proj"):
        assert word in shown
