"""Attacks policies side by side, in processes of their own: a core each.

    python -m tsqp.leak.workers < JOB

Each worker reads the whole `Job` from stdin, takes the next task that nobody has, and prints
`Answer`s, one a line.
"""

from __future__ import annotations

import os

# Read once, when torch is imported; see tsqp/cli/program.py.
os.environ.setdefault("GOMP_SPINCOUNT", "0")

import queue
import signal
import sys
import threading
import traceback
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import torch
from pydantic import BaseModel, ConfigDict, TypeAdapter

from protocol.errors import TsqpError
from protocol.messages import FloatDtype
from tee_side.policy import load_policy
from tsqp.bench.job import Failed
from tsqp.leak.curves import noisy_mask
from tsqp.leak.model import Curve, PolicyLeak
from tsqp.leak.registry import find_attacks
from tsqp.leak.settings import LeakSettings, Watch
from tsqp.leak.station import Station
from tsqp.processes import ProcessError, failure, worker

_MODULE = "tsqp.leak.workers"


class _Line(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="strings")


class Doing(_Line):
    """What is going on."""

    doing: str


class Steps(_Line):
    """So many steps are done."""

    steps: int


class Attacked(_Line):
    """A policy is done; its cost is for who measured it."""

    leak: PolicyLeak


class Noised(_Line):
    """All strengths of a policy's noise are done."""

    curve: Curve


class Crashed(_Line):
    """What ended a worker is no error of ours: an attack's, maybe, whose author needs to see it."""

    traceback: str


Answer = Doing | Steps | Attacked | Noised | Failed | Crashed
_ANSWER: TypeAdapter[Answer] = TypeAdapter(Answer)


@dataclass(frozen=True)
class Task:
    """A policy as it is, or with strengths of its noise. `policy`: its index in the settings."""

    policy: int
    noisy: bool
    steps: int

    def done_at(self, station: Station, settings: LeakSettings) -> Attacked | Noised:
        """Do it."""
        _, policy = settings.policies[self.policy]
        if self.noisy:
            return Noised(curve=station.curve(policy))
        return Attacked(leak=station.attack(policy))


def tasks_of(settings: LeakSettings) -> list[Task]:
    """Return everything there is to do; first what takes longest, so that all end together."""
    policies = [policy for _, policy in settings.policies]
    curves = [
        Task(index, noisy=True, steps=len(settings.curves))
        for index, policy in enumerate(policies)
        if settings.curves and noisy_mask(policy)
    ]
    return curves + [
        Task(index, noisy=False, steps=1 + policy.services * len(settings.attacks))
        for index, policy in enumerate(policies)
    ]


class Job(_Line):
    """`LeakSettings`, as far as a worker needs them, by name. `folder`: that of all workers."""

    model: Path
    policies: tuple[str, ...]
    attacks: tuple[str, ...]
    prompts: tuple[tuple[int, ...], ...]
    new_tokens: int
    public: Path | None
    dtype: FloatDtype | None
    temperature: float
    seed: int
    search_sessions: int
    search_tokens: int
    search_candidates: int | None
    threads: int
    curves: tuple[float, ...]
    folder: Path

    @classmethod
    def of(cls, settings: LeakSettings, folder: Path) -> Job:
        """Return the job of some settings."""
        return cls(
            model=settings.model,
            policies=tuple(name for name, _ in settings.policies),
            attacks=settings.attack_names,
            prompts=settings.prompts,
            new_tokens=settings.new_tokens,
            public=settings.public,
            dtype=settings.dtype,
            temperature=settings.temperature,
            seed=settings.seed,
            search_sessions=settings.search_sessions,
            search_tokens=settings.search_tokens,
            search_candidates=settings.search_candidates,
            threads=settings.threads,
            curves=settings.curves,
            folder=folder,
        )

    def settings(self) -> LeakSettings:
        """Return the settings again, with policies and attacks loaded. Raises TsqpError."""
        attacks = dict.fromkeys(found for name in self.attacks for found in find_attacks(name))
        return LeakSettings(
            command="",
            model=self.model,
            policies=tuple((name, load_policy(name)) for name in self.policies),
            attacks=tuple(attacks),
            prompts=self.prompts,
            new_tokens=self.new_tokens,
            public=self.public,
            dtype=self.dtype,
            temperature=self.temperature,
            seed=self.seed,
            search_sessions=self.search_sessions,
            search_tokens=self.search_tokens,
            search_candidates=self.search_candidates,
            threads=self.threads,
            curves=self.curves,
        )


