"""Rows: a client whose connection is very slow beside others, and many sessions at once.

Sessions side by side are a crowd: runners with a thread each, in a process of their own in the long
run. What each generates is compared with what the model says to it.
"""

import re
import tempfile
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from tee_side.runner import Runner
from tests.faults.row import Found, Measured, Row, note, percentile
from tests.kit.demo import (
    crowds,
    expected,
    generate,
    prompts,
    relative_slope,
    resident_bytes,
    settings,
    start,
)
from tests.kit.proxy import Fault, Proxy
from tests.kit.service import Workers

FAULTS = {"10 kB/s": Fault(bytes_per_s=10_000), "one-byte slices": Fault(slice_bytes=1)}
SHORT_FAULTS = {"40 kB/s": Fault(bytes_per_s=40_000), "one-byte slices": Fault(slice_bytes=1)}
# The first is computed in the TEE; the other takes five seconds at 10 kB/s.
_NEW_TOKENS = 2
_LONG_S, _SHORT_S = 30.0, 0.05
_GRACE_S = 1.0
_MOST_SLOWER, _MOST_SLOWER_P95 = 1.10, 2.0
# Never reached by what works: until what the slow client asks first has ended.
_FIRST_END_S = 120.0
# How long the slow client is at each of the two services, in turns, once it has connected.
_SETTLE_S, _WINDOW_S = 0.7, 3.0


@dataclass
class Slow:
    """What slow clients got, by fault and deadline; when there was one, and where.

    `windows`: the fault, whether at the others' service, begin and end.
    """

    right: Counter[tuple[Fault, float]] = field(default_factory=Counter)
    errors: Counter[tuple[Fault, float]] = field(default_factory=Counter)
    wrong: int = 0
    overdue_s: float = 0.0
    windows: list[tuple[Fault, bool, float, float]] = field(default_factory=list)

    @contextmanager
    def client(
        self, endpoint: str, dealer: str, fault: Fault, deadline_s: float
    ) -> Iterator[threading.Event]:
        """Have a client ask through a proxy with a fault; yield what is set once some has ended."""
        stop, ended = threading.Event(), threading.Event()
        (ids,) = prompts(1, 6, seed=3)

        def session() -> None:
            run = settings([proxy.endpoint], dealer, request_timeout_s=deadline_s)
            with Runner(run) as runner:
                proxy.set(fault)
                while not stop.is_set():
                    before = runner.totals().round_trips
                    said = generate(runner, ids, _NEW_TOKENS)
                    right = said.is_right(ids, _NEW_TOKENS)
                    self.wrong += not right and said.error is None
                    # Each request has so long; the last may have ended by an error.
                    most_s = deadline_s * (runner.totals().round_trips - before + 1)
                    self.overdue_s = max(self.overdue_s, said.longest_s - most_s)
                    if not stop.is_set():
                        self.right[fault, deadline_s] += right
                        self.errors[fault, deadline_s] += said.error is not None
                        ended.set()

        with Proxy(endpoint) as proxy, ThreadPoolExecutor(1) as pool:
            over = pool.submit(session)
            over.add_done_callback(lambda _: ended.set())
            try:
                yield ended
            finally:
                stop.set()
                proxy.set()  # what is under way may end at full speed
            over.result()

    def slower(self, fault: Fault, steps: Sequence[tuple[float, float]]) -> tuple[float, float]:
        """Return how many times as long the others' tokens took beside a slow client.

        On average, by tokens per second over all windows, and at the 95th percentile.
        """
        each, p95 = {}, {}
        for place in (True, False):
            windows = [(b, e) for what, at, b, e in self.windows if (what, at) == (fault, place)]
            took = [s for at, s in steps if any(b < at <= e for b, e in windows)]
            each[place] = sum(e - b for b, e in windows) / max(1, len(took))
            p95[place] = percentile(took, 95)
        return each[True] / each[False], p95[True] / p95[False]


