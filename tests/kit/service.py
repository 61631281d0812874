"""Our programs as real processes: forked from one that has everything imported, so in 0.2 s each.

`Forked`: a program; `running_service`, `Workers`: gpu-services; `running_server`: tee-runner serve;
`run`: one to its end, `call`: the same in this process; `FreshPython`: Python without any of it.
"""

import contextlib
import gc
import io
import json
import logging
import os
import re
import signal
import ssl
import subprocess
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from importlib import import_module
from importlib.metadata import distribution
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from signal import SIGTERM
from tempfile import TemporaryDirectory, TemporaryFile
from typing import Self
from unittest import mock
from urllib.request import Request, urlopen

from protocol import native
from tests.kit import kernels
from tests.kit.kernels import using_kernels
from tsqp.end_with_parent import end_with


class Closing(ABC):
    """Is closed at the end of its block."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @abstractmethod
    def close(self) -> None:
        """Stop, and free what is held."""


ENVIRONMENT = {
    **{k: v for k, v in os.environ.items() if not k.startswith(("TSQP_", "GPU_", "TEE_"))},
    "OMP_NUM_THREADS": "1",
}
_MODULES = {
    found.name: found.module
    for found in distribution("tsqp").entry_points.select(group="console_scripts")
}
_FIRST = ("tests.kit.before_forks",)
_LATE = (
    *("gpu_side.service", "tee_side.runner", "tsqp.cli.generate", "tsqp.run.process"),
    *("tsqp.cli.serve", "tsqp.run.server", "tee_side.serve.app", "tee_side.serve.identity"),
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
        # As such the new process gets copies of descriptors.
        outputs = [
            None if file is None else Connection(os.dup(file), readable=False)
            for file in (stdout, write if stderr is None else stderr)
        ]
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

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end. Raises subprocess.TimeoutExpired."""
        self._process.join(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired(str(self.pid), timeout or 0.0)
        return self.returncode

    def send_signal(self, number: int) -> None:
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
    *outputs: Connection | None,
) -> None:
    """Be the program, from its first line to its exit."""
    gc.freeze()  # what the server has imported is not looked through again
    end_with(os.getppid())
    os.environ.clear()
    os.environ.update(environment)
    nothing = os.open(os.devnull, os.O_WRONLY)
    for number, output in enumerate(outputs, 1):
        os.dup2(nothing if output is None else output.fileno(), number)
    for file in filter(None, outputs):
        file.close()
    os.close(nothing)
    sys.argv = [str(Path(sys.executable).with_name(program)), *arguments]
    exec(before, {})
    import_module(_MODULES[program]).main()


WAIT_S = 60
# Of heartbeats, where they are not the subject: a busy machine must not end a connection.
CALM_S = 60.0
CALM = ("--heartbeat-timeout-s", str(CALM_S))


