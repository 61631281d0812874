"""Row: the service that a session is using does not answer any more, and does not hang up either.

A process that is stopped, a connection whose other end has gone, a network that delivers nothing
for a while. Nobody says so: the session has to notice by itself, and asks its second service.
"""

from __future__ import annotations

import random
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial

from tee_side.runner import Runner
from tests.soak.row import RowResult, is_full, note, percentile, progress
from tests.soak.sessions import asked, generate, prompts, settings, start
from tests.tools.proxy import HOLD, Proxy
from tests.tools.workers import Worker, Workers

NAME = "SIGSTOP, half-open connection, black hole of 1/5/30 s"
TEST = "each as often, at random points of a generation, second worker present"
PASS = "noticed <= 2 s; outputs identical"
FULL, SHORT = 250, 2
MINUTES = 5
ALONE = True

NEW_TOKENS = 24
_LIMIT_S = 2.0
_SIDE_BY_SIDE = 10


@dataclass(frozen=True)
class Fault:
    """Something that stops a peer: `begin` and `end` get its process and the proxy before it.

    `lasts_s`: None where it ends with the generation.
    """

    name: str
    begin: Callable[[Worker, Proxy], None]
    end: Callable[[Worker, Proxy], None]
    lasts_s: float | None


def _hole(lasts_s: float) -> Fault:
    return Fault(
        f"black hole of {lasts_s:g} s",
        lambda _, proxy: proxy.set(HOLD, HOLD),
        lambda _, proxy: proxy.set(),
        lasts_s,
    )


FAULTS = (
    Fault(
        "SIGSTOP",
        lambda worker, _: worker.signal(signal.SIGSTOP),
        lambda worker, _: worker.signal(signal.SIGCONT),
        None,
    ),
    Fault("half-open", lambda _, proxy: proxy.half_open(), lambda _, proxy: None, None),
    _hole(1.0),
    _hole(5.0),
    _hole(30.0),
)


@dataclass
class Found:
    """How long each fault went unnoticed, by its name; and what went wrong."""

    still_s: dict[str, list[float]] = field(default_factory=dict)
    wrong: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def count(self) -> int:
        """How many faults there were."""
        return sum(map(len, self.still_s.values()))


def session(workers: Workers, faults: list[Fault], seed: int, found: Found) -> None:
    """Go through some faults in one session with two services."""
    chance = random.Random(seed)
    texts = prompts(4, 6)
    with ExitStack() as stack:
        services: dict[str, tuple[Worker, Proxy]] = {}
        for _ in range(2):
            worker = start(workers)
            proxy = stack.enter_context(Proxy(worker.endpoint))
            services[proxy.endpoint] = (worker, proxy)
        runner = stack.enter_context(Runner(settings(list(services))))
        for fault in faults:
            ids = chance.choice(texts)
            usual = generate(runner, ids, NEW_TOKENS)
            step_s = percentile(usual.gaps_s, 50)
            victim = services[asked(runner)]
            delay_s = chance.uniform(0, 0.8 * usual.total_s)
            timer = threading.Timer(delay_s, fault.begin, victim)
            timer.start()
            said = generate(runner, ids, NEW_TOKENS)
            timer.join()
            if fault.lasts_s is not None:
                time.sleep(fault.lasts_s)
            fault.end(*victim)
            right = usual.is_right(ids, NEW_TOKENS) and said.is_right(ids, NEW_TOKENS)
            with found.lock:
                found.wrong += not right
                found.still_s.setdefault(fault.name, []).append(said.longest_s - step_s)
                progress(found.count)
            if not right:
                note(f"{fault.name}: got {said} after {usual}, expected the same tokens")


def run(count: int) -> RowResult:
    """Stop so many peers, in several sessions side by side."""
    began = time.monotonic()
    full = is_full(FULL, count)
    faults = [FAULTS[place % len(FAULTS)] for place in range(count)]
    lanes = min(_SIDE_BY_SIDE, count)
    found = Found()
    with Workers() as workers, ThreadPoolExecutor(lanes) as pool:
        shares = [
            faults[lane * count // lanes : (lane + 1) * count // lanes] for lane in range(lanes)
        ]
        one = partial(session, workers)
        for future in [pool.submit(one, share, lane, found) for lane, share in enumerate(shares)]:
            future.result()
    slow = sum(still_s > _LIMIT_S for times in found.still_s.values() for still_s in times)
    longest = {
        f"{name}, longest s": percentile(times, 100)
        for name, times in sorted(found.still_s.items())
    }
    return RowResult(
        NAME,
        TEST,
        PASS,
        count,
        {
            "noticed in time": f"{found.count - slow} of {found.count}",
            "outputs identical": f"{found.count - found.wrong} of {found.count}",
            **longest,
        },
        time.monotonic() - began,
        passed=found.count == count and not found.wrong and not (full and slow),
    )
