"""`tee-runner serve` says what is wrong with its own settings before it loads anything."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from tests.support import run

# Where nothing listens: it must not come to that.
AWAY = ("--gpu", "tcp://127.0.0.1:1", "--connect-timeout-s", "60")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--page", "--host", "0.0.0.0"), "--page: got --host 0.0.0.0, expected an address of"),
        (("--tls-key", "{file}"), "--tls-certificate and --tls-key: got one of them, expected"),
        (("--tls-key", "{file}", "--tls-certificate", "{file}"), "--tls-certificate and --tls-key"),
        (("--api-keys", "{file}"), "{file}"),
        (("--audit-log", "{file}"), "--audit-log: got another combination, expected"),
        (("--host", "192.0.2.1"), "192.0.2.1:8000: got"),
        (("--port", "{port}"), "127.0.0.1:{port}: got Address already in use"),
    ],
    ids=["page", "tls alone", "tls", "keys", "log", "host", "port"],
)
def test_it_is_said_before_the_model_is_loaded(
    tmp_path: Path, options: tuple[str, ...], said: str
) -> None:
    file = tmp_path / "file"
    file.write_text("no PEM, no TOML = ")
    file.chmod(0o600)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        given = [option.format(file=file, port=port) for option in options]
        result = run("tee-runner", "serve", "demo", *AWAY, *given, timeout_s=30)
    assert result.returncode == 2
    assert said.format(file=file, port=port) in result.stderr
    assert "ready: " not in result.stderr
