"""The server keeps what its openapi.json promises, whatever is sent: by schemathesis."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kit.service import ENVIRONMENT, TEE_ONLY, Server, running_server, until

PATHS = {
    "/v1/completions": "post",
    "/v1/chat/completions": "post",
    "/v1/embeddings": "post",
    "/v1/models": "get",
    "/v1/models/{name}": "get",
    "/tokenize": "post",
    "/detokenize": "post",
    "/tokenizer_info": "get",
    "/health": "get",
    "/version": "get",
}
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    # Short answers: it is about their form.
    with running_server(*TEE_ONLY, "--max-model-len", "64", "--default-max-tokens", "4") as server:
        yield server


def test_it_has_every_path(server: Server) -> None:
    paths = json.loads(server.get("/openapi.json"))["paths"]
    assert {path: [*methods] for path, methods in paths.items()} == {
        path: [method] for path, method in PATHS.items()
    }


@pytest.mark.slow
def test_what_is_promised_is_kept(server: Server, tmp_path: Path) -> None:
    command = [
        str(Path(sys.executable).parent / "schemathesis"),
        *("run", f"{server.address}/openapi.json", "--no-color", "--seed", "1"),
        # What fits the schema may still be too long for the model, or no grammar.
        *("--checks", "all", "--exclude-checks", "positive_data_acceptance"),
        *("--phases", "coverage,fuzzing", "--max-examples", "150"),
    ]
    environment = {"SCHEMATHESIS_HOOKS": "tests.e2e.known_model", "PYTHONPATH": str(ROOT)}
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
    assert f"Tested: {len(PATHS)}" in done.stdout
    until(lambda: server.metric("vllm:num_requests_running") == 0)
    assert server.metric("vllm:request_success_total", 'finished_reason="error"') == 0
