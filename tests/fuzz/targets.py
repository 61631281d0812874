"""Every target, and how a fuzzing run is divided between them and between processes."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from types import FrameType

import torch

from tests.fuzz.attest_targets import ATTEST_TARGETS
from tests.fuzz.engine import (
    BATCH,
    CORPUS,
    Case,
    Fuzzer,
    Report,
    Target,
    read_corpus,
    write_corpus,
)
from tests.fuzz.file_targets import FILE_TARGETS
from tests.fuzz.kernel_targets import KERNEL_TARGETS
from tests.fuzz.peer_targets import PEER_TARGETS
from tests.fuzz.wire_targets import WIRE_TARGETS

TARGETS: tuple[Target, ...] = (
    *WIRE_TARGETS,
    *PEER_TARGETS,
    *FILE_TARGETS,
    *KERNEL_TARGETS,
    *ATTEST_TARGETS,
)
EXECUTIONS = Path(__file__).with_name("executions.json")
# No batch takes so long, unless an execution of it hangs.
_HUNG_S = 60
# A task of a worker: it returns what it found when it has done so many.
_TASK = 25 * BATCH


class HungError(Exception):
    """An execution that does not end."""


NAMES = frozenset(target.name for target in TARGETS)


def shares(executions: int, only: frozenset[str] = NAMES) -> dict[str, int]:
    """Divide executions between targets by their weights; the first gets what is left over."""
    chosen = [target for target in TARGETS if target.name in only]
    whole = sum(target.weight for target in chosen)
    divided = {target.name: max(1, int(executions * target.weight / whole)) for target in chosen}
    if chosen:
        divided[chosen[0].name] += max(0, executions - sum(divided.values()))
    return divided


def _tasks(executions: int, seed: int, only: frozenset[str]) -> Iterator[tuple[str, int, int]]:
    for name, share in shares(executions, only).items():
        for start in range(0, share, _TASK):
            seed += 1
            yield name, seed, min(_TASK, share - start)


def _hung(_number: int, _frame: FrameType | None) -> None:
    raise HungError(f"no end after {_HUNG_S} s")


def _work(task: tuple[str, int, int]) -> tuple[str, Report, list[Case]]:
    """Fuzz one target in a worker process."""
    torch.set_num_threads(1)
    name, seed, executions = task
    (target,) = (target for target in TARGETS if target.name == name)
    signal.signal(signal.SIGALRM, _hung)
    fuzzer = Fuzzer(target, seed)
    for start in range(0, executions, BATCH):
        signal.alarm(_HUNG_S)
        fuzzer.run(min(BATCH, executions - start))
    signal.alarm(0)
    return name, fuzzer.report, fuzzer.kept


def merge(total: Report, found: Report) -> None:
    """Add one report to another."""
    for name, count in found.executions.items():
        total.executions[name] = total.executions.get(name, 0) + count
    known = {finding.why[:40] for finding in total.findings}
    total.findings += [finding for finding in found.findings if finding.why[:40] not in known]
    total.slowest_s = max(total.slowest_s, found.slowest_s)
    total.largest_bytes = max(total.largest_bytes, found.largest_bytes)
    total.peak_bytes = max(total.peak_bytes, found.peak_bytes)


def fuzz(
    executions: int, processes: int, seed: int, only: frozenset[str] = NAMES
) -> Iterator[Report]:
    """Fuzz every target; yields what is known after every task, and keeps what was new at the end.

    `seed`: another one each time, or the same cases are executed again.
    """
    total = Report()
    began = time.monotonic()
    kept: dict[str, list[Case]] = {target.name: [] for target in TARGETS}
    context = get_context("spawn")
    with ProcessPoolExecutor(processes, mp_context=context) as pool:
        for name, report, cases in pool.map(_work, _tasks(executions, seed, only)):
            merge(total, report)
            kept[name] += cases
            total.seconds = time.monotonic() - began
            yield total
    for target in TARGETS:
        if target.name in only:
            keep(target, kept[target.name])


def keep(target: Target, cases: list[Case], folder: Path = CORPUS) -> None:
    """Add to the corpus of a target those cases whose outcome is new to it."""
    fuzzer = Fuzzer(target, 0, folder=folder, timed=False)
    before = set(read_corpus(target, folder))
    for case in cases:
        fuzzer.execute(case)
    if before != set(fuzzer.kept):
        write_corpus(target, fuzzer.kept, folder)


def read_executions(path: Path = EXECUTIONS) -> dict[str, int]:
    """Return how often each target was executed by all full runs together."""
    if not path.exists():
        return {}
    found: dict[str, int] = json.loads(path.read_text(encoding="utf-8"))
    return found


def count_executions(report: Report, path: Path = EXECUTIONS) -> int:
    """Add a run to the count, and return the sum of all."""
    counts = read_executions(path)
    for name, count in report.executions.items():
        counts[name] = counts.get(name, 0) + count
    path.write_text(json.dumps(counts, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    return sum(counts.values())
