"""Row: the only service is killed, and comes back within five seconds.

Half of the sessions wait longer for a result than that, and go on as if nothing had happened. The
other half wait for less: they may end with an error, within a second of their deadline, and the
next generation of the same session is right. Both have to have happened.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from tempfile import TemporaryDirectory
from typing import Any

from tee_side.runner import Runner
from tests.kit.service import Worker, Workers
from tests.soak.row import RowResult, is_full, note, percentile, progress
from tests.soak.sessions import Said, expected, generate, prompts, settings, start

NAME = "only worker killed, restarted within 5 s"
TEST = (
    "at random points of a generation, with deadlines longer and shorter than the outage, over"
    " tcp and shared memory in turns"
)
PASS = "every one hits; resumed, or a typed error within 1 s of the deadline"
FULL, SHORT = 100, 3
MINUTES = 3
ALONE = True

NEW_TOKENS = 24
_PATIENT_S, _IMPATIENT_S = 60.0, 3.0
# How long the service is away. In the short form it comes back at once, or only after whoever
# waits for less has given up.
_AWAY_S = (0.0, 5.0)
_AWAY_SHORT_S = (0.0, 0.2)
_GRACE_S = 1.0
_SIDE_BY_SIDE = 4
_TRIES = 4


@dataclass(frozen=True)
class _Undisturbed:
    """A generation whose service is well: its requests, and the seconds that one takes."""

    requests: int
    request_s: float


class Sessions:
    """Sessions side by side, each with a service of its own, and what came of them."""

    def __init__(self, workers: Workers, folder: str, *, full: bool) -> None:
        self.hits = self.resumed = self.errors = self.wrong = self.late = self.stuck = 0
        self.overdue_s: list[float] = []
        self._workers, self._folder = workers, folder
        self._full = full
        # All of the same length: as many requests each.
        self._texts = [ids for ids in prompts(8, 6) if len(expected(ids, NEW_TOKENS)) == NEW_TOKENS]
        # Counters are counted by several threads.
        self._lock = threading.Lock()

    def run(self, seed: int, count: int, done: Callable[[], None]) -> None:
        """Kill one session's service so often."""
        chance = random.Random(seed)
        # A session each: of four, and of three in the short form, some are of either.
        shared = f"shm://{self._folder}/{seed}" if seed % 2 else "tcp://127.0.0.1:*"
        worker = start(self._workers, bind=shared)
        undisturbed = self._undisturbed(worker)
        for place in range(count):
            patient = (seed + place) % 2 == 0
            timeout_s = _PATIENT_S if patient else _IMPATIENT_S
            # A generation may be over when the service is killed, or before; who waits for less may
            # have given up. It is judged, and is no hit.
            for _ in range(_TRIES):
                with Runner(settings([worker.endpoint], request_timeout_s=timeout_s)) as runner:
                    worker, hit = self._kill_once(runner, worker, timeout_s, undisturbed, chance)
                if hit:
                    done()
                    break
            else:
                note(f"got {_TRIES} kills that hit nothing, expected one that does")

    def _undisturbed(self, worker: Worker) -> _Undisturbed:
        """Generate, see that it is right, and count the requests that it takes."""
        ids = self._texts[0]
        with Runner(settings([worker.endpoint], request_timeout_s=_PATIENT_S)) as runner:
            sent: list[bool] = []
            _watch(runner, sent.append)
            said = generate(runner, ids, NEW_TOKENS)
        if not said.is_right(ids, NEW_TOKENS):
            raise RuntimeError(f"undisturbed: got {said}, expected the tokens of the model")
        requests = sum(sent)
        return _Undisturbed(requests, said.total_s / requests)

    def _kill_once(
        self,
        runner: Runner,
        worker: Worker,
        timeout_s: float,
        undisturbed: _Undisturbed,
        chance: random.Random,
    ) -> tuple[Worker, bool]:
        """Return the service that came back, and whether the session had to do without it."""
        ids = chance.choice(self._texts)
        point, sent = chance.randrange(undisturbed.requests * 3 // 4), chance.random() < 0.5
        kill_after_s = chance.uniform(0, undisturbed.request_s)
        gives_up = timeout_s == _IMPATIENT_S and not self._full
        away_s = chance.uniform(*(_AWAY_S if self._full else _AWAY_SHORT_S))
        due, over = threading.Event(), threading.Event()
        asked = 0

        def count(is_sent: bool) -> None:
            nonlocal asked
            if (asked, is_sent) == (point, sent):
                if not sent:
                    worker.kill()
                due.set()
            asked += is_sent

        def outage() -> Worker:
            due.wait()
            if over.is_set() and worker.is_running:
                return worker
            if sent:
                # While the session waits for the reply, or goes on.
                time.sleep(kill_after_s)
                worker.kill()
            if gives_up:
                over.wait()
            else:
                time.sleep(away_s)
            return self._workers.restart(worker)

        _watch(runner, count)
        session = _session(runner)
        with ThreadPoolExecutor(1) as other:
            back = other.submit(outage)
            try:
                said = generate(runner, ids, NEW_TOKENS)
                # Nobody looks at a connection between generations: it was lost in this one.
                lost = _session(runner) is not session
            finally:
                over.set()
                due.set()
        came_back, hit = back.result(), lost and not worker.is_running
        after = generate(runner, ids, NEW_TOKENS)
        with self._lock:
            self._count(said, after, ids, timeout_s, hit=hit)
        return came_back, hit

    def _count(
        self, said: Said, after: Said, ids: tuple[int, ...], timeout_s: float, *, hit: bool
    ) -> None:
        right = said.is_right(ids, NEW_TOKENS)
        # Only who does not wait for long enough may end with an error.
        allowed = said.error is not None and timeout_s == _IMPATIENT_S
        self.hits += hit
        self.resumed += hit and right
        self.errors += hit and said.error is not None
        self.wrong += not right and not allowed
        overdue_s = said.longest_s - timeout_s
        if said.error is not None:
            self.overdue_s.append(overdue_s)
        self.late += overdue_s > _GRACE_S
        self.stuck += not after.is_right(ids, NEW_TOKENS)
        if not right and not allowed:
            note(f"got {said}, expected it to go on")
        if not after.is_right(ids, NEW_TOKENS):
            note(f"after {said}: got {after}, expected the right tokens")


def _session(runner: Runner) -> Any:
    """Return the connection to the only service, which is another once it was lost."""
    (member,) = runner._services.at(0)[0].members  # type: ignore[attr-defined]
    return member.session


def _watch(runner: Runner, told: Callable[[bool], None]) -> None:
    """Have somebody told, in this thread, before (False) and after (True) each request is sent."""
    channel = _session(runner).channel

    def telling(send: Callable[..., int]) -> Callable[..., int]:
        def call(*arguments: Any, **more: Any) -> int:
            told(False)
            request_id = send(*arguments, **more)
            told(True)
            return request_id

        return call

    channel.submit, channel.start = telling(channel.submit), telling(channel.start)


def run(count: int) -> RowResult:
    """Kill the only service so often, in several sessions side by side."""
    began = time.monotonic()
    full = is_full(FULL, count)
    lanes = min(_SIDE_BY_SIDE, count)
    finished: list[None] = []
    with (
        Workers() as workers,
        ThreadPoolExecutor(lanes) as pool,
        TemporaryDirectory(prefix="tsqp-soak-") as folder,
    ):
        sessions = Sessions(workers, folder, full=full)

        def done() -> None:
            finished.append(None)
            progress(len(finished))

        shares = [count // lanes + (lane < count % lanes) for lane in range(lanes)]
        for future in [
            pool.submit(sessions.run, lane, share, done) for lane, share in enumerate(shares)
        ]:
            future.result()
    late = sessions.late if full else 0
    return RowResult(
        NAME,
        TEST,
        PASS,
        count,
        {
            "hits": f"{sessions.hits} of {count}",
            "resumed": sessions.resumed,
            "ended with a typed error": sessions.errors,
            "wrong, or not resumed in time": sessions.wrong,
            "next generation not right": sessions.stuck,
            "longest beyond a deadline, s": percentile(sessions.overdue_s, 100),
        },
        time.monotonic() - began,
        passed=sessions.hits == sessions.resumed + sessions.errors == count
        and min(sessions.resumed, sessions.errors) > 0
        and not sessions.wrong
        and not sessions.stuck
        and not late,
    )
