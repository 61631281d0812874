"""Bad input to the programs: one line that names it, exit status 2, no traceback."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.kit.model import ARCHITECTURES, make_model
from tests.kit.rows import each_row
from tests.kit.service import Service, call, run, running_service


def refused(result: subprocess.CompletedProcess[str], *fragments: str) -> None:
    """Check a refusal: exit status 2 and exactly one line, which has these fragments."""
    lines = [line for line in result.stderr.splitlines() if not line.startswith(("policy ", "20"))]
    assert result.returncode == 2, result.stderr
    assert len(lines) == 1, result.stderr
    assert "Traceback" not in result.stderr
    assert "error: " in lines[0]
    for fragment in fragments:
        assert fragment in lines[0]


RUNNER_CASES = {
    "missing directory": (["/nowhere", "--prompt", "x"], ["/nowhere", "no such directory"]),
    "unknown policy": (["demo", "--prompt", "x", "--policy", "none"], ["'none'", "tee-only"]),
    "missing policy file": (["demo", "--prompt", "x", "--policy", "./a.toml"], ["a.toml"]),
    "malformed endpoint": (["demo", "--prompt", "x", "--gpu", "host:1"], ["tcp://HOST:PORT"]),
    "no prompt": (["demo"], ["--prompt"]),
    "two prompts": (["demo", "--prompt", "x", "--prompt-token-ids", "1"], ["exactly one"]),
    "ids that are no integers": (["demo", "--prompt-token-ids", "1,b"], ["integers"]),
    "id outside the vocabulary": (
        ["demo", "--prompt-token-ids", "99999", "--policy", "tee-only"],
        ["vocabulary"],
    ),
    "prompt longer than the context": (
        ["demo", "--prompt", "story " * 600, "--policy", "tee-only"],
        ["tokens", "context of 512"],
    ),
    "unknown option": (["demo", "--prompt", "x", "--warmth", "1"], ["--warmth"]),
    "value out of range": (["demo", "--prompt", "x", "--top-p", "2"], ["--top-p"]),
    "value that is no number": (["demo", "--prompt", "x", "--top-p", "nan"], ["--top-p", "nan"]),
    "value that is infinite": (
        ["demo", "--prompt", "x", "--temperature", "inf"],
        ["--temperature"],
    ),
    "penalty too small": (
        ["demo", "--prompt", "x", "--repetition-penalty", "0.001"],
        ["--repetition-penalty", "0.01"],
    ),
    "more threads than torch stands": (
        ["demo", "--prompt", "x", "--threads", "100000"],
        ["--threads", "1024"],
    ),
    "empty stop string": (["demo", "--prompt", "x", "--stop", ""], ["--stop", "empty"]),
    "seed beyond 64 bits": (["demo", "--prompt", "x", "--seed", "9" * 30], ["--seed"]),
    "prompt that is not UTF-8": (
        ["demo", "--prompt", "a\udcff"],
        ["--prompt: got bytes that are not UTF-8"],
    ),
    "missing prompt file": (
        ["demo", "--prompt-file", "/nowhere.txt"],
        ["--prompt-file /nowhere.txt: got No such file"],
    ),
    "prompt file that is a directory": (["demo", "--prompt-file", "/tmp"], ["/tmp", "directory"]),
    "unreachable endpoint": (
        ["demo", "--prompt", "x", "--gpu", "tcp://127.0.0.1:9", "--connect-timeout-s", "0.2"],
        ["tcp://127.0.0.1:9", "nothing that listens while Init"],
    ),
}


def test_a_refusal_of_a_real_process_looks_the_same() -> None:
    refused(run("gpu-service", "/nowhere"), "/nowhere", "no such directory")
    refused(run("tee-runner", "generate", "demo", "--prompt", "x", "--policy", "none"), "'none'")


@each_row("name", RUNNER_CASES)
def test_tee_runner_refuses(name: str) -> None:
    arguments, fragments = RUNNER_CASES[name]
    refused(call("tee-runner", "generate", *arguments), *fragments)


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_service_with_another_model_is_noticed(
    kind: str, demo_service: Service, tmp_path: Path
) -> None:
    make_model(tmp_path, kind)
    result = call(
        "tee-runner",
        *("generate", str(tmp_path), "--gpu", demo_service.endpoint, "--prompt-token-ids", "1"),
        *("--policy", "attention-in-tee"),
    )
    refused(result, demo_service.endpoint, "num_layers", "same model")


def test_a_message_over_the_services_limit_names_both_sizes(tmp_path: Path) -> None:
    make_model(tmp_path / "model", max_position_embeddings=8192)
    limit = ("--max-message-mib", "1")
    with running_service(tmp_path / "model", "tcp://127.0.0.1:*", *limit) as service:
        # 6,000 rows of 48 activations are more than 1 MiB; the runner's own limit is 512.
        result = call(
            "tee-runner",
            *("generate", str(tmp_path / "model"), "--gpu", service.endpoint),
            *("--prompt-token-ids", ",".join(["7"] * 6000), "--step-tokens", "6000"),
            *("--policy", "attention-in-tee"),
        )
    refused(result, "Linear", "got 1152", "bytes, expected at most 1048576")
