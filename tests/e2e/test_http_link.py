"""A service behind HTTP, in real processes: the same tokens as over a socket, also by proxies."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from tests.kit.http_proxy import buffering_proxy, certificate
from tests.kit.service import run, running_service, until

PROMPT = ("--prompt", "Once upon a time", "--max-new-tokens", "6", "--json")


def _generate(*more: str) -> tuple[int, list[int], str]:
    found = run("tee-runner", "generate", "demo", "--dtype", "float32", *PROMPT, *more)
    ids = json.loads(found.stdout)["token_ids"] if found.stdout else []
    return found.returncode, ids, found.stderr


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tokens of two clients and of a stranger, and a certificate."""
    made = tmp_path_factory.mktemp("http")
    digests = []
    for name in ("first", "second", "stranger"):
        found = run("tsqp", "api-key", name, "--digest", "--to", str(made / name))
        assert found.returncode == 0, found.stderr
        assert found.stdout.endswith(f"    # {name}\n")
        digests.append(found.stdout)
    (made / "tokens").write_text("".join(digests[:2]))
    (made / "none").write_text(digests[0])
    certificate(made)
    (made / "proxy.pem").chmod(0o600)
    return made


@pytest.fixture(scope="module")
def over_unix(tmp_path_factory: pytest.TempPathFactory) -> list[int]:
    """What is generated over a socket."""
    endpoint = f"unix://{tmp_path_factory.mktemp('unix')}/s"
    with running_service("demo", endpoint) as service:
        return _generate("--gpu", service.endpoint, "--policy", "shielded")[1]


def test_a_buffering_proxy_changes_no_token(folder: Path, over_unix: list[int]) -> None:
    tokens = ("--http-tokens", str(folder / "tokens"))
    with (
        running_service("demo", "http://127.0.0.1:*", *tokens) as service,
        buffering_proxy(service.endpoint) as proxy,
    ):
        known = ("--http-token", str(folder / "first"))
        status, ids, said = _generate("--gpu", proxy.url, "--policy", "shielded", *known)
        assert status == 0, said
        assert len(ids) == 6
        assert ids == over_unix
        assert proxy.passed > 20


@pytest.mark.slow
def test_a_revoked_token_is_refused_from_then_on(folder: Path, tmp_path: Path) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text((folder / "tokens").read_text())
    with running_service("demo", "http://127.0.0.1:*", "--http-tokens", str(tokens)) as service:
        known = ("--http-token", str(folder / "second"))
        assert run("tsqp", "health", service.endpoint, *known).returncode == 0
        tokens.write_text((folder / "none").read_text())
        service.process.send_signal(signal.SIGHUP)
        until(lambda: run("tsqp", "health", service.endpoint, *known).returncode != 0)
        stays = ("--http-token", str(folder / "first"))
        assert run("tsqp", "health", service.endpoint, *stays).returncode == 0


@pytest.mark.slow
def test_tls_of_the_service_itself(folder: Path, over_unix: list[int]) -> None:
    pem = str(folder / "proxy.pem")
    tls = ("--http-cert", pem, "--http-key", pem, "--http-tokens", str(folder / "tokens"))
    with running_service("demo", "http://127.0.0.1:*", *tls) as service:
        assert service.endpoint.startswith("https://")
        asked = ("--gpu", service.endpoint, "--policy", "shielded")
        known = ("--http-token", str(folder / "first"))
        status, ids, said = _generate(*asked, *known, "--http-ca", pem)
        assert status == 0, said
        assert ids == over_unix
        status, _, said = _generate(*asked, *known)
        assert status != 0
        assert "got TLS that fails" in said
