"""Attacks policies side by side, in processes of their own: a core each.

    python -m tsqp.lab.leak.workers < JOB

Each worker reads the whole `Job` from stdin, takes the next free task, and writes
`Answer`s to what was its stdout, one a line. What an attack prints is one of them.
"""

from __future__ import annotations

import os

# Read once, when torch is imported; see tsqp/cli/program.py.
os.environ.setdefault("GOMP_SPINCOUNT", "0")

import io
import queue
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import torch
from pydantic import BaseModel, ConfigDict, TypeAdapter

from protocol.errors import TsqpError
from protocol.messages import FloatDtype
from tee_side.policy.placement import Policy, load_policy
from tsqp.lab.leak.attack_runner import Station
from tsqp.lab.leak.curves import noisy_mask
from tsqp.lab.leak.model import Curve, PolicyLeak
from tsqp.lab.leak.registry import find_attacks
from tsqp.lab.leak.settings import LeakSettings, Watch
from tsqp.processes import ProcessError, failure, worker

_MODULE = "tsqp.lab.leak.workers"


class _Line(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="strings")


class Doing(_Line):
    """What is going on."""

    doing: str


class Steps(_Line):
    """So many steps are done."""

    steps: int


class Attacked(_Line):
    """A policy is done, against each adversary; its cost goes to the process that measured it."""

    leaks: tuple[PolicyLeak, ...]


class Noised(_Line):
    """All strengths of a policy's noise are done."""

    curve: Curve


class Said(_Line):
    """A line that an attack printed."""

    said: str


class Failed(_Line):
    """An error of ours, in its three parts, that ended `task`; None: the worker."""

    task: str | None
    where: str
    got: str
    expected: str


class Crashed(_Line):
    """What ended `task` is no error of ours: an attack's, maybe, whose author needs to see it."""

    task: str | None
    traceback: str


Answer = Doing | Steps | Attacked | Noised | Said | Failed | Crashed
_ANSWER: TypeAdapter[Answer] = TypeAdapter(Answer)


@dataclass(frozen=True)
class Lost:
    """A task that ended with an error; the others go on. `task`: its name."""

    task: str
    error: Exception


@dataclass(frozen=True)
class Task:
    """A policy as it is, or with strengths of its noise. `policy`: its index in the settings."""

    policy: int
    noisy: bool
    steps: int

    def name(self, settings: LeakSettings) -> str:
        """Return what people call it: the policy, or the curve of one."""
        name = settings.policies[self.policy][1].name
        return f"curve of {name}" if self.noisy else name

    def done_at(self, station: Station, settings: LeakSettings) -> Attacked | Noised | Lost:
        """Do it. An error of its own, or of an attack, ends this task alone."""
        _, policy = settings.policies[self.policy]
        try:
            if self.noisy:
                return Noised(curve=station.curve(policy))
            return Attacked(leaks=station.attack(policy))
        except Exception as error:  # noqa: BLE001 - of any attack; raised when all is done
            return Lost(self.name(settings), error)


def tasks_of(settings: LeakSettings) -> list[Task]:
    """Return everything there is to do; first what takes longest, so that all end together."""
    policies = [policy for _, policy in settings.policies]
    curves = [
        Task(index, noisy=True, steps=len(settings.curves))
        for index, policy in enumerate(policies)
        if settings.curves and noisy_mask(policy)
    ]
    return curves + [
        Task(index, noisy=False, steps=1 + _views(policy) * len(settings.attacks))
        for index, policy in enumerate(policies)
    ]


def _views(policy: Policy) -> int:
    """Return how often each attack is made: at each service, and at all of them together."""
    return policy.services + (policy.services > 1)


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
    shares_in_the_clear: bool
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
            shares_in_the_clear=settings.shares_in_the_clear,
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
            shares_in_the_clear=self.shares_in_the_clear,
        )


# ------------------------------------------------------------------------------ the parent