# ------------------------------------------------------------------------- who has the work done


def side_by_side(settings: LeakSettings, folder: Path, watch: Watch) -> Iterator[Attacked | Noised]:
    """Have everything done by `settings.workers` processes; yields in the order of completion.

    All of them end with the first that fails. Raises ProcessError.
    """
    job, said = Job.of(settings, folder), queue.SimpleQueue[tuple[int, bytes | None]]()
    with ExitStack() as running:
        started = [
            running.enter_context(worker(_MODULE, job))
            for _ in range(min(settings.workers, len(tasks_of(settings))))
        ]
        for index, (_, lines, _) in enumerate(started):
            threading.Thread(target=_pass_on, args=(index, lines, said), daemon=True).start()
        left = len(started)
        while left:
            index, line = said.get()
            if line is not None:
                yield from _taken(_ANSWER.validate_json(line), watch)
                continue
            left -= 1
            process, _, errors = started[index]
            if (status := process.wait()) != 0:
                errors.join()
                raise failure("a worker", status, errors.last, expected="a run to its end")


def _pass_on(
    index: int, lines: IO[bytes], said: queue.SimpleQueue[tuple[int, bytes | None]]
) -> None:
    """Read a worker's lines to their end, of which None tells."""
    try:
        for line in lines:
            said.put((index, line))
    finally:
        said.put((index, None))


def _taken(answer: Answer, watch: Watch) -> Iterable[Attacked | Noised]:
    if isinstance(answer, Doing):
        watch.doing(answer.doing)
    elif isinstance(answer, Steps):
        watch.step(answer.steps)
    elif isinstance(answer, Failed):
        raise ProcessError(answer.where, got=answer.got, expected=answer.expected)
    elif isinstance(answer, Crashed):
        watch.say(answer.traceback)
        *_, last = answer.traceback.splitlines()
        raise ProcessError("a worker", got=last, expected="no error (its traceback is above)")
    else:
        return (answer,)
    return ()


# ----------------------------------------------------------------------------------- who does it


def _work(job: Job) -> None:
    settings = job.settings()
    torch.set_num_threads(settings.threads)
    own = job.folder / f"worker-{os.getpid()}"
    own.mkdir()
    watch = Watch(
        doing=lambda doing: _tell(Doing(doing=doing)), step=lambda steps: _tell(Steps(steps=steps))
    )
    station = Station(settings, own, watch)
    for number, task in enumerate(tasks_of(settings)):
        if _claimed(job.folder / f"task-{number}"):
            _tell(task.done_at(station, settings))


def _claimed(path: Path) -> bool:
    """Take a task, unless somebody has it."""
    try:
        path.touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def _tell(answer: Answer) -> None:
    sys.stdout.write(answer.model_dump_json() + "\n")
    sys.stdout.flush()


def main() -> None:
    """Do tasks of the job that stdin has, until none is left."""
    # An interrupt from the keyboard is for who started us, and ends us.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    job = Job.model_validate_json(sys.stdin.read())
    try:
        _work(job)
    except TsqpError as error:
        _tell(Failed(where=error.where, got=error.got, expected=error.expected))
        sys.exit(1)
    except Exception:
        _tell(Crashed(traceback=traceback.format_exc()))
        raise


if __name__ == "__main__":
    main()
