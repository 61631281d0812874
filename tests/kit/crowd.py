"""Sessions side by side: runners with a thread each, here or in processes of their own.

What each generates is compared with what the model says to it.
"""

from __future__ import annotations

import os
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from tee_side.runner import Runner
from tests.kit.demo import Tokens, generate, settings

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_READY_S = 300.0


@dataclass
class Crowd:
    """What came of sessions side by side.

    `counts`: generations that ended, `errors` those by an error; `wrong`: with other tokens than
    the model's; `round_trips`. `steps`: when each token came (time.monotonic), and how long it
    took. `rss`: when, and bytes.
    """

    counts: Counter[str] = field(default_factory=Counter)
    steps: list[tuple[float, float]] = field(default_factory=list)
    rss: list[tuple[float, int]] = field(default_factory=list)


def resident_bytes(pid: int | str = "self") -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * _PAGE_BYTES


def relative_slope(samples: Sequence[tuple[float, int]]) -> float:
    """Return by what part memory grows over the last four fifths of a time, by regression."""
    kept = samples[len(samples) // 5 :]
    if len(kept) < 3:
        return 0.0
    mean_t = sum(t for t, _ in kept) / len(kept)
    mean = sum(size for _, size in kept) / len(kept)
    spread = sum((t - mean_t) ** 2 for t, _ in kept)
    slope = sum((t - mean_t) * (size - mean) for t, size in kept) / spread
    return slope * (kept[-1][0] - kept[0][0]) / mean


class _Times:
    """Set in each process of crowds: where all wait until they are connected, and until when."""

    ready: Any
    stop: Any


def _set_times(ready: Any, stop: Any) -> None:
    _Times.ready, _Times.stop = ready, stop


def run_crowd(gpu: str, texts: Mapping[Tokens, Tokens]) -> Crowd:
    """Generate until told to stop. `texts`: each session's prompt, and what the model says."""
    found, lock = Crowd(), threading.Lock()

    def one(runner: Runner, ids: Tokens) -> None:
        right, before = texts[ids], runner.traffic.round_trips
        while not _Times.stop.is_set():
            said = generate(runner, ids, len(right))
            ended = time.monotonic()
            wrong = said.error is None and said.tokens != right
            with lock:
                found.counts.update(generations=1, errors=said.error is not None, wrong=wrong)
                at = ended - sum(said.gaps_s)
                for gap_s in said.gaps_s:
                    at += gap_s
                    found.steps.append((at, gap_s))
        with lock:
            found.counts["round_trips"] += runner.traffic.round_trips - before

    with ExitStack() as stack:
        runners = [stack.enter_context(Runner(settings([gpu]))) for _ in texts]
        pool = stack.enter_context(ThreadPoolExecutor(len(runners)))
        _Times.ready.wait(_READY_S)
        ended = [pool.submit(one, *pair) for pair in zip(runners, texts, strict=True)]
        while not _Times.stop.wait(1.0):
            found.rss.append((time.monotonic(), resident_bytes()))
        for session in ended:
            session.result()
    return found


@contextmanager
def crowds(
    gpu: str, parts: Sequence[Mapping[Tokens, Tokens]], *, apart: bool
) -> Iterator[list[Future[Crowd]]]:
    """Run a crowd of each part from when all are connected to the end of the block.

    `apart`: each in a process of its own.
    """
    context = get_context("spawn")
    times = context.Barrier(len(parts) + 1), context.Event()
    pool: Executor
    if apart:
        pool = ProcessPoolExecutor(
            len(parts), mp_context=context, initializer=_set_times, initargs=times
        )
    else:
        pool = ThreadPoolExecutor(len(parts), initializer=_set_times, initargs=times)
    with pool:
        found = [pool.submit(run_crowd, gpu, part) for part in parts]
        try:
            times[0].wait(_READY_S)
            yield found
        finally:
            times[1].set()
