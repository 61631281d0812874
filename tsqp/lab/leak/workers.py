"""Attacks policies side by side: a pool of processes, a core each.

Each process has an `AttackRunner` of its own. An attack that raises ends its own task. A process
that is killed ends the run, since its task is lost. What an attack prints goes to stderr.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from multiprocessing.synchronize import Lock
from pathlib import Path

import torch

from protocol.errors import TsqpError
from tee_side.plugins import load_module, loaded_files
from tsqp.end_with_parent import end_with
from tsqp.lab.leak.attack_runner import AttackRunner, Lost, Outcome, tasks_of
from tsqp.lab.leak.model import Curve, PolicyLeak
from tsqp.lab.leak.settings import LeakProgress, LeakSettings
from tsqp.processes import END_TIMEOUT_S, ProcessError, failure


@dataclass(frozen=True)
class _Told:
    """A `Lost` as a worker passes it on: not every exception can be pickled."""

    task: str
    where: str
    got: str
    expected: str
    traceback: str


# Of a worker: its attack runner, once `_begin` has made it.
_runner: list[AttackRunner] = []


def side_by_side(settings: LeakSettings, folder: Path, watch: LeakProgress) -> Iterator[Outcome]:
    """Have every task done by `settings.workers` processes; yields in the order of completion.

    `folder`: an empty one, for what the workers make. Raises ProcessError for a worker that ended
    early; all workers end with it, as they do with whatever else ends this.
    """
    context = multiprocessing.get_context("spawn")
    reader, writer = context.Pipe(duplex=False)
    listener = threading.Thread(target=_listen, args=(reader, watch), daemon=True)
    listener.start()
    tasks = range(len(tasks_of(settings)))
    job = pickle.dumps(replace(settings, cost="none"))
    begin = (os.getpid(), loaded_files(), job, folder, writer, context.Lock())
    others, workers = {*multiprocessing.active_children()}, set[BaseProcess]()
    try:
        count = min(settings.workers, len(tasks))
        with ProcessPoolExecutor(count, context, _begin, begin) as pool:
            try:
                futures = [pool.submit(_attack, number) for number in tasks]
                workers = {*multiprocessing.active_children()} - others
                writer.close()  # so that the listener ends with the last worker
                for future in as_completed(futures):
                    yield _outcome(future.result())
            except BaseException:
                for process in {*multiprocessing.active_children()} - others:
                    process.kill()
                raise
    except BrokenProcessPool:
        raise _ended_early([process.exitcode for process in workers]) from None
    finally:
        writer.close()
        listener.join(END_TIMEOUT_S)


def _listen(reader: Connection, watch: LeakProgress) -> None:
    """Pass on what workers tell of their progress, until all have ended, or one amid a message."""
    with reader, suppress(EOFError, OSError):
        while True:
            what, value = reader.recv()
            getattr(watch, what)(value)


def _outcome(found: tuple[PolicyLeak, ...] | Curve | _Told) -> Outcome:
    if not isinstance(found, _Told):
        return found
    error = ProcessError(found.where, got=found.got, expected=found.expected)
    return Lost(found.task, error, found.traceback)


def _ended_early(statuses: Sequence[int | None]) -> ProcessError:
    """Return the error of the worker that ended first: the pool has ended the others."""
    first = [status for status in statuses if status not in (None, 0, -signal.SIGTERM)]
    status = min(first, key=lambda one: one == -signal.SIGKILL, default=None)
    return failure("a worker", status, f"exit status {status}", expected="a run to its end")


# ----------------------------------------------------------------------------- in a worker


def _begin(
    parent: int, files: list[Path], job: bytes, folder: Path, writer: Connection, lock: Lock
) -> None:
    """Make the worker's attack runner. `files`: what classes in `job` were loaded from."""
    end_with(parent)
    # An interrupt from the keyboard is for the parent process, which ends us.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # The parent's stdout is for its tables.
    os.dup2(2, 1)
    sys.stdout = sys.stderr
    for path in files:
        load_module(path)
    settings: LeakSettings = pickle.loads(job)  # noqa: S301 - of our own parent
    torch.set_num_threads(settings.threads)
    own = folder / f"worker-{os.getpid()}"
    own.mkdir()

    def tell(what: str, value: str | int) -> None:
        with lock:
            writer.send((what, value))

    watch = LeakProgress(doing=partial(tell, "doing"), step=partial(tell, "step"))
    _runner.append(AttackRunner(settings, own, watch))


def _attack(number: int) -> tuple[PolicyLeak, ...] | Curve | _Told:
    (runner,) = _runner
    found = runner.do(tasks_of(runner.settings)[number])
    if not isinstance(found, Lost):
        return found
    error = found.error
    if isinstance(error, TsqpError):
        return _Told(found.task, error.where, error.got, error.expected, found.traceback)
    last, expected = found.traceback.splitlines()[-1], "no error (its traceback is above)"
    return _Told(found.task, "a worker", last, expected, found.traceback)
