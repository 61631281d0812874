"""The ranks that the head starts itself, as processes that end when it ends."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path

from gpu_side.ranks.job import RankJob
from gpu_side.ranks.place import Place

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
        self._started: dict[int, subprocess.Popen[bytes]] = {}
        self._watchers: list[threading.Thread] = []
        self._one_ended = threading.Event()

    def start(self, job: RankJob, ended: Callable[[int, int], None]) -> None:
        """Start them. In the main thread: Linux ends them with the thread that started them.

        `ended`: called from a thread with a rank that has ended and its exit status, minus the
        signal that ended it.
        """
        for rank in range(1, self._ranks):
            place = Place(rank, self._ranks)
            its_job = job.model_copy(update={"place": place})
            command = [sys.executable, "-P", "-m", "gpu_side.ranks.worker", str(os.getpid())]
            threads = str(job.threads or place.threads)
            process = subprocess.Popen(  # noqa: S603 - a module of ours, and settings as JSON
                [*command, its_job.model_dump_json()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                env={**os.environ, "OMP_NUM_THREADS": threads},
            )
            self._started[rank] = process

            def watch(rank: int = rank, process: subprocess.Popen[bytes] = process) -> None:
                ended(rank, process.wait())
                self._one_ended.set()

            self._watchers.append(threading.Thread(target=watch, name=f"rank-{rank}", daemon=True))
            self._watchers[-1].start()

    def wait_for_an_end(self) -> None:
        """Wait until one of them has ended, and was told of; not long."""
        self._one_ended.wait(_NOTICE_S)

    def stop(self, *, at_once: bool) -> None:
        """Wait until they have ended; not long, and `at_once` not at all."""
        for process in self._started.values():
            if at_once:
                process.kill()
        for process in self._started.values():
            try:
                process.wait(_END_S)
            except subprocess.TimeoutExpired:
                process.kill()
        for watcher in self._watchers:
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
