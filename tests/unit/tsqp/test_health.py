"""`tsqp health`, of services that are ready, drain, refuse, or say nothing."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from gpu_side.access import ServiceKeys
from gpu_side.encoding import encode_reply, open_request
from gpu_side.transport.bind import open_listener
from gpu_side.transport.listener import Listener
from protocol.errors import EndpointError, ErrorCode, SettingsError
from protocol.messages import HealthReply, Response
from tests.kit.service import ENVIRONMENT
from tsqp.cli.main import command
from tsqp.key_files import new_key_pair

READY = HealthReply(status="ready", uptime_s=61.4, queued_requests=3, queued_bytes=4096)
DRAINING = READY.model_copy(update={"status": "draining"})


@contextmanager
def _service(
    endpoint: str, reply: Response | ErrorCode | None, keys: ServiceKeys | None = None
) -> Iterator[str]:
    """Answer everything with one reply, or nothing."""
    listener = open_listener(endpoint, keys=keys)
    reader, writer = socket.socketpair()
    thread = threading.Thread(target=_answer, args=(listener, reader, reply))
    thread.start()
    try:
        yield listener.endpoint
    finally:
        writer.send(b"x")
        thread.join()
        reader.close()
        writer.close()
        listener.close()


def _answer(listener: Listener, wakeup: socket.socket, reply: Response | ErrorCode | None) -> None:
    while listener.wait(wakeup=wakeup):
        incoming = listener.receive()
        if incoming is not None and reply is not None:
            opened = open_request(incoming.frames, 2**20)
            frames = encode_reply(opened.form, opened.request_id, opened.method, reply)
            listener.send(incoming.route, frames)


def _health(*arguments: str) -> Result:
    return CliRunner().invoke(command, ["health", *arguments])


@pytest.mark.parametrize("transport", ["tcp", "unix"])
@pytest.mark.parametrize(("reply", "status"), [(READY, 0), (DRAINING, 1)])
def test_one_line_and_a_status(
    tmp_path: Path, transport: str, reply: HealthReply, status: int
) -> None:
    at = "tcp://127.0.0.1:*" if transport == "tcp" else f"unix://{tmp_path}/s"
    with _service(at, reply) as endpoint:
        result = _health(endpoint)
    assert result.stdout == f"{reply.status}, up 61 s, queued 3 requests of 4096 bytes\n"
    assert (result.exit_code, result.stderr) == (status, "")


def test_json(tmp_path: Path) -> None:
    with _service(f"unix://{tmp_path}/s", DRAINING) as endpoint:
        result = _health(endpoint, "--json")
    assert json.loads(result.stdout) == {
        "status": "draining",
        "uptime_s": 61.4,
        "queued_requests": 3,
        "queued_bytes": 4096,
    }
    assert result.exit_code == 1


def test_with_keys(tmp_path: Path) -> None:
    for name in ("service", "watcher", "stranger"):
        new_key_pair(tmp_path / name)
    keys = ServiceKeys.read(tmp_path / "service.key", tmp_path / "watcher.pub")
    with _service(f"ipc://{tmp_path}/s", READY, keys) as endpoint:
        of_service = ("--service-key", str(tmp_path / "service.pub"))
        let_in = _health(endpoint, "--identity", str(tmp_path / "watcher.key"), *of_service)
        turned_away = _health(endpoint, "--identity", str(tmp_path / "stranger.key"), *of_service)
    assert (let_in.exit_code, let_in.stdout.split(",")[0]) == (0, "ready")
    _is_one_error(turned_away, "allow")


def _is_one_error(result: Result, text: str) -> None:
    assert (result.exit_code, result.stdout) == (1, "")
    (line,) = result.stderr.splitlines()
    assert line.startswith("tsqp: error: ")
    assert text in line


def test_a_service_that_does_not_answer_is_not_ready(tmp_path: Path) -> None:
    with _service(f"ipc://{tmp_path}/s", None) as endpoint:
        _is_one_error(_health(endpoint, "--timeout-s", "0.2"), "0.2 s")


def test_nor_is_none(tmp_path: Path) -> None:
    _is_one_error(_health(f"unix://{tmp_path}/s", "--timeout-s", "0.2"), f"{tmp_path}/s")


def test_nor_one_that_does_not_know_the_question(tmp_path: Path) -> None:
    with _service(f"unix://{tmp_path}/s", ErrorCode.UNKNOWN_METHOD) as endpoint:
        _is_one_error(_health(endpoint), "UNKNOWN_METHOD")


def test_bad_input_is_no_verdict(tmp_path: Path) -> None:
    assert isinstance(_health("ftp://there").exception, EndpointError)
    alone = _health(f"ipc://{tmp_path}/s", "--identity", str(tmp_path / "a.key"))
    assert isinstance(alone.exception, SettingsError)
    new_key_pair(tmp_path / "a")
    keys = ("--identity", str(tmp_path / "a.key"), "--service-key", str(tmp_path / "a.pub"))
    assert isinstance(_health(f"unix://{tmp_path}/s", *keys).exception, SettingsError)


def test_its_help_imports_nothing_heavy() -> None:
    code = (
        "import sys; from tsqp.cli.main import main; sys.argv[1:] = ['health', '--help']\n"
        "try:\n    main()\nexcept SystemExit as e:\n    status = e.code\n"
        "heavy = {'torch', 'transformers', 'numpy', 'pydantic', 'zmq'} & set(sys.modules)\n"
        "print('heavy', sorted(heavy), status)"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=ENVIRONMENT, check=True
    )
    assert "ENDPOINT" in result.stdout
    assert result.stdout.splitlines()[-1] == "heavy [] 0"
