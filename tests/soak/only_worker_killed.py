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

from tee_side.runner import Runner
from tests.soak.row import RowResult, is_full, note, percentile, progress
from tests.soak.sessions import Said, generate, prompts, settings, start
from tests.tools.workers import Worker, Workers

NAME = "only worker killed, restarted within 5 s"
TEST = "at random points of a generation, with deadlines longer and shorter than the outage"
PASS = "every one hits; resumed, or a typed error within 1 s of the deadline"
FULL, SHORT = 100, 3
MINUTES = 3
ALONE = True

NEW_TOKENS = 24
_PATIENT_S, _IMPATIENT_S = 60.0, 1.5
# At least and at most, by how long a session waits. In the short form the service comes back at
# once, or after whoever waits for less has given up.
_AWAY_S = {_PATIENT_S: (0.0, 5.0), _IMPATIENT_S: (0.0, 5.0)}
_AWAY_SHORT_S = {_PATIENT_S: (0.0, 0.2), _IMPATIENT_S: (2.0, 2.2)}
_GRACE_S = 1.0
_SIDE_BY_SIDE = 4
_TRIES = 4


class Sessions:
    """Sessions side by side, each with a service of its own, and what came of them."""

    def __init__(self, workers: Workers, away_s: dict[float, tuple[float, float]]) -> None:
        self.hits = self.resumed = self.errors = self.wrong = self.late = self.stuck = 0
        self.overdue_s: list[float] = []
        self._workers = workers
        self._away_s = away_s
        self._texts = prompts(8, 6)
        # Counters are counted by several threads.
        self._lock = threading.Lock()

    def run(self, seed: int, count: int, done: Callable[[], None]) -> None:
        """Kill one session's service so often."""
        chance = random.Random(seed)
        worker = start(self._workers)
        for place in range(count):
            patient = (seed + place) % 2 == 0
            timeout_s = _PATIENT_S if patient else _IMPATIENT_S
            # A generation may be over when the service is killed: it is judged, and is no hit.
            for _ in range(_TRIES):
                with Runner(settings([worker.endpoint], request_timeout_s=timeout_s)) as runner:
                    worker, hit = self._kill_once(runner, worker, timeout_s, chance)
                if hit:
                    done()
                    break
            else:
                note(f"got {_TRIES} kills that hit nothing, expected one that does")

    def _kill_once(
        self, runner: Runner, worker: Worker, timeout_s: float, chance: random.Random
    ) -> tuple[Worker, bool]:
        """Return the service that came back, and whether the session had to do without it."""
        ids = chance.choice(self._texts)
        usual = generate(runner, ids, NEW_TOKENS)
        if not usual.is_right(ids, NEW_TOKENS):
            raise RuntimeError(f"undisturbed: got {usual}, expected the tokens of the model")
        session = _session(runner)
        kill_after_s = chance.uniform(0, usual.total_s)
        back_after_s = chance.uniform(*self._away_s[timeout_s])
        back: list[Worker] = []

        def kill() -> None:
            worker.kill()
            time.sleep(back_after_s)
            back.append(self._workers.restart(worker))

        timer = threading.Timer(kill_after_s, kill)
        timer.start()
        said = generate(runner, ids, NEW_TOKENS)
        # Nobody looks at a connection between two generations: a lost one was lost in this one.
        hit = _session(runner) is not session
        timer.join()
        after = generate(runner, ids, NEW_TOKENS)
        with self._lock:
            self._count(said, after, ids, timeout_s, hit=hit)
        return back[0], hit

    def _count(
        self, said: Said, after: Said, ids: tuple[int, ...], timeout_s: float, *, hit: bool
    ) -> None:
        right = said.is_right(ids, NEW_TOKENS)
        # Only who was hit, and does not wait for long enough, may end with an error.
        allowed = said.error is not None and hit and timeout_s == _IMPATIENT_S
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


def _session(runner: Runner) -> object:
    """Return the connection to the only service, which is another once it was lost."""
    (member,) = runner._services.at(0)[0].members  # type: ignore[attr-defined]
    return member.session


def run(count: int) -> RowResult:
    """Kill the only service so often, in several sessions side by side."""
    began = time.monotonic()
    full = is_full(FULL, count)
    lanes = min(_SIDE_BY_SIDE, count)
    finished: list[None] = []
    with Workers() as workers, ThreadPoolExecutor(lanes) as pool:
        sessions = Sessions(workers, _AWAY_S if full else _AWAY_SHORT_S)

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