@Row(
    "slow_peer",
    "slow peer (10 kB/s, one-byte slices)",
    "half with a deadline that is too short for it, a third under dealt; two sessions at full"
    " speed, one under shielded and one under dealt, are compared with themselves while the slow"
    " one is at another service",
    "deadline kept: right tokens with a long one, errors with a short one; other sessions <= 10 %"
    " fewer tokens per second, p95 of a token at most doubled, none of them wrong",
    short=4,
    long=20,
    minutes=6,
)
def slow_peer(count: int, full: bool) -> Found:
    """Be slow so often, for a while each time at the others' service and at another one.

    What the proxy takes of the processor is no matter of the service: the others are compared with
    themselves while the slow client is as slow elsewhere.
    """
    slow, faults = Slow(), list((FAULTS if full else SHORT_FAULTS).values())
    with Workers() as workers:
        shared, other, dealer = start(workers), start(workers), start(workers).endpoint
        texts = {ids: expected(ids, 16) for ids in prompts(2, 6, seed=5)}
        with crowds(shared.endpoint, [texts], apart=full, dealer=dealer) as running:
            # In fewer windows 10 % is noise: a share has as many.
            for place in range(max(count, 12) if full else count):
                fault = faults[place % 2]
                deadline_s = (_LONG_S, _SHORT_S)[(place + place // 2) % 2]
                # What drifts meanwhile is the same for both.
                for turn, here in enumerate((True, False, False, True) if full else (True,)):
                    endpoint = shared.endpoint if here else other.endpoint
                    theirs = dealer if place % 3 == 1 else ""
                    with slow.client(endpoint, theirs, fault, deadline_s) as ended:
                        # It connects, which takes the processor and not the service.
                        time.sleep(_SETTLE_S if full else 0.0)
                        began = time.monotonic()
                        time.sleep(_WINDOW_S if full else 0.0)
                        slow.windows.append((fault, here, began, time.monotonic()))
                        # Something has to end while it is slow.
                        if turn == 0 and not ended.wait(_FIRST_END_S):
                            raise TimeoutError(f"{fault}: got no end in {_FIRST_END_S:g} s")
        others = running[0].result()
    failed = others.counts["wrong"] + others.counts["errors"]
    measured: dict[str, Measured] = {
        "slow client right": slow.right.total(),
        "ended with a typed error": slow.errors.total(),
        "wrong": slow.wrong,
        "longest beyond a deadline, s": slow.overdue_s,
        "others' generations": others.counts["generations"],
        "of them wrong or failed": failed,
    }
    fast = True
    for name, fault in FAULTS.items() if full else ():
        fewer, p95 = slow.slower(fault, others.steps)
        measured[f"others' seconds a token at {name}, times"] = fewer
        measured[f"their p95 at {name}, times"] = p95
        fast = fast and fewer <= _MOST_SLOWER and p95 <= _MOST_SLOWER_P95
    return Found(
        measured,
        {
            "right tokens with a long deadline, errors with a short one": not slow.wrong
            and all(slow.right[f, _LONG_S] and slow.errors[f, _SHORT_S] for f in faults),
            "none of the others wrong": others.counts["generations"] > 0 and not failed,
        },
        {"deadlines kept": slow.overdue_s <= _GRACE_S, "others as fast": fast},
    )


_SECONDS_EACH = 0.06  # 10 minutes for 10,000
# In less, warm-up is no small part of it.
_JUDGED_S = 600.0
_PROCESSES, _SESSIONS_EACH = 4, 16
_LOAD_TOKENS = 3
_MAX_SLOPE = 0.01
_REQUESTS = re.compile(r'^tsqp_requests_total\{code="(\w+)",method="(\w+)"\} (\S+)$', re.MULTILINE)


@Row(
    "load",
    "load: 64 concurrent sessions, 10 min",
    "at least so many generations, half under dealt, each compared with what the model says to its"
    " prompt",
    "0 other tokens: none lost, duplicated or crossed; every operator answered once; memory slope"
    " < 1 % after warm-up",
    short=60,
    long=10_000,
    minutes=11,
)
def load(count: int, full: bool) -> Found:
    """Generate for some minutes in many sessions, and judge whether that was enough and right."""
    processes, sessions = (_PROCESSES, _SESSIONS_EACH) if full else (1, 3)
    texts = {ids: expected(ids, _LOAD_TOKENS) for ids in prompts(processes * sessions, 6)}
    parts = [dict(list(texts.items())[first::processes]) for first in range(processes)]
    rss: list[tuple[float, int]] = []
    with Workers() as workers, tempfile.TemporaryDirectory(prefix="tsqp-soak-") as folder:
        logs = [Path(folder, name) for name in ("service", "dealer")]
        worker, dealer = (start(workers, "--metrics", "127.0.0.1:0", log=log) for log in logs)
        with crowds(worker.endpoint, parts, apart=full, dealer=dealer.endpoint) as running:
            until = time.monotonic() + (count * _SECONDS_EACH if full else 0.5)
            while (now := time.monotonic()) < until:
                rss.append((now, resident_bytes(worker.pid)))
                time.sleep(min(1.0, max(0.01, until - now)))
        found = [one.result() for one in running]
        answered: list[tuple[str, str, str]] = []
        for log in logs:
            url = log.read_text(encoding="utf-8").split("url=", 1)[1].split()[0]
            with urllib.request.urlopen(url, timeout=10) as reply:
                answered += _REQUESTS.findall(reply.read().decode())
    done = sum(int(float(n)) for _, method, n in answered if method not in ("Init", "Health"))
    counts = sum((one.counts for one in found), Counter())
    slopes = [relative_slope(rss), *(relative_slope(one.rss) for one in found)]
    asked = counts["round_trips"]
    if done != asked:
        note(f"got {counts}, and the service answered {answered}")
    return Found(
        {
            "generations": counts["generations"],
            "ended with an error": counts["errors"],
            "other tokens": counts["wrong"],
            "operators asked for": asked,
            "of these answered once": done,
            "memory slope of the service, %": 100 * slopes[0],
            "largest of a runner process, %": 100 * max(slopes[1:]),
            "MiB of the service": rss[-1][1] / 2**20,
        },
        {
            "none lost, duplicated, crossed or wrong": not (counts["errors"] or counts["wrong"]),
            "every operator asked for and answered": asked == done > 0,
        },
        {
            "enough": counts["generations"] >= count,
            "memory": max(slopes) < _MAX_SLOPE or count * _SECONDS_EACH < _JUDGED_S,
        },
    )
