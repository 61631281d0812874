"""Real gpu-service processes that start in a fraction of a second.

Most of the time that a program of ours takes to start goes into importing torch. `Workers` has one
process that has imported everything, and each service is a fork of it that runs the program's own
entry point: `kill -9` and SIGSTOP are as real as for any other process.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import select
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

from protocol.integer import check_kernels
from protocol.model.weights import CPU
from tests.tools.closing import Closing
from tsqp.end_with_parent import end_with

START_S = 30.0


@dataclass
class Worker:
    """A running gpu-service. `arguments`: what it was started with."""

    pid: int
    endpoint: str
    arguments: tuple[str, ...]
    ended: bool = False

    def signal(self, number: int) -> None:
        """Send a signal; nothing happens if it was killed."""
        if not self.ended:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """End it as kill -9 does, and wait until it is gone."""
        self.signal(signal.SIGKILL)
        until = time.monotonic() + START_S
        while self.is_running:
            if time.monotonic() > until:
                raise TimeoutError(f"process {self.pid} does not end")
            time.sleep(0.001)  # it is no child of ours: there is nothing to wait for
        # From here on its number may become another process's.
        self.ended = True

    @property
    def is_running(self) -> bool:
        """Whether the process is still there, stopped ones too."""
        if self.ended:
            return False
        process = Path(f"/proc/{self.pid}")
        try:
            status = (process / "stat").read_text(encoding="ascii", errors="replace")
            threads = len(list((process / "task").iterdir()))
        except OSError:
            return False
        # Of a process that is a zombie other threads may still hold its sockets open.
        return threads > 1 or status.rpartition(")")[2].split()[0] not in ("Z", "X")


class _Forker:
    """The process that has imported everything, which is started when it is first needed."""

    def __init__(self) -> None:
        environment = {
            **{k: v for k, v in os.environ.items() if not k.startswith(("TSQP_", "GPU_", "TEE_"))},
            "OMP_NUM_THREADS": "1",
        }
        self._lock = threading.Lock()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.tools.workers"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
            cwd=Path(__file__).resolve().parents[2],
        )

    def ask(self, **request: object) -> dict[str, Any]:
        """Have it do something, and return what it says. From any thread."""
        if self._process.stdin is None or self._process.stdout is None:
            raise RuntimeError("workers: got no pipes, expected stdin and stdout")
        with self._lock:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        if not line:
            raise RuntimeError("workers: got no answer, expected one")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self) -> None:
        """End it, and all that it started."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        try:
            self._process.wait(START_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()


@cache
def _only_forker() -> _Forker:
    forker = _Forker()
    atexit.register(forker.close)
    return forker


_forker_lock = threading.Lock()


def _forker() -> _Forker:
    """Return the one of this process, which ends with it. From any thread."""
    with _forker_lock:  # a cache alone lets several threads in at once
        return _only_forker()


class Workers(Closing):
    """Starts gpu-services; use as a context manager, which ends them all.

    From any thread. All of a process are forks of one that is started once.
    """

    def __init__(self) -> None:
        self._started: list[int] = []

    def start(self, *arguments: str, log: Path | None = None) -> Worker:
        """Start `gpu-service ARGUMENTS` and wait until it is ready.

        `log`: a file that its stderr is appended to. Raises RuntimeError if it ends instead.
        """
        answer = _forker().ask(arguments=arguments, log=str(log) if log else None)
        self._started.append(answer["pid"])
        if answer["endpoint"] is None:
            raise RuntimeError(f"gpu-service {' '.join(arguments)}: got none, expected it ready")
        return Worker(answer["pid"], answer["endpoint"], arguments)

    def restart(self, worker: Worker) -> Worker:
        """Start one with the arguments and at the endpoint of another, which has ended."""
        arguments = list(worker.arguments)
        arguments[arguments.index("--bind") + 1] = worker.endpoint
        return self.start(*arguments)

    def close(self) -> None:
        """End those that are left."""
        if self._started:
            _forker().ask(end=self._started)
        self._started = []


# ------------------------------------------------------------------- the process that is forked


class _WhenReady(logging.Handler):
    """Tells the parent where the service listens, once it is ready."""

    def __init__(self, descriptor: int) -> None:
        super().__init__(logging.INFO)
        self._descriptor = descriptor

    def emit(self, record: logging.LogRecord) -> None:
        """Take a line of the log."""
        if record.getMessage() == "ready":
            fields: dict[str, Any] = record.__dict__.get("fields", {})
            os.write(self._descriptor, str(fields["endpoint"]).encode() + b"\n")


def _become_service(arguments: list[str], log: str | None, descriptor: int) -> NoReturn:
    """Run the program in this fork, and end it as a program ends."""
    from tsqp.cli import gpu_service

    status = 1
    try:
        end_with(os.getppid())
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        where = os.open(log or os.devnull, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        nowhere = os.open(os.devnull, os.O_RDWR)
        for place, source in ((0, nowhere), (1, nowhere), (2, where)):
            os.dup2(source, place)
        logging.getLogger("gpu_service").addHandler(_WhenReady(descriptor))
        sys.argv = ["gpu-service", *arguments]
        gpu_service.main()
    except SystemExit as ended:
        status = ended.code if isinstance(ended.code, int) else 1
    finally:
        # Whatever was raised: the parent's own cleaning up is none of ours.
        os._exit(status)


def _read_line(descriptor: int) -> str | None:
    """Read a line that a service writes; None if it ends, or takes too long."""
    data = b""
    until = time.monotonic() + START_S
    while not data.endswith(b"\n"):
        if not select.select([descriptor], [], [], max(0.0, until - time.monotonic()))[0]:
            return None
        part = os.read(descriptor, 1024)
        if not part:
            return None
        data += part
    return data.decode().strip()


def _say(**answer: object) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()  # or a fork would send it again


def _end(children: set[int]) -> None:
    for pid in children:
        os.kill(pid, signal.SIGKILL)
    for pid in children:
        os.waitpid(pid, 0)


def main() -> None:
    """Import everything, and fork a service for each line of stdin."""
    # In the children nothing of this is done again.
    import_module("gpu_side.service")
    import_module("tsqp.cli.gpu_service")
    check_kernels(CPU)
    # The numbers of those that nobody has waited for yet, which are nobody else's until then.
    children: set[int] = set()
    for line in sys.stdin:
        children -= {pid for pid in children if os.waitpid(pid, os.WNOHANG)[0]}
        request = json.loads(line)
        if "end" in request:
            _end(children & set(request["end"]))
            children -= set(request["end"])
            _say(ended=request["end"])
            continue
        readable, writable = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(readable)
            _become_service(request["arguments"], request["log"], writable)
        os.close(writable)
        endpoint = _read_line(readable)
        os.close(readable)
        children.add(pid)
        _say(pid=pid, endpoint=endpoint)
    _end(children)


if __name__ == "__main__":
    main()
