"""How the programs end: signals, errors that nobody foresaw, output that cannot be written."""

from __future__ import annotations

import errno
import importlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import click
import pytest

from tee_side.protect import resumption
from tests.kit.service import ENVIRONMENT
from tests.kit.service import run as run_program
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

run(command, "tee-runner")
"""


def end_of(body: Callable[[], object], capsys: pytest.CaptureFixture[str]) -> tuple[object, str]:
    """Run a program whose command is `body`; return exit status and stderr."""
    command = click.command()(body)
    with mock.patch.object(sys, "argv", ["tsqp"]), pytest.raises(SystemExit) as ended:
        run(command, "tsqp")
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


def test_an_unforeseen_error_is_one_line_without_its_text_and_has_its_traceback_on_demand(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def body() -> None:
        raise ZeroDivisionError("two\nlines")

    status, err = end_of(body, capsys)
    assert status == 1
    place = f"tests/unit/tsqp/test_program.py:{body.__code__.co_firstlineno + 1} in body"
    assert err == (
        f"tsqp: internal error: ZeroDivisionError at {place} (TSQP_DEBUG=1 shows the traceback,"
        " with text that may be part of a prompt or key)\n"
    )
    monkeypatch.setenv("TSQP_DEBUG", "1")
    with mock.patch.object(sys, "argv", ["tsqp"]), pytest.raises(ZeroDivisionError):
        run(click.command()(body), "tsqp")
    assert capsys.readouterr().err == (
        "tsqp: warning: TSQP_DEBUG=1 shows text that may be part of a prompt or key\n"
    )


def test_an_unforeseen_error_of_a_library_names_our_own_line(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def body() -> None:
        json.loads("a secret")

    _, err = end_of(body, capsys)
    assert "JSONDecodeError at tests/unit/tsqp/test_program.py:" in err
    assert "secret" not in err


_PRIVATE = """
import ctypes, resource, click
from tsqp.cli.program import run

@click.command()
def command():
    print(resource.getrlimit(resource.RLIMIT_CORE), ctypes.CDLL(None).prctl(3))

run(command, "tee-runner", has_secrets={})
"""


@pytest.mark.parametrize(("has_secrets", "dumpable"), [(True, 0), (False, 1)])
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


@pytest.mark.parametrize("has_secrets", [True, False])
def test_secrets_are_not_drawn_from_a_generator_without_a_seed(
    has_secrets: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def unseeded(size: int, flags: int) -> bytes:
        assert (size, flags) == (1, os.GRND_NONBLOCK)
        raise BlockingIOError

    monkeypatch.setattr(os, "getrandom", unseeded)
    monkeypatch.setattr("tsqp.cli.program.keep_memory_private", lambda *, from_others: None)
    ran: list[str] = []
    with mock.patch.object(sys, "argv", ["tsqp"]), pytest.raises(SystemExit) as ended:
        run(click.command()(lambda: ran.append("it")), "tsqp", has_secrets=has_secrets)
    said = "tsqp: error: the operating system's random generator: got no seed, expected"
    assert capsys.readouterr().err.startswith(said) == has_secrets
    assert (ended.value.code, ran) == ((2, []) if has_secrets else (0, ["it"]))


def test_a_program_with_secrets_watches_from_its_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tsqp.cli.program.keep_memory_private", lambda *, from_others: None)
    order: list[str] = []
    monkeypatch.setattr(resumption, "watch", lambda: order.append("watch"))
    with mock.patch.object(sys, "argv", ["tsqp"]), pytest.raises(SystemExit):
        run(click.command()(lambda: order.append("run")), "tsqp", has_secrets=True)
    assert order == ["watch", "run"]


@pytest.mark.parametrize(
    ("module", "arguments", "secrets"),
    [
        ("tee_runner", [], True),
        ("gpu_service", [], False),
        ("main", ["doctor"], False),
        ("main", ["calibrate", "demo"], True),
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
