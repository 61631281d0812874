"""`tsqp demo` from start to verdict, and that the verdict can be negative."""

from __future__ import annotations

import json
from io import StringIO
from pathlib import Path

import pytest
import torch
from rich.console import Console
from safetensors.torch import save_file

from tests.support import run
from tsqp.demo import _verdict


@pytest.mark.parametrize("policy", ["attention-in-tee", "tsqp", "tee-only"])
def test_demo_shows_story_feed_table_and_verdict(policy: str) -> None:
    result = run("tsqp", "demo", "--policy", policy, "--max-new-tokens", "24", COLUMNS="120")
    assert result.returncode == 0, result.stdout + result.stderr
    assert "24 token ids identical, largest logit difference" in result.stdout
    assert "\nOnce upon a time" in result.stdout
    assert "Cost per operator" in result.stdout
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
