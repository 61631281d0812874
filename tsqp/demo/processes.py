"""Starts our programs for the demo, and ends them whatever happens."""

from __future__ import annotations

import codecs
import json
import os
import queue
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from protocol.errors import TsqpError
from tee_side.masks.mask import FeatureMask
from tee_side.policy import Policy
from tee_side.provisioning import provision
from tsqp.cli.program import model_directory

DTYPE = "float32"
# The model is tiny, and two processes share the cores: threads cost more than they bring.
COMPUTING = ("--dtype", DTYPE, "--threads", "1")
START_TIMEOUT_S = 60.0
END_TIMEOUT_S = 10.0


class DemoError(TsqpError):
    """One of the demo's processes ended before its work was done."""


@dataclass(frozen=True)
class Reach:
    """Where a policy's services are, and the key that they need, if any."""

    endpoints: tuple[str, ...]
    key: Path | None = None

    def options(self, first: str | None = None) -> list[str]:
        """Return options for tee-runner; `first` stands in for the first endpoint."""
        endpoints = (first or self.endpoints[0], *self.endpoints[1:])
        key = ["--key", str(self.key)] if self.key else []
        return [word for endpoint in endpoints for word in ("--gpu", endpoint)] + key


# Nothing listens there; a policy that needs no service is not to connect to it either.
NOWHERE = Reach(("tcp://127.0.0.1:9",))


class Services:
    """The gpu-service processes of a demo, each started when a policy first needs it.

    Policies without a feature mask share theirs. `folder`: for weights and keys of the others.
    `say` is told about every start. Use as a context manager.
    """

    def __init__(self, folder: Path, say: Callable[[str], None]) -> None:
        self._folder = folder
        self._say = say
        self._plain: list[str] = []
        self._provisioned: dict[FeatureMask, Reach] = {}
        self._running = ExitStack()

    def __enter__(self) -> Services:
        return self

    def __exit__(self, *_: object) -> None:
        self._running.close()

    def reach(self, policy: Policy) -> Reach:
        """Start what a policy needs and is not there yet. Raises DemoError."""
        if not policy.needs_service:
            return NOWHERE
        if (mask := policy.feature_mask) is not None:
            return self._with_key(mask)
        while len(self._plain) < policy.services:
            self._plain.append(self._start("demo"))
        return Reach(tuple(self._plain[: policy.services]))

    def _with_key(self, mask: FeatureMask) -> Reach:
        if mask not in self._provisioned:
            number = len(self._provisioned)
            directory, key = self._folder / f"server-{number}", self._folder / f"key-{number}"
            provision(model_directory("demo"), mask, directory, key)
            self._say(f"weights provisioned under {mask.name}, for a gpu-service of their own")
            self._provisioned[mask] = Reach((self._start(str(directory)),), key)
        return self._provisioned[mask]

    def _start(self, model: str) -> str:
        command = [program("gpu-service"), model, "--bind", "tcp://127.0.0.1:*", *COMPUTING]
        process, log = self._running.enter_context(child(command, stdout=subprocess.DEVNULL))
        line = log.ready_line(START_TIMEOUT_S)
        if line is None:
            raise DemoError(
                "gpu-service",
                got=log.last,
                expected=f"a line that says ready within {START_TIMEOUT_S:g} s",
            )
        endpoint = line.split("endpoint=", 1)[1].split()[0]
        self._say(f"gpu-service: process {process.pid}, ready at {endpoint}")
        return endpoint


def generate(
    arguments: list[str], folder: Path, show: Callable[[str], None]
) -> tuple[dict[str, Any], Path]:
    """Run `tee-runner generate demo`; return its report, and the file with its logits.

    `folder`: a new directory for both. `show` gets the text as it comes. Raises DemoError.
    """
    folder.mkdir()
    report, logits = folder / "report.json", folder / "logits.safetensors"
    command = [program("tee-runner"), "generate", "demo", *COMPUTING]
    command += ["--report", str(report), "--save-logits", str(logits), *arguments]
    with child(command, stdout=subprocess.PIPE) as (process, errors):
        for piece in _pieces(process):
            show(piece)
        status = process.wait(START_TIMEOUT_S)
        errors.join()
    if status != 0:
        raise DemoError("tee-runner", got=errors.last, expected="exit status 0")
    return json.loads(report.read_text(encoding="utf-8")), logits


@contextmanager
def child(
    command: list[str], *, stdout: int
) -> Iterator[tuple[subprocess.Popen[bytes], StderrReader]]:
    """Start one of our programs, and end it when the block ends in whatever way."""
    process = subprocess.Popen(
        command, stdout=stdout, stderr=subprocess.PIPE, env=_child_environment()
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
        reader.join()
        if process.stdout is not None:
            process.stdout.close()


def _child_environment() -> dict[str, str]:
    """Return our environment without settings of the two programs: the demo has its own.

    With a temperature, for example, the tokens would rightly differ from transformers'.
    """
    return {
        **{
            k: v for k, v in os.environ.items() if not k.startswith(("TEE_RUNNER_", "GPU_SERVICE_"))
        },
        "PYTHONUNBUFFERED": "1",
    }


class StderrReader:
    """Reads a child's stderr to its end in a thread of its own: a full pipe would block it.

    `last`: the last line that was not empty.
    """

    def __init__(self, stream: IO[bytes] | None) -> None:
        self.last = "no output"
        self._stream = stream
        self._ready: queue.Queue[str | None] = queue.Queue()
        self._thread = threading.Thread(target=self._read, name="stderr", daemon=True)
        self._thread.start()

    def ready_line(self, timeout_s: float) -> str | None:
        """Return the line that says ready; None if the stream ends or time runs out before it."""
        try:
            return self._ready.get(timeout=timeout_s)
        except queue.Empty:
            return None

    def join(self) -> None:
        """Wait for the end of the stream, which comes when the child ends."""
        self._thread.join(END_TIMEOUT_S)

    def _read(self) -> None:
        with self._stream or open(os.devnull, "rb") as stream:
            for line in stream:
                text = line.decode(errors="replace").strip()
                self.last = text or self.last
                if " ready " in text:
                    self._ready.put(text)
        self._ready.put(None)


def _pieces(process: subprocess.Popen[bytes]) -> Iterator[str]:
    """Yield decoded output as it comes, keeping a character together that is split over reads."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    if process.stdout is None:
        return
    while chunk := os.read(process.stdout.fileno(), 4096):
        yield decoder.decode(chunk)


def program(name: str) -> str:
    """Return the path of one of our own programs, beside this interpreter or on PATH."""
    beside = Path(sys.executable).parent / name
    found = str(beside) if beside.exists() else shutil.which(name)
    if found is None:
        raise DemoError(name, got="no such program", expected="it beside python or on PATH")
    return found
