"""`tee-runner serve` says what is wrong with its settings first, and of its mistakes no word."""

import asyncio
import gc
import socket
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from click.testing import CliRunner

from tests.kit.rows import each_row
from tests.kit.service import call
from tsqp.cli.tee_runner import command
from tsqp.run.load import added_leakage
from tsqp.run.server import _app, note_failure

# Where nothing listens: it must not come to that.
AWAY = ("--gpu", "tcp://127.0.0.1:1", "--connect-timeout-s", "60")


@each_row(
    ("options", "said"),
    [
        (("--page", "--host", "0.0.0.0"), "--page: got --host 0.0.0.0, expected an address of"),
        (("--tls-key", "{file}"), "--tls-certificate and --tls-key: got one of them, expected"),
        # Also before a key server is asked.
        (
            ("--tls-key", "{file}", "--seal-key-server", "https://127.0.0.1:1"),
            "--tls-certificate and --tls-key: got one of them, expected",
        ),
        (("--api-keys", "{file}"), "{file}"),
        (("--audit-log", "{file}"), "--audit-log: got another combination, expected"),
        (("--port", "{port}"), "127.0.0.1:{port}: got Address already in use, expected a free"),
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


def told(*options: str) -> tuple[Any, Any, Any]:
    """Return a policy, what `serve` makes an engine with, and the settings it serves by."""
    with (
        mock.patch("tsqp.cli.serve.open_runner") as opened,
        mock.patch("tsqp.run.server.opened_parts"),
        mock.patch("tsqp.run.server.serve_forever") as served,
        mock.patch("signal.signal"),
    ):
        CliRunner().invoke(command, ["serve", "demo", *options], catch_exceptions=False)
    call = opened.call_args
    return call.args[1].policy, call.kwargs["engine"], served.call_args.args[1]


def test_what_adds_to_lengths_and_timing_is_off_where_they_hide_and_said_where_it_is_on() -> None:
    for options, reuses, said in (
        ("shielded", False, []),
        ("dealt --prefix-reuse", True, ["prefix reuse"]),
        ("shielded --speculative ngram", False, ["speculation"]),
        ("tee-only --speculative ngram", True, []),
    ):
        policy, engine, _ = told("--policy", *options.split())
        lines = [line.split(" adds to lengths")[0] for line in added_leakage(policy, engine)]
        assert (engine.prefix_reuse, lines) == (reuses, said), options


def test_the_tempo_that_serve_is_told_is_the_server_s() -> None:
    settings = told("--policy", "tee-only", "--fixed-tempo-ms", "5")[2]
    parts, fake = mock.Mock(keys=None, audit=None, identity=None), mock.MagicMock()
    with (
        mock.patch("tsqp.run.server._fingerprint"),
        mock.patch.multiple(
            "tsqp.run.server",
            chat_template=mock.Mock(),
            default_sampling=mock.Mock(return_value={}),
        ),
        mock.patch("tsqp.run.server.create_app") as made,
    ):
        _app(fake, settings, None, parts, fake)
    assert made.call_args.args[0].tempo_s == 0.005


SECRET = "what the client said"


def test_what_fails_on_the_loop_is_logged_without_its_words(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """In a callback, and in a task that is not waited for."""

    def fail() -> None:
        raise ValueError(SECRET)

    async def fails() -> None:
        fail()

    async def run() -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(note_failure)
        loop.call_soon(fail)
        asyncio.create_task(fails())  # noqa: RUF006 - that nobody waits for it is the case
        for _ in range(3):
            await asyncio.sleep(0)
        gc.collect()

    asyncio.run(run())
    assert len(caplog.records) == 2
    for record in caplog.records:
        assert (record.getMessage(), record.exc_info) == ("callback_failed", None)
        fields = record.fields  # type: ignore[attr-defined]
        assert fields["error"] == "ValueError"
        assert "test_server.py:" in fields["at"]
        assert SECRET not in str(vars(record))
