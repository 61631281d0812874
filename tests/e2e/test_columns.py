"""Real gpu-services that hold a part of every weight's columns each."""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from tests.kit.service import CALM, Service, call, running_service

COMMAND = ("generate", "demo", "--policy", "shielded", "--prompt", "Once upon a time", "--json")


def generated(*gpu: str) -> dict[str, Any]:
    services = [word for endpoint in gpu for word in ("--gpu", endpoint)]
    result = call("tee-runner", *COMMAND, "--max-new-tokens", "8", *CALM, *services)
    assert result.returncode == 0, result.stderr
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def test_two_parts_give_the_tokens_of_one_service(demo_service: Service, tmp_path: Path) -> None:
    with ExitStack() as running:
        gpu = []
        for part in ("0/2", "1/2"):
            bind = (f"unix://{tmp_path}/{part[0]}", "--threads", "1", "--columns", part)
            service = running.enter_context(running_service("demo", *bind))
            gpu.append(f"{service.endpoint},columns={part}")
        parted = generated(*gpu)
    alone = generated(demo_service.endpoint)
    assert len(parted["token_ids"]) == 8
    assert parted["token_ids"] == alone["token_ids"]
    assert parted["rpc"]["count"] > alone["rpc"]["count"]
