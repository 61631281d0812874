"""Every target, and how a fuzzing run is divided between them and between processes."""

import json
import os
import signal
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import torch

from tests.fuzz.engine import BATCH, Case, Fuzzer, Report, Target, kind_of
from tests.fuzz.evidence import EVIDENCE
from tests.fuzz.files import FILES
from tests.fuzz.wire import WIRE

TARGETS: tuple[Target, ...] = (*WIRE, *FILES, *EVIDENCE)
EXECUTIONS = Path(__file__).with_name("executions.json")
# No batch takes so long, unless a case of it hangs: the signal ends the worker.
_HUNG_S = 60
# A task of a worker: it returns what it found when it has done so many.
_TASK = 25 * BATCH


def shares(executions: int, only: frozenset[str] = frozenset()) -> dict[str, int]:
    """Divide executions between targets by their weights; the first gets what is left over."""
    chosen = [target for target in TARGETS if not only or target.name in only]
    whole = sum(target.weight for target in chosen)
    divided = {target.name: max(1, int(executions * target.weight / whole)) for target in chosen}
    divided[chosen[0].name] += max(0, executions - sum(divided.values()))
    return divided


def _work(task: tuple[str, int, int]) -> tuple[str, Report, dict[str, Case]]:
    """Fuzz one target in a worker process."""
    torch.set_num_threads(1)
    name, seed, executions = task
    (target,) = (target for target in TARGETS if target.name == name)
    fuzzer = Fuzzer(target, seed)
    for start in range(0, executions, BATCH):
        signal.alarm(_HUNG_S)
        fuzzer.run(min(BATCH, executions - start))
    signal.alarm(0)
    return name, fuzzer.report, fuzzer.kept


def merge(total: Report, found: Report) -> None:
    """Add one report to another."""
    total.executions += found.executions
    known = set(map(kind_of, total.findings))
    total.findings += [finding for finding in found.findings if kind_of(finding) not in known]
    for field in ("slowest_s", "largest_bytes", "peak_bytes"):
        setattr(total, field, max(getattr(total, field), getattr(found, field)))


def fuzz(
    executions: int, processes: int, seed: int, only: frozenset[str] = frozenset()
) -> Iterator[Report]:
    """Fuzz every target; yields what is known after every task, and keeps what was new at the end.

    `seed`: another one each time, or the same cases are read again.
    """
    # A panic of tokenizers is caught; the trace that Rust may print takes longer than the case.
    os.environ["RUST_BACKTRACE"] = "0"
    total, began = Report(), time.monotonic()
    kept: dict[str, dict[str, Case]] = {target.name: {} for target in TARGETS}
    divided = shares(executions, only).items()
    tasks = [(name, at, share) for name, share in divided for at in range(0, share, _TASK)]
    work = [
        (name, seed + number, min(_TASK, share - at))
        for number, (name, at, share) in enumerate(tasks)
    ]
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        for name, report, cases in pool.map(_work, work):
            merge(total, report)
            kept[name] |= cases
            total.seconds = time.monotonic() - began
            yield total
    for target in TARGETS:
        if new := kept[target.name]:
            seeds = target.seeds()
            target.keep([case for case in new.values() if case not in seeds])


def read_executions() -> Counter[str]:
    """Return how often each target was executed by all full runs together."""
    return Counter(json.loads(EXECUTIONS.read_text(encoding="utf-8")))


def count_executions(report: Report) -> int:
    """Add a run to the count, and return the sum of all."""
    counts = read_executions() + report.executions
    EXECUTIONS.write_text(json.dumps(counts, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    return sum(counts.values())
