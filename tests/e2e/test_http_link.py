"""A service behind HTTP, in real processes: the same tokens as over a socket, also by proxies."""

from __future__ import annotations

import json
import signal
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.buffering_proxy import buffering_proxy
from tests.e2e.tls_ending_proxy import _contexts
from tests.kit.service import Service, call, run, running_service

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
    _contexts(made)
    (made / "proxy.pem").chmod(0o600)
    return made


@pytest.fixture(scope="module")
def over_unix(tmp_path_factory: pytest.TempPathFactory) -> list[int]:
    """What is generated over a socket."""
    endpoint = f"unix://{tmp_path_factory.mktemp('unix')}/s"
    with running_service("demo", endpoint) as service:
        return _generate("--gpu", service.endpoint, "--policy", "shielded")[1]


@pytest.fixture(scope="module")
def service(folder: Path) -> Iterator[Service]:
    """A service that lets two tokens in."""
    with running_service(
        "demo", "http://127.0.0.1:*", "--http-tokens", str(folder / "tokens")
    ) as made:
        yield made


def test_a_buffering_proxy_changes_no_token(
    service: Service, folder: Path, over_unix: list[int]
) -> None:
    with buffering_proxy(service.endpoint) as proxy:
        for name in ("first", "second"):
            known = ("--http-token", str(folder / name))
            status, ids, said = _generate("--gpu", proxy.url, "--policy", "shielded", *known)
            assert status == 0, said
            assert len(ids) == 6
            assert ids == over_unix
        assert proxy.passed > 20


@pytest.mark.slow
def test_a_proxy_that_cuts_connections_costs_retries_alone(
    service: Service, folder: Path, over_unix: list[int]
) -> None:
    with buffering_proxy(service.endpoint, cut_every=10) as proxy:
        known = ("--http-token", str(folder / "first"))
        status, ids, said = _generate("--gpu", proxy.url, "--policy", "shielded", *known)
        assert status == 0, said
        assert ids == over_unix
        assert proxy.cut > 2


@pytest.mark.slow
def test_a_service_that_is_gone_is_stood_in_for(
    service: Service, folder: Path, over_unix: list[int]
) -> None:
    known = ("--http-token", str(folder / "first"))
    both = ("--gpu", "http://127.0.0.1:9", "--gpu", service.endpoint, "--policy", "shielded")
    status, ids, said = _generate(*both, "--http-token", str(folder / "second"), *known)
    assert status == 0, said
    assert ids == over_unix
    status, _, said = _generate(*both, *known)
    assert status != 0
    assert "--http-token: got one for several hosts" in said


@pytest.mark.parametrize("token", ["stranger", None])
def test_a_stranger_is_told_at_once(service: Service, folder: Path, token: str | None) -> None:
    known = () if token is None else ("--http-token", str(folder / token))
    status, _, said = _generate("--gpu", service.endpoint, "--policy", "shielded", *known)
    assert status != 0
    assert "got HTTP status 401, expected a token that the service lists (--http-token)" in said
    for path in folder.iterdir():
        text = path.read_text()
        assert not text.startswith("tsqp-") or text.strip() not in said + "\n".join(service.log)


def test_health_and_doctor_know_it(service: Service, folder: Path) -> None:
    known = ("--http-token", str(folder / "first"))
    found = run("tsqp", "health", service.endpoint, *known)
    assert found.returncode == 0, found.stderr
    assert found.stdout.startswith("ready")
    assert run("tsqp", "health", service.endpoint).returncode == 1
    found = run("tsqp", "doctor", "demo", "--gpu", service.endpoint, *known)
    assert "the same model" in found.stdout
    with urllib.request.urlopen(f"{service.endpoint}/health", timeout=20) as answer:
        assert answer.read() == b"ready\n"


@pytest.mark.slow
def test_a_revoked_token_is_refused_from_then_on(folder: Path, tmp_path: Path) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text((folder / "tokens").read_text())
    with running_service("demo", "http://127.0.0.1:*", "--http-tokens", str(tokens)) as service:
        known = ("--http-token", str(folder / "second"))
        assert run("tsqp", "health", service.endpoint, *known).returncode == 0
        tokens.write_text((folder / "none").read_text())
        service.process.send_signal(signal.SIGHUP)
        until = time.monotonic() + 30
        while run("tsqp", "health", service.endpoint, *known).returncode == 0:
            assert time.monotonic() < until
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


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--http", "0.0.0.0:0"), "expected --http-tokens (tsqp api-key NAME --digest makes one)"),
        (("--http", "0", "--bind", "tcp://127.0.0.1:*"), "expected one of them"),
        (("--http-tokens", "tokens"), "expected --http"),
        (("--http", "0", "--identity", "k", "--allow", "a"), "which has tokens and certificates"),
        (("--http", "0", "--http-cert", "c"), "expected --http-cert and --http-key, or neither"),
        (("--http", "nonsense:x"), "expected"),
    ],
)
def test_what_does_not_go_together(options: tuple[str, ...], said: str) -> None:
    found = call("gpu-service", "demo", *options)
    assert found.returncode == 2, found.stderr
    assert said in found.stderr