def side_by_side(
    settings: LeakSettings, folder: Path, watch: Watch
) -> Iterator[Attacked | Noised | Lost]:
    """Have everything done by `settings.workers` processes; yields in the order of completion.

    All of them end with the first that ends early. Raises ProcessError.
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


def _taken(answer: Answer, watch: Watch) -> Iterable[Attacked | Noised | Lost]:
    if isinstance(answer, Doing):
        watch.doing(answer.doing)
    elif isinstance(answer, Steps):
        watch.step(answer.steps)
    elif isinstance(answer, Said):
        watch.say(answer.said)
    elif isinstance(answer, Failed | Crashed):
        error = _error_of(answer, watch)
        if answer.task is None:
            raise error
        return (Lost(answer.task, error),)
    else:
        return (answer,)
    return ()


def _error_of(answer: Failed | Crashed, watch: Watch) -> ProcessError:
    if isinstance(answer, Failed):
        return ProcessError(answer.where, got=answer.got, expected=answer.expected)
    watch.say(answer.traceback)
    *_, last = answer.traceback.splitlines()
    return ProcessError("a worker", got=last, expected="no error (its traceback is above)")


# ----------------------------------------------------------------------------- the worker


Tell = Callable[[Answer], None]


class _Printed(io.TextIOBase):
    """A stdout whose lines are told: those of an attack's author, to see what it does."""

    def __init__(self, tell: Tell) -> None:
        self._tell = tell
        self._rest = ""

    def writable(self) -> bool:
        """Say that it can be written to."""
        return True

    def write(self, text: str, /) -> int:
        """Tell the lines that are whole."""
        *lines, self._rest = (self._rest + text).split("\n")
        for line in lines:
            self._tell(Said(said=_sendable(line)))
        return len(text)

    def end(self) -> None:
        """Tell what has no end of line yet."""
        if self._rest:
            self.write("\n")


def _work(job: Job, tell: Tell, printed: _Printed) -> None:
    settings = job.settings()
    torch.set_num_threads(settings.threads)
    own = job.folder / f"worker-{os.getpid()}"
    own.mkdir()
    watch = Watch(
        doing=lambda doing: tell(Doing(doing=doing)), step=lambda steps: tell(Steps(steps=steps))
    )
    station = Station(settings, own, watch)
    for number, task in enumerate(tasks_of(settings)):
        if _claimed(job.folder / f"task-{number}"):
            found = task.done_at(station, settings)
            printed.end()
            tell(_ended(found.error, found.task) if isinstance(found, Lost) else found)


def _ended(error: Exception, task: str | None) -> Failed | Crashed:
    """Return what is told of an error."""
    if isinstance(error, TsqpError):
        return Failed(task=task, where=error.where, got=error.got, expected=error.expected)
    text = "".join(traceback.format_exception(error))
    return Crashed(task=task, traceback=_sendable(text))


def _sendable(text: str) -> str:
    """Return a text without lone surrogates, as of file names, which JSON has no bytes for."""
    return text.encode(errors="replace").decode()


def _claimed(path: Path) -> bool:
    """Take a task, unless another worker has it."""
    try:
        path.touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def main() -> None:
    """Do tasks of the job that stdin has, until none is left."""
    # An interrupt from the keyboard is for the parent process, which ends us.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    job = Job.model_validate_json(sys.stdin.read())
    # No print of an attack, nor of a library below it, comes between the answers.
    with os.fdopen(os.dup(1), "wb") as answers:
        os.dup2(2, 1)

        def tell(answer: Answer) -> None:
            answers.write(answer.model_dump_json().encode() + b"\n")
            answers.flush()

        sys.stdout = printed = _Printed(tell)
        try:
            _work(job, tell, printed)
        except Exception as error:
            printed.end()
            tell(_ended(error, None))
            raise
        finally:
            sys.stdout = sys.__stdout__


if __name__ == "__main__":
    main()
