"""The server keeps what its openapi.json promises, whatever is sent: by schemathesis."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kit.service import ENVIRONMENT, TEE_ONLY, running_server, until

PATHS = 11
ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_what_is_promised_is_kept(tmp_path: Path) -> None:
    # Short answers: it is about their form.
    options = ("--max-model-len", "64", "--default-max-tokens", "4")
    environment = {"SCHEMATHESIS_HOOKS": "tests.kit.known_model", "PYTHONPATH": str(ROOT)}
    with running_server(*TEE_ONLY, *options) as server:
        command = [
            str(Path(sys.executable).parent / "schemathesis"),
            *("run", f"{server.address}/openapi.json", "--no-color", "--seed", "1"),
            # What fits the schema may still be too long for the model, or no grammar.
            *("--checks", "all", "--exclude-checks", "positive_data_acceptance"),
            *("--phases", "coverage,fuzzing", "--max-examples", "150"),
        ]
        done = subprocess.run(
            command,
            env=ENVIRONMENT | environment,
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        tried = re.search(r"(\d+) generated, (\d+) passed", done.stdout)
        assert tried is not None, done.stdout
        assert 1000 < int(tried[1]) == int(tried[2])
        assert f"Tested: {PATHS}" in done.stdout
        until(lambda: server.metric("vllm:num_requests_running") == 0)
        assert server.metric("vllm:request_success_total", 'finished_reason="error"') == 0
