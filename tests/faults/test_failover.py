"""Real gpu-services that are killed, stopped, restarted and exchanged in the middle of a decode.

The output must be that of the undisturbed run, or one typed error must come; and no service may
ever get the other share, whatever fails.
"""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from protocol.messages import Request
from tee_side.policy.placement import load_policy
from tee_side.runner import Runner, RunnerSettings
from tests.faults.row import Found, Row, note, percentile
from tests.kit.demo import Sent, asked, expected, generate, prompts, settings, start, watched
from tests.kit.model import SavedModel, expanded
from tests.kit.service import CALM, CALM_S, Service, Workers

PROMPT = [1, 5, 9, 13, 2, 7, 11, 3, 8]
NEW_TOKENS = 6

# ---------------------------------------------------------------------------- rows: kill -9

_ROW_TOKENS = 12
_RECOVERED_S = 2.0


@Row(
    "worker_killed",
    "worker killed mid-decode (kill -9), second worker present",
    "at random points of a generation, half of them over shared memory",
    "outputs identical to the undisturbed run; p95 recovery <= 2 s",
    short=2,
    long=200,
    minutes=4,
)
def worker_killed(count: int, full: bool) -> Found:
    """Kill the service in use so often, each time in another generation of one session."""
    chance, texts = random.Random(10), prompts(8 if full else 1, 6)
    hits = wrong = 0
    recoveries: list[float] = []
    with ExitStack() as stack:
        folder = stack.enter_context(TemporaryDirectory(prefix="tsqp-soak-"))
        workers, sent = stack.enter_context(Workers()), stack.enter_context(watched())
        # One of each: after every hit it is the other one that is asked, and then killed.
        both = (start(workers), start(workers, bind=f"shm://{folder}/service"))
        services = {one.endpoint: one for one in both}
        runner = stack.enter_context(Runner(settings(list(services))))
        usual = generate(runner, texts[0], _ROW_TOKENS)
        step_s, requests = percentile(usual.gaps_s, 50), len(sent.to())
        for _ in range(count):
            ids, victim = chance.choice(texts), services[asked(runner)]
            point = chance.randrange(requests * 3 // 4), chance.random() < 0.5
            sent.strike({point: victim.kill})
            said = generate(runner, ids, _ROW_TOKENS)
            hits += asked(runner) != victim.endpoint
            recoveries.append(said.longest_s - step_s)
            if not said.is_right(ids, _ROW_TOKENS):
                wrong += 1
                note(f"got {said}, expected {expected(ids, _ROW_TOKENS)}")
            services[victim.endpoint] = workers.restart(victim)
    p95_s = percentile(recoveries, 95)
    return Found(
        {
            "hits": f"{hits} of {count}",
            "identical": f"{count - wrong} of {count}",
            "p95 recovery, s": p95_s,
            "longest recovery, s": max(recoveries),
            "a token otherwise, s": step_s,
        },
        {"every one hits": hits == count, "outputs identical": not wrong},
        {"p95 recovery": p95_s <= _RECOVERED_S},
    )


_PATIENT_S, _IMPATIENT_S, _IMPATIENT_SHORT_S = 60.0, 3.0, 0.5
_AWAY_S = 5.0
_GRACE_S = 1.0
_SIDE_BY_SIDE = 4


@Row(
    "only_worker_killed",
    "only worker killed, restarted within 5 s",
    "at random points of a generation, with deadlines longer and shorter than the outage, over tcp"
    " and shared memory in turns",
    "every one hits; resumed, or a typed error within 1 s of the deadline",
    short=2,
    long=100,
    minutes=3,
)
def only_worker_killed(count: int, full: bool) -> Found:
    """Kill the only service so often, in several sessions side by side, each with its own.

    Half of the sessions wait longer for a result than it is away, and go on as if nothing had
    happened. The others wait for less: they may end with an error, within a second of their
    deadline, and the next generation is right again.
    """
    texts = [
        ids
        for ids in prompts(8 if full else 2, 6)
        if len(expected(ids, _ROW_TOKENS)) == _ROW_TOKENS
    ]
    impatient_s = _IMPATIENT_S if full else _IMPATIENT_SHORT_S
    counts: Counter[str] = Counter()
    overdue_s: list[float] = [0.0]
    lock = threading.Lock()

    def disturb(worker: Service, timeout_s: float, chance: random.Random, sent: Sent) -> Service:
        """Have a session go on without its service for a while; return the one that came back."""
        ids, killed, over = chance.choice(texts), threading.Event(), threading.Event()

        def kill() -> None:
            worker.kill()
            killed.set()

        def come_back() -> Service:
            killed.wait()
            if full or timeout_s == _PATIENT_S:
                time.sleep(chance.uniform(0, _AWAY_S) if full else 0.0)
            else:
                over.wait()  # the session has given up
            return workers.restart(worker)

        point = chance.randrange(requests * 3 // 4), chance.random() < 0.5
        with (
            Runner(settings([worker.endpoint], request_timeout_s=timeout_s)) as runner,
            ThreadPoolExecutor(1) as other,
        ):
            back = other.submit(come_back)
            sent.strike({point: kill})
            try:
                said = generate(runner, ids, _ROW_TOKENS)
                hit = killed.is_set()
            finally:
                if not killed.is_set():
                    kill()
                over.set()
            came_back = back.result()
            after = generate(runner, ids, _ROW_TOKENS)
        right = said.is_right(ids, _ROW_TOKENS)
        # Only a session that does not wait for long enough may end with an error.
        allowed = said.error is not None and timeout_s == impatient_s
        with lock:
            counts.update(hits=hit, resumed=hit and right, errors=hit and said.error is not None)
            counts.update(
                wrong=not right and not allowed, stuck=not after.is_right(ids, _ROW_TOKENS)
            )
            if said.error is not None:
                overdue_s.append(said.longest_s - timeout_s)
        if not (right or allowed) or not after.is_right(ids, _ROW_TOKENS):
            note(f"got {said}, and after it {after}, expected {expected(ids, _ROW_TOKENS)}")
        return came_back

    def lane(number: int, times: int) -> None:
        chance = random.Random(number)
        bind = f"shm://{folder}/{number}" if number % 2 else "tcp://127.0.0.1:*"
        worker = start(workers, bind=bind)
        for place in range(times):
            patient = (number + place) % 2 == 0
            worker = disturb(worker, _PATIENT_S if patient else impatient_s, chance, sent)

    with ExitStack() as stack:
        folder = stack.enter_context(TemporaryDirectory(prefix="tsqp-soak-"))
        workers, sent = stack.enter_context(Workers()), stack.enter_context(watched())
        with Runner(settings([start(workers).endpoint])) as runner:
            generate(runner, texts[0], _ROW_TOKENS)
            requests = len(sent.to())
        lanes = min(_SIDE_BY_SIDE, count)
        pool = stack.enter_context(ThreadPoolExecutor(lanes))
        shares = [count // lanes + (number < count % lanes) for number in range(lanes)]
        list(pool.map(lane, range(lanes), shares))
    return Found(
        {
            "hits": f"{counts['hits']} of {count}",
            "resumed": counts["resumed"],
            "ended with a typed error": counts["errors"],
            "wrong, or not resumed in time": counts["wrong"],
            "next generation not right": counts["stuck"],
            "longest beyond a deadline, s": max(overdue_s),
        },
        {
            "every one hits": counts["hits"] == counts["resumed"] + counts["errors"] == count,
            "some resumed, some ended": min(counts["resumed"], counts["errors"]) > 0,
            "none wrong, none stuck": not counts["wrong"] and not counts["stuck"],
        },
        {"errors within a second of the deadline": max(overdue_s) <= _GRACE_S},
    )


# ------------------------------------------------------------------------------- small models


@dataclass(frozen=True)
class World:
    """Services of a small model, and what its runners send."""

    model: SavedModel
    workers: Workers
    sent: Sent
    folder: Path

    def service(self, transport: str = "tcp") -> Service:
        bind = "tcp://127.0.0.1:*" if transport == "tcp" else f"{transport}://{self.folder}/s"
        directory = str(self.model.directory)
        return self.workers.start(directory, "--bind", bind, "--dtype", "float32", *CALM)

    def run(self, policy: str, *gpu: str, **more: Any) -> RunnerSettings:
        chosen = load_policy(policy)
        given: dict[str, Any] = {
            "dtype": "float32",
            "request_timeout_s": 30.0,
            "heartbeat_timeout_s": CALM_S,
            "shares_in_the_clear": True,
            **more,
        }
        masks = self.model.masks(chosen)
        return RunnerSettings(self.model.directory, chosen, gpu, masks=masks, **given)


@pytest.fixture
def world(saved_model: Callable[..., SavedModel], tmp_path: Path) -> Iterator[World]:
    with Workers() as workers, watched() as sent:
        yield World(saved_model("llama"), workers, sent, tmp_path)


def tokens(run: RunnerSettings) -> list[int]:
    with Runner(run) as runner:
        generation = runner.generate(PROMPT, max_new_tokens=NEW_TOKENS, with_text=False)
        list(generation)
        return generation.result().token_ids


def test_sessions_of_a_killed_service_are_made_again(world: World) -> None:
    """A service that starts again has never heard of the session."""
    first = world.service("unix")
    with Runner(world.run("clear-segment", first.endpoint, micro_batches=2)) as runner:
        generation = runner.generate(PROMPT, max_new_tokens=NEW_TOKENS, with_text=False)
        for number, _ in enumerate(generation):
            if number == NEW_TOKENS // 2:
                first.kill()
                world.workers.restart(first)
        assert generation.result().token_ids == world.model.greedy(PROMPT, NEW_TOKENS)


def elements(requests: list[Request]) -> set[bytes]:
    return {bytes(expanded(request).elements.data) for request in requests}


def test_no_service_ever_gets_the_other_share(world: World) -> None:
    four, sent = [world.service() for _ in range(4)], world.sent
    run = world.run("two-server", *(f"{s.endpoint},share={1 + n % 2}" for n, s in enumerate(four)))
    undisturbed = tokens(run)
    # One of each share, at different moments.
    sent.strike({(11, True): four[0].kill, (24, True): four[1].kill})
    assert tokens(run) == undisturbed
    got = [elements(sent.to(worker.endpoint)) for worker in four]
    first, second = got[0] | got[2], got[1] | got[3]
    assert all(got)
    # A share is uniform and drawn afresh: what is the same twice is the same share.
    assert not first & second
    # As many different ones as there were products: what was sent again was not split anew.
    assert len(first) == len(second) == NEW_TOKENS * 3 * 4
