"""Sessions side by side: runners with a thread each, here or in processes of their own.

What each generates is compared with what the model says to it, and to the others.
"""

from __future__ import annotations

import os
import threading
import time
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest

from protocol.pending import PendingChannel
from tee_side.runner import Runner
from tests.kit.demo import Tokens, generate, settings

# The first token comes of the prompt, which the runner reads by itself.
FROM_SERVICE = 1
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_READY_S = 300.0

# ---------------------------------------------------------------------------------- a crowd


@dataclass
class Crowd:
    """What came of sessions side by side.

    `counts`: generations that ended, `errors` those by an error; `crossed`: in which a token is
    what another session's prompt has there; `lost`: with too few tokens; `wrong`: with other ones
    than the model's; `duplicated`: replies to requests that were answered before; `round_trips`.
    `steps`: when each token came (time.monotonic), and how long it took. `rss`: when, and bytes.
    """

    counts: Counter[str] = field(default_factory=Counter)
    steps: list[tuple[float, float]] = field(default_factory=list)
    rss: list[tuple[float, int]] = field(default_factory=list)

    def judge(self, tokens: Tokens, right: Tokens, answers: Collection[Tokens]) -> None:
        """Count a generation that ended well. `answers`: what the model says to all sessions."""
        if tokens == right:
            return
        places = list(zip(tokens, right, strict=False))[FROM_SERVICE:]
        crossed = any(
            token != own and any(answer[at : at + 1] == (token,) for answer in answers)
            for at, (token, own) in enumerate(places, FROM_SERVICE)
        )
        self.counts.update(wrong=1, lost=len(tokens) < len(right), crossed=crossed)


def resident_bytes(pid: int | str = "self") -> int:
    """Return how much memory a process has in use."""
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


def _arrived(channel: PendingChannel) -> int:
    return sum(pending.reply is not None for pending in channel._pending.values())


@contextmanager
def counted_replies(counts: Counter[str]) -> Iterator[None]:
    """Count replies that no call waits for, or waits for any more: all but the first."""
    accept, lock = PendingChannel._accept, threading.Lock()

    def _accept(channel: PendingChannel, frames: Sequence[memoryview], received_ns: int) -> None:
        arrived = _arrived(channel)
        accept(channel, frames, received_ns)
        with lock:
            counts["duplicated"] += _arrived(channel) == arrived

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PendingChannel, "_accept", _accept)
        yield


class _Times:
    """Set in each process of crowds: where all wait until they are connected, and until when."""

    ready: Any
    stop: Any


def _set_times(ready: Any, stop: Any) -> None:
    _Times.ready, _Times.stop = ready, stop


def run_crowd(gpu: str, texts: Mapping[Tokens, Tokens], others: Collection[Tokens]) -> Crowd:
    """Generate until told to stop. `texts`: each session's prompt, and what the model says."""
    found, lock = Crowd(), threading.Lock()
    answers = {*texts.values(), *others}

    def one(runner: Runner, ids: Tokens) -> None:
        right, before = texts[ids], runner.traffic.round_trips
        while not _Times.stop.is_set():
            said = generate(runner, ids, len(right))
            ended = time.monotonic()
            with lock:
                found.counts.update(generations=1, errors=said.error is not None)
                at = ended - sum(said.gaps_s)
                for gap_s in said.gaps_s:
                    at += gap_s
                    found.steps.append((at, gap_s))
                if said.error is None:
                    found.judge(said.tokens, right, answers)
        with lock:
            found.counts["round_trips"] += runner.traffic.round_trips - before

    with ExitStack() as stack:
        stack.enter_context(counted_replies(found.counts))
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
    everyone = [answer for part in parts for answer in part.values()]
    pool: Executor
    if apart:
        pool = ProcessPoolExecutor(
            len(parts), mp_context=context, initializer=_set_times, initargs=times
        )
    else:
        pool = ThreadPoolExecutor(len(parts), initializer=_set_times, initargs=times)
    with pool:
        found = [pool.submit(run_crowd, gpu, part, everyone) for part in parts]
        try:
            times[0].wait(_READY_S)
            yield found
        finally:
            times[1].set()
