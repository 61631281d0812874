"""Bad input to the programs: one line that names it, exit status 2, no traceback."""

import subprocess
from pathlib import Path

from tests.kit.model import make_model
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


RUNNER_CASES: tuple[tuple[tuple[str, ...], str], ...] = (
    (("/nowhere", "--prompt", "x"), "/nowhere: got no such directory"),
    (("demo", "--prompt", "x", "--policy", "./a.toml"), "a.toml"),
    (("demo", "--prompt", "x", "--gpu", "host:1"), "tcp://HOST:PORT"),
    (("demo",), "--prompt"),
    (("demo", "--prompt", "x", "--prompt-token-ids", "1"), "exactly one"),
    (("demo", "--prompt-token-ids", "1,b"), "integers"),
    (("demo", "--prompt-token-ids", "99999", "--policy", "tee-only"), "vocabulary"),
    (("demo", "--prompt", "story " * 600, "--policy", "tee-only"), "context of 512"),
    (("demo", "--prompt", "x", "--warmth", "1"), "--warmth"),
    (("demo", "--prompt", "x", "--top-p", "nan"), "--top-p"),
    (("demo", "--prompt", "x", "--temperature", "inf"), "--temperature"),
    (("demo", "--prompt", "x", "--repetition-penalty", "0.001"), "--repetition-penalty"),
    (("demo", "--prompt", "x", "--threads", "100000"), "--threads"),
    (("demo", "--prompt", "x", "--stop", ""), "--stop"),
    (("demo", "--prompt", "x", "--seed", "9" * 30), "--seed"),
    (("demo", "--prompt", "a\udcff"), "--prompt: got bytes that are not UTF-8"),
    (("demo", "--prompt-file", "/nowhere.txt"), "--prompt-file /nowhere.txt: got No such file"),
)


def test_a_refusal_of_a_real_process_looks_the_same() -> None:
    refused(run("gpu-service", "/nowhere"), "/nowhere: got no such directory")


@each_row(("arguments", "said"), RUNNER_CASES)
def test_tee_runner_refuses(arguments: tuple[str, ...], said: str) -> None:
    refused(call("tee-runner", "generate", *arguments), said)


@each_row(
    ("command", "said"),
    [
        ("gpu-service demo --columns 0/2", "--columns: got '0/2', expected no columns"),
        ("tsqp train-demo /nowhere --seed 1", "python -m benchmarks.train_demo"),
        ("tsqp calibrate demo", "calibrate: got a name of before, expected nothing: each row"),
        ("tee-runner generate demo --calibration x", "--calibration: got a name of before"),
    ],
)
def test_what_was_removed_names_what_to_use(command: str, said: str) -> None:
    refused(call(*command.split()), said)


def test_what_a_service_is_not_for_is_refused(demo_service: Service, tmp_path: Path) -> None:
    model, clear = str(tmp_path / "model"), ("--policy", "attention-in-tee")
    make_model(tmp_path / "model", max_position_embeddings=8192)
    given = ("tee-runner", "generate", model, *clear, "--prompt-token-ids")
    result = call(*given, "1", "--gpu", demo_service.endpoint)
    refused(result, demo_service.endpoint, "num_layers", "same model")
    limit = ("--max-message-mib", "1")
    with running_service(model, f"unix://{tmp_path}/gpu", *limit) as service:
        # 6,000 rows of 48 activations are more than 1 MiB; the runner's own limit is 512.
        long = (",".join(["7"] * 6000), "--step-tokens", "6000", "--gpu", service.endpoint)
        refused(call(*given, *long), "Linear", "got 1152", "bytes, expected at most 1048576")
