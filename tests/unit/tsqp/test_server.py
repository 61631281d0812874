"""`tee-runner serve` says what is wrong with its settings first, and of its mistakes no word."""

from __future__ import annotations

import asyncio
import gc
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.kit.rows import each_row
from tests.kit.service import call
from tsqp.server import note_failure

# Where nothing listens: it must not come to that.
AWAY = ("--gpu", "tcp://127.0.0.1:1", "--connect-timeout-s", "60")


@each_row(
    ("options", "said"),
    [
        (("--page", "--host", "0.0.0.0"), "--page: got --host 0.0.0.0, expected an address of"),
        (("--tls-key", "{file}"), "--tls-certificate and --tls-key: got one of them, expected"),
        (("--api-keys", "{file}"), "{file}"),
        (("--audit-log", "{file}"), "--audit-log: got another combination, expected"),
        (("--port", "{port}"), "127.0.0.1:{port}: got Address already in use"),
    ],
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
        result = call("tee-runner", "serve", "demo", *AWAY, *given)
    assert result.returncode == 2
    assert said.format(file=file, port=port) in result.stderr
    assert "ready: " not in result.stderr


SECRET = "what the client said"


def _in_a_callback() -> None:
    def fail() -> None:
        raise ValueError(SECRET)

    asyncio.get_running_loop().call_soon(fail)


def _in_a_task() -> None:
    async def fail() -> None:
        raise ValueError(SECRET)

    asyncio.create_task(fail())  # noqa: RUF006 - that nobody waits for it is the case


@each_row("begin", [_in_a_callback, _in_a_task], ids=lambda begin: begin.__name__)
def test_what_fails_on_the_loop_is_logged_without_its_words(
    begin: Callable[[], None], caplog: pytest.LogCaptureFixture
) -> None:
    async def run() -> None:
        asyncio.get_running_loop().set_exception_handler(note_failure)
        begin()
        for _ in range(3):
            await asyncio.sleep(0)
        gc.collect()

    caplog.clear()
    asyncio.run(run())
    (record,) = caplog.records
    assert (record.getMessage(), record.exc_info) == ("callback_failed", None)
    fields = record.fields  # type: ignore[attr-defined]
    assert fields["error"] == "ValueError"
    assert "test_server.py:" in fields["at"]
    assert SECRET not in str(vars(record))
