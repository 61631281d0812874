"""A service behind HTTP, in real processes: the same tokens as over a socket, behind a proxy."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from tests.kit.http_proxy import buffering_proxy
from tests.kit.service import call, running_service, until

COMMAND = ("generate", "demo", "--dtype", "float32", "--policy", "shielded", "--json")


def _generate(*more: str) -> list[int]:
    prompt = ("--prompt", "Once upon a time", "--max-new-tokens", "6")
    found = call("tee-runner", *COMMAND, *prompt, *more)
    assert found.returncode == 0, found.stderr
    ids: list[int] = json.loads(found.stdout)["token_ids"]
    return ids


@pytest.fixture
def tokens(tmp_path: Path) -> list[str]:
    """The digests of two clients, whose tokens are in files."""
    digests = []
    for name in ("first", "second"):
        found = call("tsqp", "api-key", name, "--digest", "--to", str(tmp_path / name))
        assert found.returncode == 0, found.stderr
        digests.append(found.stdout)
    (tmp_path / "tokens").write_text("".join(digests))
    return digests


def test_a_buffering_proxy_changes_no_token(tokens: list[str], tmp_path: Path) -> None:
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


@pytest.mark.slow
def test_a_revoked_token_is_refused_from_then_on(tokens: list[str], tmp_path: Path) -> None:
    let_in = ("--http-tokens", str(tmp_path / "tokens"))
    with running_service("demo", "http://127.0.0.1:*", *let_in) as service:

        def is_let_in(name: str) -> bool:
            known = ("--http-token", str(tmp_path / name))
            return call("tsqp", "health", service.endpoint, *known).returncode == 0

        assert is_let_in("second")
        (tmp_path / "tokens").write_text(tokens[0])
        service.process.send_signal(signal.SIGHUP)
        until(lambda: not is_let_in("second"))
        assert is_let_in("first")
