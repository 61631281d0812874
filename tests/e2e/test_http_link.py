"""A service behind HTTP, in real processes: the same tokens as over a socket, behind a proxy."""

from __future__ import annotations

import json
from pathlib import Path

from tests.kit.http_proxy import buffering_proxy
from tests.kit.service import call, running_service

COMMAND = ("generate", "demo", "--dtype", "float32", "--policy", "shielded", "--json")


def _generate(*more: str) -> list[int]:
    prompt = ("--prompt", "Once upon a time", "--max-new-tokens", "6")
    found = call("tee-runner", *COMMAND, *prompt, *more)
    assert found.returncode == 0, found.stderr
    ids: list[int] = json.loads(found.stdout)["token_ids"]
    return ids


def test_a_buffering_proxy_changes_no_token(tmp_path: Path) -> None:
    made = call("tsqp", "api-key", "first", "--digest", "--to", str(tmp_path / "first"))
    assert made.returncode == 0, made.stderr
    (tmp_path / "tokens").write_text(made.stdout)
    with running_service("demo", f"unix://{tmp_path}/s") as service:
        wanted = _generate("--gpu", service.endpoint)
    let_in = ("--http-tokens", str(tmp_path / "tokens"))
    with (
        running_service("demo", "http://127.0.0.1:*", *let_in) as service,
        buffering_proxy(service.endpoint) as proxy,
    ):
        found = _generate("--gpu", proxy.url, "--http-token", str(tmp_path / "first"))
        assert proxy.passed > 20
    assert len(found) == 6
    assert found == wanted
