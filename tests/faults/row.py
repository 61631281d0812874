"""What a row of the reliability scorecard is, and what a run of it found.

A fault is a row, which a module of this folder defines beside the tests of the same subject. Its
short run is a test of `make test` (`test_rows.py`), in which no time is judged; `make soak` makes
the long one, and docs/reliability.md of what it found.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TypeAlias

# Several torch processes share the cores.
_ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "GOMP_SPINCOUNT": "0"}

Measured: TypeAlias = float | int | str


@dataclass(frozen=True)
class Found:
    """`measured`: numbers, by what they are of; `holds`: what has to be so, by what it says.

    `in_time`: what has to be so as well where time is judged.
    """

    measured: Mapping[str, Measured]
    holds: Mapping[str, bool]
    in_time: Mapping[str, bool] = field(default_factory=dict)

    def failed(self, *, timed: bool) -> list[str]:
        """Return what is not as it has to be."""
        judged = {**self.holds, **(self.in_time if timed else {})}
        return [what for what, is_so in judged.items() if not is_so]


def _no_run(count: int, full: bool) -> Found:
    raise NotImplementedError


@dataclass(frozen=True)
class Row:
    """`name`: by which it is chosen and recorded; `title`, `test`, `passes`: its texts on the page.

    `run`: gets how often, which is `short` or `long`, and whether it is the long run. `minutes`:
    how long that takes on two cores; `alone`: it measures time, and nothing else runs meanwhile.
    A row without `run` becomes one as the decorator of its function.
    """

    name: str
    title: str
    test: str
    passes: str
    short: int
    long: int
    minutes: float = 1
    alone: bool = False
    run: Callable[[int, bool], Found] = field(default=_no_run, repr=False)

    def __call__(self, run: Callable[[int, bool], Found]) -> Row:
        return replace(self, run=run)


def note(text: str) -> None:
    """Write a line about something unexpected to stderr, for people who look into a failed row."""
    print(text, file=sys.stderr, flush=True)  # noqa: T201


def percentile(values: Iterable[float], percent: float) -> float:
    """Return the smallest value that at least `percent` of them do not exceed; 0 of none."""
    ordered = sorted(values)
    if not ordered:
        return 0.0
    place = -(-len(ordered) * percent // 100)  # rounded up: p95 of 20 values is the 19th
    return ordered[max(0, min(len(ordered), int(place)) - 1)]


def run_side_by_side(
    commands: Sequence[Sequence[str]], limits_s: Sequence[float]
) -> list[tuple[str, float]]:
    """Run commands, and return how each ended ("": well), and after how many seconds.

    One that takes too long is ended. Whatever they have started ends with them.
    """
    began, found = time.monotonic(), []
    processes = [
        subprocess.Popen(command, env=_ENVIRONMENT, start_new_session=True) for command in commands
    ]
    try:
        for process, limit_s in zip(processes, limits_s, strict=True):
            try:
                status = process.wait(max(0.0, began + limit_s - time.monotonic()))
                ended = f"with {status}" if status else ""
            except subprocess.TimeoutExpired:
                ended = f"by us, after {limit_s / 60:g} min"
            found.append((ended, time.monotonic() - began))
    finally:
        for process in processes:
            with suppress(ProcessLookupError):  # none is left
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return found


def end_on_sigterm() -> None:
    """End as after Ctrl-C: with what runs."""
    signal.signal(signal.SIGTERM, lambda number, _frame: sys.exit(128 + number))
