"""Row: the service that a session is using does not answer any more, and does not hang up either.

A process that is stopped, a connection whose other end has gone, a network that delivers nothing
for a while. Nobody says so: the session has to notice by itself, and asks its second service. Over
TCP ZeroMQ's heartbeats tell it, over a Unix socket its own second connection.

The short form has no hole of 5 s or 30 s.
"""

from __future__ import annotations

import itertools
import random
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field, replace

from tee_side.runner import Runner
from tests.kit.proxy import HOLD, Proxy
from tests.kit.service import Worker, Workers
from tests.soak.row import RowResult, is_full, note, percentile, progress
from tests.soak.sessions import Said, asked, generate, prompts, settings, start

NAME = "SIGSTOP, half-open connection, black hole of 1/5/30 s"
TEST = (
    "each as often (the short form: no hole of 5 or 30 s), a fifth over unix://, the others over"
    " tcp://, at random points of a generation, second worker present; holes heal"
)
PASS = "every one hits; noticed <= 2 s; outputs identical"
FULL, SHORT = 320, 6
MINUTES = 14
ALONE = True

NEW_TOKENS = 24
_LIMIT_S = 2.0
_SIDE_BY_SIDE = 8
# Shorter than what heartbeats notice: a hole of so long is only waited for.
_UNNOTICED_S = 1.0
_TRIES = 4
_MOST_TURNS = 3
# Between generations while a hole lasts: the other sessions need the processor, too.
_PAUSE_S = 0.5
# One point of so many is over a Unix socket.
_UNIX_EVERY, _UNIX_EVERY_SHORT = 5, 2


@dataclass(frozen=True)
class Fault:
    """Something that stops a peer: `begin` and `end` get its process and the proxy before it.

    `lasts_s`: how long after its beginning it ends; None where it ends once it was noticed.
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
    _hole(_UNNOTICED_S),
    _hole(5.0),
    _hole(30.0),
)


@dataclass
class Found:
    """How long each fault went unnoticed, by its name; and what went wrong.

    Only faults that hit something are in `still_s`; every generation is judged.
    """

    still_s: dict[str, list[float]] = field(default_factory=dict)
    generations: int = 0
    wrong: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def hits(self) -> int:
        """How many faults hit a session."""
        return sum(map(len, self.still_s.values()))

    def judge(self, said: Said, ids: tuple[int, ...], when: str) -> None:
        """Count a generation, which must be right."""
        right = said.is_right(ids, NEW_TOKENS)
        with self.lock:
            self.generations += 1
            self.wrong += not right
        if not right:
            note(f"{when}: got {said}, expected the right tokens")

    def hit(self, fault: Fault, still_s: float) -> None:
        """Count a fault that hit."""
        with self.lock:
            self.still_s.setdefault(fault.name, []).append(still_s)
            progress(self.hits)


def strike(
    runner: Runner,
    services: dict[str, tuple[Worker, Proxy]],
    fault: Fault,
    chance: random.Random,
    found: Found,
) -> bool:
    """Have a fault while a session generates; say whether it hit. Every generation is judged."""
    ids = chance.choice(prompts(4, 6))
    usual = generate(runner, ids, NEW_TOKENS)
    found.judge(usual, ids, f"before {fault.name}")
    step_s = percentile(usual.gaps_s, 50)
    endpoint = asked(runner)
    victim = services[endpoint]
    delay_s = chance.uniform(0, 0.8 * usual.total_s)
    over = threading.Event()

    def come_and_go() -> None:
        try:
            fault.begin(*victim)
            if fault.lasts_s is not None:
                time.sleep(fault.lasts_s)
                fault.end(*victim)
        finally:
            over.set()

    timer = threading.Timer(delay_s, come_and_go)
    timer.start()
    longest_s = 0.0
    moved = False
    try:
        # What does not end by itself ends once it was noticed, or after a few generations.
        for turn in itertools.count():
            said = generate(runner, ids, NEW_TOKENS)
            found.judge(said, ids, f"at {fault.name}")
            longest_s = max(longest_s, said.longest_s - step_s)
            moved = moved or asked(runner) != endpoint
            if fault.lasts_s is None and (moved or turn == _MOST_TURNS):
                break
            if over.wait(_PAUSE_S) and fault.lasts_s is not None:
                break
    finally:
        timer.join()
        if fault.lasts_s is None:
            fault.end(*victim)
    found.judge(generate(runner, ids, NEW_TOKENS), ids, f"after {fault.name}")
    # A network that comes back before anybody noticed has held a session up all the same.
    stalled = fault.lasts_s == _UNNOTICED_S and longest_s > 0.5 * _UNNOTICED_S
    if moved or stalled:
        found.hit(fault, longest_s)
    return moved or stalled


def session(
    workers: Workers, faults: list[Fault], seed: int, found: Found, *, over_unix: bool
) -> None:
    """Go through some faults in one session with two services."""
    chance = random.Random(seed)
    with ExitStack() as stack:
        services: dict[str, tuple[Worker, Proxy]] = {}
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="tsqp-soak-"))
        for number in range(2):
            bind = f"unix://{folder}/service-{number}" if over_unix else "tcp://127.0.0.1:*"
            worker = start(workers, bind=bind)
            proxy = stack.enter_context(Proxy(worker.endpoint))
            services[proxy.endpoint] = (worker, proxy)
        runner = stack.enter_context(Runner(settings(list(services))))
        for fault in faults:
            if not any(strike(runner, services, fault, chance, found) for _ in range(_TRIES)):
                note(f"{fault.name}: got {_TRIES} that hit nothing, expected one that does")


def _shares(faults: Sequence[Fault], count: int, lanes: int) -> list[list[Fault]]:
    """Divide so many points, each fault as often as any other, between the lanes."""
    points = [faults[place % len(faults)] for place in range(count)]
    return [points[lane * count // lanes : (lane + 1) * count // lanes] for lane in range(lanes)]


def run(count: int) -> RowResult:
    """Stop so many peers, in several sessions side by side."""
    began = time.monotonic()
    full = is_full(FULL, count)
    over_unix = count // (_UNIX_EVERY if full else _UNIX_EVERY_SHORT)
    lanes = min(_SIDE_BY_SIDE, over_unix)
    named = [replace(fault, name=f"{fault.name} over unix") for fault in FAULTS]
    shares = [
        *((share, False) for share in _shares(FAULTS, count - over_unix, lanes)),
        *((share, True) for share in _shares(named, over_unix, lanes)),
    ]
    found = Found()
    with Workers() as workers, ThreadPoolExecutor(lanes) as pool:
        for future in [
            pool.submit(session, workers, share, seed, found, over_unix=unix)
            for seed, (share, unix) in enumerate(shares)
        ]:
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
            "hits": f"{found.hits} of {count}",
            "noticed in time": f"{found.hits - slow} of {found.hits}",
            "outputs identical": f"{found.generations - found.wrong} of {found.generations}",
            **longest,
        },
        time.monotonic() - began,
        passed=found.hits == count and not found.wrong and not (full and slow),
    )
