"""Starts our programs from other programs of ours, and ends them whatever happens."""

from __future__ import annotations

import os
import queue
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import IO

from protocol.errors import TsqpError
from tsqp import end_with_parent

START_TIMEOUT_S = 60.0
END_TIMEOUT_S = 10.0
# The last line of a program of ours that refuses its input; of a traceback, the name of the error.
_COMPLAINT = re.compile(
    r"(?:[a-z -]+: error: |[\w.]+Error: )?"
    r"(?P<where>.+?): got (?P<got>.+), expected (?P<expected>.+)"
)

# The service's, and the HTTP server's.
_READY = re.compile(" ready:? ")


class ProcessError(TsqpError):
    """A process that we started ended before its work was done."""


@contextmanager
def child(
    command: list[str], *, stdout: int
) -> Iterator[tuple[subprocess.Popen[bytes], StderrReader]]:
    """Start one of our programs, and end it when the block ends in whatever way."""
    process = subprocess.Popen(
        [*ending_with_us(), *command],
        stdout=stdout,
        stderr=subprocess.PIPE,
        # Without settings of the two programs, which each caller gives them: with a temperature,
        # for example, the demo's tokens would rightly differ from transformers'.
        env={
            **{
                name: value
                for name, value in os.environ.items()
                if not name.startswith("TSQP_") or name == "TSQP_DEBUG"
            },
            "PYTHONUNBUFFERED": "1",
        },
    )
    reader = StderrReader(process.stderr)
    try:
        yield process, reader
    finally:
        process.terminate()
        try:
            process.wait(END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        reader.join(END_TIMEOUT_S)
        if process.stdout is not None:
            process.stdout.close()


def ending_with_us() -> list[str]:
    """Return what goes before a child's command, so that it ends even when we are killed."""
    # Linux means the thread that started it: one that ends early would take the child with it.
    if sys.platform != "linux" or threading.current_thread() is not threading.main_thread():
        return []
    return [sys.executable, "-I", "-S", end_with_parent.__file__, str(os.getpid())]


def failure(where: str, status: int | None, last: str, *, expected: str) -> ProcessError:
    """Return the error of a process that ended early, or of one that still runs (None).

    `last`: the last line of its stderr. Where that is an error of ours, it is passed on as it is.
    """
    if status is not None and status < 0:
        names = {number.value: number.name for number in signal.Signals}
        name = names.get(-status, f"signal {-status}")
        return ProcessError(where, got=f"a process killed by {name}", expected=expected)
    if (complaint := _COMPLAINT.fullmatch(last)) is not None:
        return ProcessError(
            f"{where}: {complaint['where']}", got=complaint["got"], expected=complaint["expected"]
        )
    return ProcessError(where, got=last, expected=expected)


class StderrReader(threading.Thread):
    """Reads a child's stderr to its end, when the child ends: a full pipe would block it.

    `last`: the last line that was not empty. `ready`: gets the lines that say ready, and None when
    the stream ends.
    """

    def __init__(self, stream: IO[bytes] | None) -> None:
        super().__init__(name="stderr", daemon=True)
        self.last = "no output"
        self._stream = stream
        self.ready: queue.Queue[str | None] = queue.Queue()
        self.start()

    def run(self) -> None:
        """Read."""
        with self._stream or open(os.devnull, "rb") as stream:
            for line in stream:
                text = line.decode(errors="replace").strip()
                self.last = text or self.last
                if _READY.search(text):
                    self.ready.put(text)
        self.ready.put(None)


def program(name: str) -> str:
    """Return the path of one of our own programs, beside this interpreter or on PATH."""
    beside = Path(sys.executable).parent / name
    found = str(beside) if beside.exists() else shutil.which(name)
    if found is None:
        raise ProcessError(name, got="no such program", expected="it beside python or on PATH")
    return found


def start_service(
    running: ExitStack, arguments: list[str], *, timeout_s: float = START_TIMEOUT_S
) -> tuple[int, str]:
    """Start a gpu-service that ends with `running`; return its process id and its endpoint.

    Raises ProcessError with its last line if it does not say that it is ready.
    """
    pid, line = _start(running, "gpu-service", arguments, timeout_s)
    return pid, line.split("endpoint=", 1)[1].split()[0]


def start_server(running: ExitStack, arguments: list[str]) -> tuple[int, str]:
    """Start a `tee-runner serve` likewise; return its process id and its base URL."""
    pid, line = _start(running, "tee-runner", ["serve", *arguments], START_TIMEOUT_S)
    return pid, line.split(" ready: ", 1)[1]


def _start(
    running: ExitStack, name: str, arguments: list[str], timeout_s: float
) -> tuple[int, str]:
    command = [program(name), *arguments]
    process, log = running.enter_context(child(command, stdout=subprocess.DEVNULL))
    line = None
    with suppress(queue.Empty):
        line = log.ready.get(timeout=timeout_s)
    if line is None:
        status = None
        # Its stderr may end a moment before it does.
        with suppress(subprocess.TimeoutExpired):
            status = process.wait(1.0)
        raise failure(
            name,
            status,
            log.last,
            expected=f"a line that says ready within {timeout_s:g} s",
        )
    return process.pid, line
