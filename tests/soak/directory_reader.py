"""Reads model directories as either side does, each in a fresh child process, and measures it.

`python -m tests.soak.directory_reader` takes a line of JSON for each reading on stdin and answers
with one. It imports everything once and forks for each reading: a child begins with nothing but
what was imported, and its peak of resident memory above that is what reading took.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from tests.kit.service import Closing

# A reading that takes so long hangs; it is killed.
HANGS_AFTER_S = 20
# Beyond it an allocation fails, so that a mistake does not take the machine down.
_ADDRESS_SPACE = 4 * 2**30


@dataclass(frozen=True)
class Reading:
    """How a reading ended. `error`: the type that was raised, "" if the directory was accepted."""

    error: str
    where: str
    text: str
    seconds: float
    peak_mib: float


class Readers(Closing):
    """The readers, in a process of their own; use as a context manager."""

    def __init__(self) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.soak.directory_reader"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )

    def close(self) -> None:
        """End the process."""
        self._process.communicate()  # closes its stdin, which ends it

    def read(self, reader: str, directory: Path) -> Reading:
        """Read a directory as `tee` or `service` does."""
        stdin, stdout = self._process.stdin, self._process.stdout
        if stdin is None or stdout is None:
            raise RuntimeError("no pipes")
        stdin.write(json.dumps([reader, str(directory)]) + "\n")
        stdin.flush()
        return Reading(**json.loads(stdout.readline()))


def _readers() -> dict[str, Callable[[Path], object]]:
    import torch

    from gpu_side.weights import load_weights
    from protocol.messages import FUSED_MODULES
    from protocol.model.checkpoint import Checkpoint, light_tensors, linear_tensors
    from protocol.model.config import read_config
    from tee_side.engine.tokenizer import Tokenizer
    from tee_side.model.layers import load_tee_model
    from tee_side.model.local_operators import load_local_operators, sites_here
    from tee_side.policy.placement import load_policy
    from tee_side.remote.registered import RunParts

    torch.set_num_threads(1)
    policy, dtype = load_policy("tee-only"), torch.float32

    def tee(directory: Path) -> None:
        """As a runner that keeps everything."""
        config, checkpoint = read_config(directory), Checkpoint(directory)
        checkpoint.require(light_tensors(config) | linear_tensors(config, FUSED_MODULES))
        checkpoint.refuse_extra(config)
        load_tee_model(config, checkpoint, dtype)
        sites = sites_here(policy, config.num_hidden_layers)
        parts = RunParts(policy, config, checkpoint, dtype)
        load_local_operators(parts, sites=sites, integers=None, held={})
        Tokenizer(directory)

    def service(directory: Path) -> None:
        load_weights(directory, device=torch.device("cpu"), dtype=dtype)

    return {"tee": tee, "service": service}


def _memory_kib(name: str) -> int:
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1])
    raise LookupError(name)


def _measure(read: Callable[[Path], object], directory: Path) -> Reading:
    from protocol.errors import TsqpError

    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # the peak begins anew
    before, began = _memory_kib("VmRSS"), time.perf_counter()
    error, where, text = "", "", ""
    try:
        read(directory)
    except TsqpError as refusal:
        error, where, text = type(refusal).__name__, refusal.where, str(refusal)
    except BaseException as wrong:  # noqa: BLE001 - a panic of a library is none of Exception
        error, text = f"untyped {type(wrong).__name__}", str(wrong)[:300]
    seconds = time.perf_counter() - began
    return Reading(error, where, text, seconds, max(0, _memory_kib("VmHWM") - before) / 1024)


def _in_child(read: Callable[[Path], object], directory: Path) -> Reading:
    """Fork, read there, and return what the child says; or that it was killed."""
    out, into = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(out)
            signal.alarm(HANGS_AFTER_S)
            space = _memory_kib("VmSize") * 1024 + _ADDRESS_SPACE
            resource.setrlimit(resource.RLIMIT_AS, (space, space))
            with os.fdopen(into, "w") as pipe:
                pipe.write(json.dumps(asdict(_measure(read, directory))))
        finally:
            os._exit(0)
    os.close(into)
    with os.fdopen(out) as pipe:
        answer = pipe.read()
    _, status = os.waitpid(child, 0)
    if answer:
        return Reading(**json.loads(answer))
    ended = os.waitstatus_to_exitcode(status)
    return Reading(f"ended with {ended}", "", "", float(HANGS_AFTER_S), 0.0)


def main() -> None:
    """Answer until stdin ends."""
    readers = _readers()
    for line in sys.stdin:
        reader, directory = json.loads(line)
        sys.stdout.write(json.dumps(asdict(_in_child(readers[reader], Path(directory)))) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
