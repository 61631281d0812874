"""The status line gives the terminal's last row back, also when a signal ends the program."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys

import pytest

from tests.kit.service import ENVIRONMENT

SCRIPT = """
import time, click
from tsqp.cli.program import run
from tsqp.cli.status import StatusLine

@click.command()
def command():
    with StatusLine("tsqp"):
        # Short ones: a signal just before a sleep begins is seen when it ends.
        for _ in range(600):
            time.sleep(0.05)

run(command, "tee-runner")
"""


SHORT = """
from tsqp.cli.status import StatusLine

with StatusLine("tsqp") as line:
    line.draw()
print("end")
"""


def _read_until(terminal: int, text: bytes) -> bytes:
    """Return what a terminal shows until this text. OSError: it never came."""
    seen = b""
    while text not in seen:
        seen += os.read(terminal, 4096)
    return seen


@pytest.mark.parametrize(("terminal", "drawn"), [("xterm", True), ("dumb", False)])
def test_a_console_that_scrolls_alone_gets_no_status_line(terminal: str, drawn: bool) -> None:
    ours, theirs = pty.openpty()
    command = [sys.executable, "-c", SHORT]
    environment = {**ENVIRONMENT, "TERM": terminal}
    subprocess.run(command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment, check=True)
    seen = _read_until(ours, b"end")
    for end in (ours, theirs):
        os.close(end)
    assert (b"\x1b" in seen) == drawn


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_signal_restores_the_scroll_region(number: signal.Signals) -> None:
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env={**ENVIRONMENT, "TERM": "xterm"},
    )
    os.close(theirs)
    try:
        assert b"\x1b[r" not in _read_until(ours, b"prefill")
        process.send_signal(number)
        assert process.wait(20) == 128 + number
        _read_until(ours, b"\x1b[r")
    finally:
        process.kill()
        process.wait()
        os.close(ours)
