"""Real processes of the installed programs that need not import torch again.

A server that has imported what the programs import, and tried what they try of this processor,
forks one for each run: either takes longer than most tests do. Tests of importing, starting and
installing start a Python of their own.
"""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib import import_module
from importlib.metadata import distribution
from multiprocessing import get_context
from multiprocessing.reduction import DupFd
from pathlib import Path
from typing import Any

from tsqp.end_with_parent import end_with

ENVIRONMENT = {
    **{k: v for k, v in os.environ.items() if not k.startswith(("TSQP_", "GPU_", "TEE_"))},
    "OMP_NUM_THREADS": "1",
}
_MODULES = {
    found.name: found.module
    for found in distribution("tsqp").entry_points.select(group="console_scripts")
}
_FIRST = ("tests.tools.before_forks",)
_LATE = (
    *("gpu_side.service", "tee_side.runner", "tsqp.cli.generate", "tsqp.cli.logs"),
    *("tsqp.cli.serve", "tsqp.server", "tee_side.serve.app", "tee_side.serve.sealing"),
)
_LOCK = threading.Lock()
_SERVER = get_context("forkserver")
_SERVER.set_forkserver_preload([*_FIRST, *_MODULES.values(), *_LATE])


class Forked:
    """A running program: what tests need of `subprocess.Popen`, its error output as text.

    `stdout`, `stderr`: descriptors that it writes to. Without them, its output is dropped, and what
    it writes to the other is read from the attribute `stderr`.
    `before`: Python that it runs first, to put a fault into it.
    """

    def __init__(
        self,
        program: str,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        *,
        stdout: int | None = None,
        stderr: int | None = None,
        before: str = "",
    ) -> None:
        read, write = os.pipe()
        self.stderr = os.fdopen(read, encoding="utf-8", errors="replace")
        outputs = (stdout and _Passed(stdout), _Passed(write if stderr is None else stderr))
        given = (program, list(arguments), dict(environment), before, *outputs)
        self._process = _SERVER.Process(target=_run, args=given)
        with _LOCK, _only(ENVIRONMENT):  # the server reads numbers of threads when it starts
            self._process.start()
        os.close(write)
        self.pid: int = self._process.pid or 0

    @property
    def returncode(self) -> int | None:
        """Its exit status, minus the signal that ended it, or None while it runs."""
        return self._process.exitcode

    def poll(self) -> int | None:
        """Return `returncode`."""
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end. Raises subprocess.TimeoutExpired."""
        self._process.join(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired(str(self.pid), timeout or 0.0)
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send a signal, if it still runs."""
        # The server may have reaped it, and not said so yet.
        with suppress(ProcessLookupError):
            if self.returncode is None:
                os.kill(self.pid, number)

    def communicate(self, timeout: float | None = None) -> tuple[None, str]:
        """Wait for its end, and return the rest of its `stderr`, which must fit into a pipe."""
        self.wait(timeout)
        with self.stderr:
            return None, self.stderr.read()

    def kill(self) -> None:
        """End it at once if it still runs, and close `stderr`."""
        self.send_signal(signal.SIGKILL)
        self._process.join()
        self.stderr.close()


class _Passed:
    """A descriptor that the new process gets a copy of; there, `_Passed` is its number."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def __reduce__(self) -> tuple[Callable[[Any], int], tuple[Any]]:
        return _received, (DupFd(self._descriptor),)


def _received(copy: Any) -> int:
    return int(copy.detach())


@contextmanager
def _only(environment: Mapping[str, str]) -> Iterator[None]:
    own = dict(os.environ)
    os.environ.clear()
    os.environ.update(environment)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(own)


def _run(
    program: str,
    arguments: list[str],
    environment: dict[str, str],
    before: str,
    stdout: int | None,
    stderr: int,
) -> None:
    """Be the program, from its first line to its exit."""
    gc.freeze()  # what the server has imported is not looked through again
    end_with(os.getppid())
    os.environ.clear()
    os.environ.update(environment)
    for descriptor, number in ((stdout or os.open(os.devnull, os.O_WRONLY), 1), (stderr, 2)):
        os.dup2(descriptor, number)
        os.close(descriptor)
    sys.argv = [str(Path(sys.executable).with_name(program)), *arguments]
    exec(before, {})
    import_module(_MODULES[program]).main()