@dataclass
class Service:
    """A running gpu-service. `arguments`: what it was started with; `log`: what it said so far."""

    process: Forked
    endpoint: str
    log: list[str] = field(default_factory=list)
    arguments: tuple[str, ...] = ()

    @property
    def pid(self) -> int:
        """Its number, which may be another process's once it has ended."""
        return self.process.pid

    @property
    def is_running(self) -> bool:
        """Whether the process is still there, stopped ones too."""
        return self.process.returncode is None

    def kill(self) -> None:
        """End it as kill -9 does, and wait until it is gone."""
        self.process.kill()

    def freeze(self) -> None:
        """Send SIGSTOP, and wait until it has come: no thread runs when this returns.

        On a busy machine that takes a while, in which the service may still answer a handshake.
        """
        self.process.send_signal(signal.SIGSTOP)
        until(lambda: _states(self.pid) == {"T"})

    def thaw(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def stop(self, sent: int = SIGTERM) -> int:
        """Send a signal, collect the rest of the log, and return the exit status."""
        if self.process.returncode is None:
            self.process.send_signal(sent)
        if not self.process.stderr.closed:
            self.log += self.process.communicate(timeout=30)[1].splitlines()
        return self.process.wait()


def _states(pid: int) -> set[str]:
    """Return the states of all threads of a process, as Linux's proc(5) has them."""
    stats = [task / "stat" for task in Path(f"/proc/{pid}/task").iterdir()]
    return {stat.read_text(errors="replace").rpartition(")")[2].split()[0] for stat in stats}


@contextmanager
def running_service(
    model: Path | str, endpoint: str, *arguments: str, dtype: str = "float32", before: str = ""
) -> Iterator[Service]:
    """Start a real gpu-service process and wait for its ready line; stop it by its process id.

    `endpoint` may end in `:*` or `:0` to take a free port; `Service.endpoint` says which. Its
    heartbeats are calm, unless `arguments` say otherwise. `before`: see `Forked`.
    """
    options = (str(model), "--bind", endpoint, "--dtype", dtype, *CALM, *arguments)
    process = Forked("gpu-service", options, ENVIRONMENT, before=before)
    service = Service(process, endpoint, arguments=options)
    try:
        ready = _read_until(process, service.log, " ready ")
        service.endpoint = ready.split("endpoint=", 1)[1].split()[0]
        yield service
    finally:
        service.stop()


def _read_until(process: Forked, log: list[str], text: str) -> str:
    """Read what it says until a line has a text. Raises RuntimeError where it ends before."""
    deadline = time.monotonic() + WAIT_S
    while not log or text not in f" {log[-1]} ":
        line = process.stderr.readline()
        if not line or time.monotonic() > deadline:
            raise RuntimeError(f"got no {text!r}, expected it:\n" + "\n".join(log))
        log.append(line.rstrip("\n"))
    return log[-1]


TEE_ONLY = ("--policy", "tee-only", "--dtype", "float32")


@dataclass
class Server:
    """A running server. `address`: without a path; `log`: what it had said when it was ready."""

    process: Forked
    address: str = ""
    log: list[str] = field(default_factory=list)

    @property
    def base_url(self) -> str:
        return f"{self.address}/v1"

    def get(self, path: str, *, key: str = "", tls: ssl.SSLContext | None = None) -> str:
        """Return the body of a path. Raises urllib.error.HTTPError."""
        headers = {"authorization": f"Bearer {key}"} if key else {}
        request = Request(f"{self.address}{path}", headers=headers)
        with urlopen(request, timeout=WAIT_S, context=tls) as reply:
            body: bytes = reply.read()
        return body.decode()

    def metric(self, name: str, label: str = "", *, key: str = "") -> float:
        """Return one number of /metrics, by its name and a part of its labels."""
        (line,) = (
            line
            for line in self.get("/metrics", key=key).splitlines()
            if line.startswith(f"{name}{{") and label in line
        )
        return float(line.rpartition(" ")[2])

    def stop(self, sent: int = SIGTERM) -> int:
        """Send a signal to this process alone, and return its exit status."""
        self.process.send_signal(sent)
        return self.process.wait(WAIT_S)


@contextmanager
def running_server(
    *arguments: str, model: str = "demo", before: str = "", **environment: str
) -> Iterator[Server]:
    """Start a server on a free port, wait until it is ready, and end it. `before`: see `Forked`."""
    given = ("serve", model, "--port", "0", "--threads", "1", *arguments)
    server = Server(Forked("tee-runner", given, {**ENVIRONMENT, **environment}, before=before))
    try:
        ready = _read_until(server.process, server.log, "  ready: ")
        server.address = ready.split("  ready: ")[1].removesuffix("/v1")
        yield server
    finally:
        try:
            server.stop()
        finally:
            server.process.kill()


class Workers(ExitStack):
    """Starts gpu-services from any thread; use as a context manager, which ends them all."""

    def start(self, *arguments: str, log: Path | None = None) -> Service:
        """Start `gpu-service ARGUMENTS` and wait until it is ready.

        `log`: a file that its stderr is appended to. Raises RuntimeError if it ends instead.
        """
        process, endpoint = self._ready(
            "gpu-service", arguments, rb" ready .*\bendpoint=(\S+)", log
        )
        return Service(process, endpoint, arguments=arguments)

    def serve(self, *arguments: str, log: Path | None = None) -> Server:
        return Server(*self._ready("tee-runner", ("serve", *arguments), rb" ready: (\S+)/v1", log))

    def _ready(
        self, program: str, arguments: Sequence[str], ready: bytes, log: Path | None
    ) -> tuple[Forked, str]:
        with log.open("ab+") if log else TemporaryFile("ab+") as file:
            begins = file.seek(0, os.SEEK_END)
            process = Forked(program, arguments, ENVIRONMENT, stderr=file.fileno())
            self.callback(process.kill)
            until_s, ended = time.monotonic() + WAIT_S, False
            while time.monotonic() < until_s and not ended:
                ended = process.returncode is not None
                said = os.pread(file.fileno(), 2**20, begins)
                if found := re.search(ready + rb".*\n", said):
                    return process, found[1].decode()
                time.sleep(0.005)
        raise RuntimeError(f"{program} {' '.join(arguments)}: got {said!r}, expected it ready")

    def restart(self, worker: Service) -> Service:
        """Start one with the arguments and at the endpoint of another, which has ended."""
        arguments = list(worker.arguments)
        arguments[arguments.index("--bind") + 1] = worker.endpoint
        return self.start(*arguments)


def until(holds: Callable[[], object]) -> None:
    """Ask again until something holds. Raises TimeoutError."""
    deadline = time.monotonic() + WAIT_S
    while not holds():
        if time.monotonic() > deadline:
            raise TimeoutError(f"got nothing in {WAIT_S} s, expected what the test waits for")


# What follows the loop is run by the process that was forked: to its end, as `python -c` would.
_FRESH_SERVER = """
import json, os, sys, warnings
import torch
for line in sys.stdin:
    code, arguments, files, folder, paths, strict = json.loads(line)
    child = os.fork()
    if child == 0:
        break
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
else:
    sys.exit()
for number, path in enumerate(files):
    os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT if number else os.O_RDONLY), number)
os.chdir(folder)
sys.path[:] = [*paths, *(path for path in sys.path if path)]
sys.argv[:] = ["-c", *arguments]
if strict:
    warnings.simplefilter("error")
exec(compile(code, "<string>", "exec"), {"__name__": "__main__"})
"""


class FreshPython(Closing):
    """The process that is forked; it starts with the first program, and ends with the block."""

    def __init__(self) -> None:
        self._server: subprocess.Popen[str] | None = None

    def close(self) -> None:
        if self._server is not None:
            self._server.communicate(timeout=30)

    def run(
        self,
        code: str,
        *arguments: str,
        folder: Path,
        paths: Sequence[Path] = (),
        strict: bool = False,
    ) -> subprocess.CompletedProcess[str]:
        """Run Python in a folder, to its end.

        `paths`: where modules are looked for first; `strict`: warnings are errors.
        """
        if self._server is None:
            command, pipe = [sys.executable, "-c", _FRESH_SERVER], subprocess.PIPE
            self._server = subprocess.Popen(
                command, env=ENVIRONMENT, stdin=pipe, stdout=pipe, text=True
            )
        server = self._server
        assert server.stdin is not None
        assert server.stdout is not None
        with TemporaryDirectory() as outputs:
            said = [Path(outputs) / name for name in ("stdout", "stderr")]
            where = [os.devnull, *map(str, said)], str(folder), [*map(str, paths)]
            print(json.dumps([code, arguments, *where, strict]), file=server.stdin, flush=True)
            status = int(server.stdout.readline())
            return subprocess.CompletedProcess(arguments, status, *(s.read_text() for s in said))


def call(program: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run `gpu-service`, `tee-runner` or `tsqp` to its exit and return what it printed."""
    from tsqp.cli import gpu_service, main, tee_runner

    entry = {"gpu-service": gpu_service.main, "tee-runner": tee_runner.main, "tsqp": main.main}
    stdout, stderr = io.StringIO(), io.StringIO()
    handlers = logging.getLogger().handlers[:]
    try:
        with (
            mock.patch.object(sys, "argv", [program, *arguments]),
            mock.patch.dict(os.environ, environment),
            # This process is the tests', too.
            mock.patch("tsqp.run.process.keep_memory_private"),
            mock.patch("protocol.integer.check_kernels", kernels.check_kernels),
            using_kernels(native.choice().variant),
            contextlib.redirect_stdout(stdout),
            contextlib.redirect_stderr(stderr),
        ):
            entry[program]()
    except SystemExit as ended:
        status = ended.code if isinstance(ended.code, int) else 0
    finally:
        logging.getLogger().handlers[:] = handlers
    return subprocess.CompletedProcess(
        [program, *arguments], status, stdout.getvalue(), stderr.getvalue()
    )


def run(
    program: str, *arguments: str, timeout_s: float = 90, **environment: str
) -> subprocess.CompletedProcess[str]:
    with TemporaryFile("w+b") as output, TemporaryFile("w+b") as errors:
        files = {"stdout": output.fileno(), "stderr": errors.fileno()}
        process = Forked(program, arguments, {**ENVIRONMENT, **environment}, **files)
        try:
            process.wait(timeout_s)
        finally:
            process.kill()
        said = [os.pread(file.fileno(), 2**26, 0).decode() for file in (output, errors)]
        return subprocess.CompletedProcess(arguments, process.wait(), *said)
