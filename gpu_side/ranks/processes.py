"""The ranks of a host: which one this process is, what each is told, which the head starts.

The processes that the head starts end when it ends.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from pydantic import BaseModel, ConfigDict

from gpu_side.devices import NullDevice, parse_device
from gpu_side.served_model import ServedModel
from gpu_side.weights import Progress, ServiceWeights, load_weights
from protocol.errors import SettingsError
from protocol.messages import Arithmetic, Columns
from protocol.native import usable_cores
from protocol.tensors import torch_dtype

OPTION = "--tensor-parallel"


@dataclass(frozen=True)
class RankPlace:
    """One of `ranks` processes of a host, each with the GPU of its number. Rank 0 is the head.

    Of one process alone it is the place of a service that has no other ranks.
    """

    rank: int
    ranks: int

    @property
    def threads(self) -> int | None:
        """The process's share of the cores that it may use; None: it has them to itself."""
        return None if self.ranks == 1 else max(1, usable_cores() // self.ranks)

    def device(self, name: str) -> str:
        """Return which device `--device` means here. Raises SettingsError."""
        SettingsError.unless(
            self.ranks == 1 or name in ("cpu", "cuda"),
            OPTION,
            f"--device {name}",
            "cpu or cuda: each rank takes the GPU of its number, and all of them compute",
        )
        return name if self.ranks == 1 or name == "cpu" else f"{name}:{self.rank}"


def by_torchrun() -> bool:
    """Say whether torchrun, or what sets the same variables, has started this process."""
    return "RANK" in os.environ and "MASTER_ADDR" in os.environ


def place_of(ranks: int) -> RankPlace:
    """Return the place of this process: the head's, or the one that torchrun gives it.

    Raises SettingsError where that has started another number of processes, or says no numbers; and
    where some are on another host: rows and results would cross a network in the clear.
    """
    if not by_torchrun():
        return RankPlace(0, ranks)
    names = ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
    rank, world, here = (os.environ.get(name, "") for name in names)
    SettingsError.unless(
        rank.isdecimal() and (world, here) == (str(ranks), str(ranks)),
        OPTION,
        f"torchrun with {world[:20] or 'no'} processes, {here[:20] or 'none'} of them here",
        f"{ranks}, all on this host (--layers spreads a model over several)",
    )
    return RankPlace(int(rank), ranks)


class RankJob(BaseModel):
    """The head's settings that count for all ranks.

    `store`: the file in which the ranks find each other, where the head starts the others; None:
    torchrun has, and its environment says how. `device`: as the option says.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    place: RankPlace
    store: Path | None
    model: Path
    device: str
    dtype: str
    arithmetic: tuple[Arithmetic, ...]
    kernels: str | None
    threads: int | None
    spin_us: float
    layers: tuple[int, int] | None
    max_message_bytes: int

    @property
    def torch_device(self) -> torch.device:
        """The device of this rank. Raises SettingsError where there is none."""
        device = parse_device(self.place.device(self.device))
        if isinstance(device, NullDevice):
            raise TypeError("a null device that computes")
        return device

    @property
    def columns(self) -> Columns:
        """The part of the weights that the rank holds."""
        return self.place.rank, self.place.ranks

    def load(self, device: torch.device, progress: Progress | None = None) -> ServiceWeights:
        """Read this rank's part of the weights, see `load_weights`."""
        return load_weights(
            self.model,
            device=device,
            dtype=torch_dtype(self.dtype),
            arithmetic=self.arithmetic,
            layers=self.layers,
            columns=self.columns,
            progress=progress,
        )

    def holds(self, held: ServedModel) -> bytes:
        """Say what a rank holds; all ranks must say the same."""
        named = (held.model_digest, held.linear_digest, self.dtype, *held.arithmetic, held.layers)
        return " ".join(map(str, named)).encode()


_END_S = 10.0

# A connection ends with its process, whose end is known a moment later.
_NOTICE_S = 1.0


class RankProcesses:
    """Processes of ranks 1 and up on this host.

    `store`: see `RankJob.store`.
    """

    def __init__(self, ranks: int) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="gpu-service-"))
        self.store = self._folder / "store"
        self._ranks = ranks
        # Each with the thread that waits for its end.
        self._started: list[tuple[subprocess.Popen[bytes], threading.Thread]] = []
        self._one_ended = threading.Event()

    def start(self, job: RankJob, ended: Callable[[int, int], None]) -> None:
        """Start them. In the main thread: Linux ends them with the thread that started them.

        `ended`: called from a thread with a rank that has ended and its exit status, minus the
        signal that ended it.
        """
        for rank in range(1, self._ranks):
            place = RankPlace(rank, self._ranks)
            its_job = job.model_copy(update={"place": place})
            command = [sys.executable, "-P", "-m", "gpu_side.ranks.worker", str(os.getpid())]
            threads = str(job.threads or place.threads)
            process = subprocess.Popen(  # noqa: S603 - a module of ours, and settings as JSON
                [*command, its_job.model_dump_json()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                env={**os.environ, "OMP_NUM_THREADS": threads},
            )

            def watch(rank: int = rank, process: subprocess.Popen[bytes] = process) -> None:
                ended(rank, process.wait())
                self._one_ended.set()

            watcher = threading.Thread(target=watch, name=f"rank-{rank}", daemon=True)
            watcher.start()
            self._started.append((process, watcher))

    def wait_for_an_end(self) -> None:
        """Wait until one of them has ended, and was told of; not long."""
        self._one_ended.wait(_NOTICE_S)

    def stop(self, *, at_once: bool) -> None:
        """Wait until they have ended; not long, and `at_once` not at all."""
        until = time.monotonic() + (0.0 if at_once else _END_S)
        for process, watcher in self._started:
            watcher.join(max(0.0, until - time.monotonic()))
            process.kill()  # nothing where it has ended
        for _, watcher in self._started:
            watcher.join()
        shutil.rmtree(self._folder, ignore_errors=True)


def how_it_ended(status: int) -> str:
    """Say how a process has ended, by its exit status."""
    if status >= 0:
        return f"a process that ended with {status}"
    try:
        return f"a process killed by {signal.Signals(-status).name}"
    except ValueError:
        return f"a process killed by signal {-status}"
