"""Row: the service that a session is using is killed, and a second one is there."""

from __future__ import annotations

import random
import threading
import time
from tempfile import TemporaryDirectory

from tee_side.runner import Runner
from tests.kit.service import Workers
from tests.soak.row import RowResult, is_full, note, percentile, progress
from tests.soak.sessions import Said, asked, generate, prompts, settings, start

NAME = "worker killed mid-decode (kill -9), second worker present"
TEST = "at random points of a generation, half of them over shared memory"
PASS = "outputs identical to the undisturbed run; p95 recovery <= 2 s"
FULL, SHORT = 200, 2
MINUTES = 4
ALONE = True

NEW_TOKENS = 32
_LIMIT_S = 2.0
_HITS_EACH = 4


def run(count: int) -> RowResult:
    """Kill the service in use so often, each time in another generation of one session."""
    began = time.monotonic()
    chance = random.Random(10)
    texts = prompts(8, 6)
    generations = wrong = hits = 0
    recoveries: list[float] = []
    with Workers() as workers, TemporaryDirectory(prefix="tsqp-soak-") as folder:
        # One of each: after every hit it is the other one that is asked, and then killed.
        started = (start(workers), start(workers, bind=f"shm://{folder}/service"))
        services = {one.endpoint: one for one in started}
        with Runner(settings(list(services))) as runner:
            usual = [generate(runner, ids, NEW_TOKENS) for ids in texts]
            if not all(
                said.is_right(ids, NEW_TOKENS) for said, ids in zip(usual, texts, strict=True)
            ):
                raise RuntimeError("undisturbed: got other tokens than without processes")
            step_s = percentile([gap for said in usual for gap in said.gaps_s], 50)

            def judged(place: int) -> Said:
                nonlocal generations, wrong
                said = generate(runner, texts[place], NEW_TOKENS)
                generations += 1
                if said.error is not None or said.tokens != usual[place].tokens:
                    wrong += 1
                    note(f"got {said}, expected {usual[place].tokens}")
                return said

            # A generation may be over when the service is killed: it is judged, and is no hit.
            for _ in range(count * _HITS_EACH):
                if hits == count:
                    break
                place = chance.randrange(len(texts))
                victim = services[asked(runner)]
                timer = threading.Timer(chance.uniform(0, usual[place].total_s), victim.kill)
                timer.start()
                said = judged(place)
                timer.join()
                # Whoever else is asked now was asked in the middle of it.
                hit = asked(runner) != victim.endpoint
                if hit:
                    hits += 1
                    recoveries.append(said.longest_s - step_s)
                services[victim.endpoint] = workers.restart(victim)
                if not hit:
                    # It finds that its connection is dead now, and not when the next one is killed.
                    judged(place)
                progress(hits)
    p95 = percentile(recoveries, 95)
    in_time = p95 <= _LIMIT_S or not is_full(FULL, count)
    return RowResult(
        NAME,
        TEST,
        PASS,
        count,
        {
            "hits": f"{hits} of {count}",
            "identical": f"{generations - wrong} of {generations}",
            "p95 recovery, s": p95,
            "longest recovery, s": max(recoveries, default=0.0),
            "a token otherwise, s": step_s,
        },
        time.monotonic() - began,
        passed=hits == count and not wrong and in_time,
    )
