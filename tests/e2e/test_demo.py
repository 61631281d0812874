"""`tsqp demo` from start to verdict, and that the verdict can be negative."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tee_side.policy.placement import load_policy
from tests.kit.service import ENVIRONMENT, call, run
from tsqp.demo import acts
from tsqp.demo.processes import Services
from tsqp.demo.verdict import Tokens


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
    assert "…" not in result.stdout
    assert max(map(len, result.stdout.splitlines())) <= 80
    opening, *shown = re.split(r"╭─ (?=\d of 5)", result.stdout)
    in_tee, clear, shielded, served, lied_to = (words(act) for act in shown)
    assert "what the GPU received " in in_tee
    assert "nothing: no request, not one byte" in in_tee
    assert "policy tee-only: nothing leaves the TEE" in words(opening)

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

    assert "shielded: a chat over HTTP, with tee-runner serve" in served
    assert "Tell me a story about a fox. Here is a story about a fox." in served

    assert "shielded: and the service lies once" in lied_to
    assert re.search(r"lie number \d+ is [0-9a-f]{8} instead of [0-9a-f]{8}", lied_to)
    assert re.search(r"tee-runner: error: \w+ in layer \d+ at \S+: got a wrong", lied_to)

    # One service for all acts that need one.
    assert result.stdout.count("gpu-service: process ") == 1
    assert result.stdout.count("tee-runner serve: process ") == 1
    end = words(result.stdout.split("\nCost ")[1])
    assert "Cost per operator" not in result.stdout
    assert "ok tee-only 24 token ids identical to transformers" in end
    assert "ok attention-in-tee 24 token ids identical to transformers" in end
    assert "ok shielded 24 token ids and all their logits identical, bit for bit, to" in end
    assert re.search(r"(all|\d+ of) 24 are those of transformers", end)
    assert "ok shielded, served 24 tokens of a chat over HTTP identical to quantized-clear" in end
    assert "ok shielded, lied to one of " in end
    assert "the run ended, and no token came of it" in end


def test_chosen_policies_get_the_services_that_they_need() -> None:
    chosen = ("tsqp", "stip", "two-server", "quantized-clear")
    options = [word for policy in chosen for word in ("--policy", policy)]
    options.append("--shares-in-the-clear")
    result = run("tsqp", "demo", *options, "--max-new-tokens", "6")
    assert result.returncode == 0, result.stdout + result.stderr
    text = words(result.stdout)
    for policy in chosen:
        assert f"Cost per operator: {policy} " in text
        assert f"ok {policy} 6 token ids" in text
    assert "policy tsqp: the GPU sees the token ids" in text
    assert "what the GPU received: int64, float32" in text
    assert "10 of 10 tokens recovered by matching with the public weights: Once" in text
    assert "(stronger attacks are known)" in text
    assert "what the first of two services received: int32" in text
    assert "to int8-in-tee" in text
    assert "both links, which are NOT encrypted, reads prompt and answer" in text
    # Two for everybody, and one with provisioned weights.
    assert result.stdout.count("gpu-service: process ") == 3


def test_other_tokens_than_those_of_transformers_are_a_failure(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    true = acts.transformers_tokens

    def changed(*arguments: object) -> Tokens:
        tokens = true(*arguments)  # type: ignore[arg-type]
        return Tokens(tokens.name, [*tokens.ids[:2], tokens.ids[2] + 1], tokens.logits)

    monkeypatch.setattr(acts, "transformers_tokens", changed)
    result = call("tsqp", "demo", "--policy", "tee-only", "--max-new-tokens", "3")
    assert result.returncode == 1
    assert "FAIL tee-only 3 token ids NOT identical from token 2 on" in words(result.stdout)


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


def start(folder: Path) -> tuple[str, ...]:
    with Services(folder, lambda line: None) as services:
        return services.reach(load_policy("tsqp")).endpoints
