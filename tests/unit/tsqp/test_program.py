"""How the programs end: signals, errors that nobody foresaw, output that cannot be written."""

import errno
import importlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from typing import Any
from unittest import mock

import click
import pytest
from click.testing import CliRunner

from protocol.errors import SettingsError
from tee_side.protect import resumption
from tests.kit.rows import each_row
from tests.kit.service import ENVIRONMENT
from tsqp.cli.main import command as tsqp
from tsqp.run.process import run

WAITS = """
import sys, time, click
from tsqp.run.process import run

@click.command()
def command():
    try:
        print("started", flush=True)
        # Short ones: a signal just before a sleep begins is seen when it ends.
        for _ in range(600):
            time.sleep(0.05)
    finally:
        print("cleaned", flush=True)

run(command, "tee-runner")
"""


def end_of(
    body: Callable[[], object], capsys: pytest.CaptureFixture[str], **options: bool
) -> tuple[object, str]:
    with mock.patch.object(sys, "argv", ["tsqp"]), pytest.raises(SystemExit) as ended:
        run(click.command()(body), "tsqp", **options)
    return ended.value.code, capsys.readouterr().err


@each_row(("number", "said"), [(signal.SIGTERM, ""), (signal.SIGINT, "tee-runner: interrupted\n")])
def test_a_signal_runs_every_finally(number: signal.Signals, said: str) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", WAITS],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=ENVIRONMENT,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "started\n"
        process.send_signal(number)
        out, err = process.communicate(timeout=20)
    assert (process.returncode, out, err) == (128 + number, "cleaned\n", said)


def test_an_unforeseen_error_is_one_line_without_its_text_and_has_its_traceback_on_demand(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def body() -> None:
        json.loads("a secret")

    status, err = end_of(body, capsys)
    # Of a library's error our own line is named.
    place = f"tests/unit/tsqp/test_program.py:{body.__code__.co_firstlineno + 1} in body"
    assert (status, err) == (
        1,
        f"tsqp: internal error: JSONDecodeError at {place} (TSQP_DEBUG=1 shows the traceback,"
        " with text that may be part of a prompt or key)\n",
    )
    monkeypatch.setenv("TSQP_DEBUG", "1")
    with mock.patch.object(sys, "argv", ["tsqp"]), pytest.raises(json.JSONDecodeError):
        run(click.command()(body), "tsqp")
    assert capsys.readouterr().err == (
        "tsqp: warning: TSQP_DEBUG=1 shows text that may be part of a prompt or key\n"
    )


_PRIVATE = """
import ctypes, resource, click
from tsqp.run.process import run

@click.command()
def command():
    print(resource.getrlimit(resource.RLIMIT_CORE), ctypes.CDLL(None).prctl(3))

run(command, "tee-runner", has_secrets={})
"""


@each_row(("has_secrets", "dumpable"), [(True, 0), (False, 1)])
def test_memory_is_not_dumped_and_secrets_are_not_looked_at(
    has_secrets: bool, dumpable: int
) -> None:
    """3 is PR_GET_DUMPABLE: with 0, only a process with CAP_SYS_PTRACE can attach."""
    result = subprocess.run(
        [sys.executable, "-c", _PRIVATE.format(has_secrets)],
        capture_output=True,
        text=True,
        env=ENVIRONMENT,
        check=True,
    )
    assert result.stdout == f"(0, 0) {dumpable}\n"


@each_row("has_secrets", [True, False])
def test_secrets_are_not_drawn_from_a_generator_without_a_seed(
    has_secrets: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tsqp.run.process.keep_memory_private", lambda *, from_others: None)
    order: list[str] = []
    monkeypatch.setattr(resumption, "watch", lambda: order.append("watch"))

    given: Any = (lambda: order.append("run"), capsys)
    assert end_of(*given, has_secrets=has_secrets)[0] == 0
    assert order == (["watch", "run"] if has_secrets else ["run"])
    order.clear()
    unseeded = mock.Mock(side_effect=BlockingIOError)
    monkeypatch.setattr(os, "getrandom", unseeded)
    status, err = end_of(*given, has_secrets=has_secrets)
    assert (status, "run" in order) == ((2, False) if has_secrets else (0, True))
    assert unseeded.mock_calls == [mock.call(1, os.GRND_NONBLOCK)] * has_secrets
    said = "tsqp: error: the operating system's random generator: got no seed, expected"
    assert err.startswith(said) == has_secrets


@each_row(
    ("module", "arguments", "secrets"),
    [
        ("tee_runner", [], True),
        ("gpu_service", [], False),
        ("main", ["doctor"], False),
        ("main", ["--config", "x", "keys", "new", "y"], True),
        ("main", ["provision"], True),
    ],
)
def test_programs_with_secrets_keep_others_out(
    module: str, arguments: list[str], secrets: bool
) -> None:
    with mock.patch(f"tsqp.cli.{module}.run") as started, mock.patch("sys.argv", ["x", *arguments]):
        importlib.import_module(f"tsqp.cli.{module}").main()
    assert started.call_args.kwargs.get("has_secrets", False) == secrets


def test_output_that_cannot_be_written_and_an_extra_that_is_missing_are_one_line(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def body() -> None:
        raise OSError(errno.ENOSPC, "No space left on device", "/mnt/report.json")

    status, err = end_of(body, capsys)
    said = "tsqp: error: /mnt/report.json: got the error 'No space left on device', expected"
    assert (status, err.startswith(said), err.count("\n")) == (1, True, 1)
    with mock.patch.dict(sys.modules, {"transformers": None}):
        asked = CliRunner().invoke(tsqp, ["demo"])
    assert isinstance(asked.exception, SettingsError)
    assert "the extra demo" in asked.exception.expected
