"""gpu-services for many tests and the soak: started in a fraction of a second, killed at will."""

from __future__ import annotations

import os
import re
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from tests.forked import ENVIRONMENT, Forked
from tests.tools.closing import Closing

START_S = 30.0
_READY = re.compile(rb" ready .*\bendpoint=(\S+).*\n")


@dataclass
class Worker:
    """A running gpu-service. `arguments`: what it was started with."""

    process: Forked
    endpoint: str
    arguments: tuple[str, ...]

    @property
    def pid(self) -> int:
        """Its number, which may be another process's once it has ended."""
        return self.process.pid

    @property
    def is_running(self) -> bool:
        """Whether the process is still there, stopped ones too."""
        return self.process.poll() is None

    def signal(self, number: int) -> None:
        """Send a signal; nothing happens if it has ended."""
        self.process.send_signal(number)

    def kill(self) -> None:
        """End it as kill -9 does, and wait until it is gone."""
        self.process.kill()


class Workers(Closing):
    """Starts gpu-services from any thread; use as a context manager, which ends them all."""

    def __init__(self) -> None:
        self._started = ExitStack()

    def start(self, *arguments: str, log: Path | None = None) -> Worker:
        """Start `gpu-service ARGUMENTS` and wait until it is ready.

        `log`: a file that its stderr is appended to. Raises RuntimeError if it ends instead.
        """
        with log.open("ab+") if log else tempfile.TemporaryFile("ab+") as file:
            begins = file.seek(0, os.SEEK_END)
            process = Forked("gpu-service", arguments, ENVIRONMENT, stderr=file.fileno())
            self._started.callback(process.kill)
            until = time.monotonic() + START_S
            while time.monotonic() < until:
                ended = process.poll() is not None
                if ready := _READY.search(os.pread(file.fileno(), 2**20, begins)):
                    return Worker(process, ready[1].decode(), arguments)
                if ended:
                    break
                time.sleep(0.005)
        raise RuntimeError(f"gpu-service {' '.join(arguments)}: got none, expected it ready")

    def restart(self, worker: Worker) -> Worker:
        """Start one with the arguments and at the endpoint of another, which has ended."""
        arguments = list(worker.arguments)
        arguments[arguments.index("--bind") + 1] = worker.endpoint
        return self.start(*arguments)

    def close(self) -> None:
        """End those that are left."""
        self._started.close()
