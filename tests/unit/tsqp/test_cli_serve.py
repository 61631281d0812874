"""`tee-runner serve` says what is wrong with its own settings before it loads anything."""

from __future__ import annotations

import http.client
import signal
import socket
from pathlib import Path

import pytest

from tests.kit.service import ENVIRONMENT, TEE_ONLY, Forked, run, until
from tsqp.cli.serve import _Progress

# Weights are read when the test says so.
SLOW = """
import pathlib, tee_side.assembly as assembly, time
load = assembly.load_local_operators
def wait(*arguments, **named):
    while not pathlib.Path({file!r}).exists():
        time.sleep(0.01)
    return load(*arguments, **named)
assembly.load_local_operators = wait
"""
# Says so in a file.
TRIMMED = """
import pathlib, tsqp.server
tsqp.server._TRIM_S = 0.01
tsqp.server._memory_trimmer = lambda: pathlib.Path({file!r}).touch
"""
# Where nothing listens: it must not come to that.
AWAY = ("--gpu", "tcp://127.0.0.1:1", "--connect-timeout-s", "60")


def test_a_hangup_while_the_model_is_loaded_ends_nothing(tmp_path: Path) -> None:
    file, trimmed = tmp_path / "go on", tmp_path / "trimmed"
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    arguments = ("serve", "demo", *TEE_ONLY, "--threads", "1", "--port", str(port))
    before = SLOW.format(file=str(file)) + TRIMMED.format(file=str(trimmed))
    process = Forked("tee-runner", arguments, ENVIRONMENT, before=before)
    try:
        assert "loading demo under policy tee-only" in process.stderr.readline()
        until(lambda: _health(port) == 503)
        process.send_signal(signal.SIGHUP)
        file.touch()
        until(lambda: _health(port) == 200)
        # Nobody answers beside the server itself any more.
        assert {_health(port) for _ in range(50)} == {200}
        until(trimmed.exists)
    finally:
        process.kill()


def _health(port: int) -> int:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status
    except ConnectionError:  # refused before it listens; reset at the moment of the change
        return 0
    finally:
        connection.close()


def test_progress_is_told_every_few_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    clock = iter([0.0, 1.9, 2.0, 2.0, 3.9, 4.0, 4.0])
    monkeypatch.setattr("tsqp.cli.serve.time.monotonic", lambda: next(clock))
    progress = _Progress(said.append)
    for done in range(1, 5):
        progress("weights", done, 9)
    assert said == ["weights: 2 of 9", "weights: 4 of 9"]


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
