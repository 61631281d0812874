"""How the programs end: signals, errors that nobody foresaw, output that cannot be written."""

from __future__ import annotations

import errno
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import click
import pytest

from tests.support import ENVIRONMENT
from tests.support import run as run_program
from tsqp.cli.program import run

WAITS = """
import sys, time, click
from tsqp.cli.program import run

@click.command()
def command():
    try:
        print("started", flush=True)
        # Short ones: a signal just before a sleep begins is seen when it ends.
        for _ in range(600):
            time.sleep(0.05)
    finally:
        print("cleaned", flush=True)

run(command, "tee-runner", "X")
"""


def end_of(body: Callable[[], object], capsys: pytest.CaptureFixture[str]) -> tuple[object, str]:
    """Run a program whose command is `body`; return exit status and stderr."""
    command = click.command()(body)
    with mock.patch.object(sys, "argv", ["tsqp"]), pytest.raises(SystemExit) as ended:
        run(command, "tsqp", "X")
    return ended.value.code, capsys.readouterr().err


@pytest.mark.parametrize(
    ("number", "said"),
    [
        (signal.SIGTERM, ""),
        (signal.SIGHUP, ""),
        (signal.SIGINT, "tee-runner: interrupted\n"),
    ],
)
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


def test_a_signal_during_imports_ends_the_service_quietly() -> None:
    """The moment is that of the first import after click's, which torch's follow."""
    code = (
        "import os, signal, sys\n"
        "class Finder:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'gpu_side.service':\n"
        "            os.kill(os.getpid(), signal.SIGTERM)\n"
        "sys.meta_path.insert(0, Finder())\n"
        "from tsqp.cli.gpu_service import main\n"
        "sys.argv = ['gpu-service', 'demo']\n"
        "main()\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env=ENVIRONMENT,
        check=False,
        timeout=60,
    )
    assert (result.returncode, result.stdout, result.stderr) == (143, "", "")


def test_handlers_are_taken_back_and_ignored_signals_stay_ignored(
    capsys: pytest.CaptureFixture[str],
) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    inside: dict[str, object] = {}

    def body() -> None:
        inside["hup"] = signal.getsignal(signal.SIGHUP)
        inside["term"] = signal.getsignal(signal.SIGTERM)

    try:
        usual = signal.getsignal(signal.SIGTERM)
        assert end_of(body, capsys) == (0, "")
        assert inside["hup"] == signal.SIG_IGN
        assert inside["term"] != usual
        assert signal.getsignal(signal.SIGTERM) == usual
    finally:
        signal.signal(signal.SIGHUP, before)


def test_an_unforeseen_error_is_one_line_and_has_its_traceback_on_demand(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def body() -> None:
        raise ZeroDivisionError("two\nlines")

    status, err = end_of(body, capsys)
    assert status == 1
    assert err == (
        "tsqp: internal error: ZeroDivisionError: two lines (set TSQP_DEBUG=1 for the traceback)\n"
    )
    monkeypatch.setenv("TSQP_DEBUG", "1")
    with mock.patch.object(sys, "argv", ["tsqp"]), pytest.raises(ZeroDivisionError):
        run(click.command()(body), "tsqp", "X")


def test_an_operating_system_error_names_the_file(capsys: pytest.CaptureFixture[str]) -> None:
    def body() -> None:
        raise OSError(errno.ENOSPC, "No space left on device", "/mnt/report.json")

    status, err = end_of(body, capsys)
    assert status == 1
    assert err.startswith(
        "tsqp: error: /mnt/report.json: got the error 'No space left on device', expected"
    )
    assert err.count("\n") == 1


def test_a_full_disk_under_standard_output_is_one_line() -> None:
    program = Path(sys.executable).parent / "tsqp"
    with open("/dev/full", "wb") as full:
        result = subprocess.run(
            [str(program), "completion", "bash"],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            env=ENVIRONMENT,
            check=False,
        )
    assert result.returncode == 1
    assert len(result.stderr.splitlines()) == 1
    assert "No space left on device" in result.stderr


def test_help_still_answers() -> None:
    assert run_program("tsqp", "--help").returncode == 0
