"""Real gpu-services that are killed, stopped, restarted and exchanged in the middle of a decode.

The output must be that of the undisturbed run, or one typed error must come; and no service may
ever get the other share, whatever fails.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from protocol.messages import Request
from tee_side.policy.placement import load_policy
from tee_side.runner import Runner, RunnerSettings
from tests.faults.disturbed import PATIENT_S, Disturbed, Fault, Peer
from tests.faults.row import Found, Row, percentile
from tests.kit.demo import Sent, watched
from tests.kit.model import SavedModel, expanded
from tests.kit.service import CALM, CALM_S, Service, Workers

PROMPT = [1, 5, 9, 13, 2, 7, 11, 3, 8]
NEW_TOKENS = 6

_RECOVERED_S = 2.0
_IMPATIENT_S, _IMPATIENT_SHORT_S = 3.0, 0.5
_AWAY_S = 5.0
_GRACE_S = 1.0
_SIDE_BY_SIDE = 4
KILL = Fault("kill -9", Peer.kill, Peer.restart)


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
    found = Disturbed()
    with Workers() as workers, watched() as sent:
        # One of each: after every hit it is the other one that is asked, and then killed.
        found.session(workers, sent, ("tcp", "shm"), [KILL] * count, 10)
    counts, times_s = found.counts, found.times_s
    p95_s = percentile(times_s, 95)
    return Found(
        {
            "hits": f"{len(times_s)} of {count}",
            "identical": f"{counts['generations'] - counts['wrong']} of {counts['generations']}",
            "p95 recovery, s": p95_s,
            "longest recovery, s": max(times_s, default=0.0),
        },
        {"every one hits": len(times_s) == count, "outputs identical": not counts["wrong"]},
        {"p95 recovery": p95_s <= _RECOVERED_S},
    )


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
    found, lanes = Disturbed(), min(_SIDE_BY_SIDE, count)

    def lane(number: int) -> None:
        patient, chance = number % 2 == 0, random.Random(number)
        times = count // lanes + (number < count % lanes)
        # In the short form, at once, or once the session has given up.
        soon = 0.0 if patient else None
        faults = [
            replace(KILL, lasts_s=chance.uniform(0, _AWAY_S) if full else soon)
            for _ in range(times)
        ]
        timeout_s = PATIENT_S if patient else _IMPATIENT_S if full else _IMPATIENT_SHORT_S
        scheme = "shm" if number in (1, 2) else "tcp"
        found.session(workers, sent, (scheme,), faults, number, timeout_s=timeout_s)

    with Workers() as workers, watched() as sent, ThreadPoolExecutor(lanes) as pool:
        list(pool.map(lane, range(lanes)))
    counts, hits = found.counts, len(found.times_s)
    resumed = hits - counts["errors"]
    return Found(
        {
            "hits": f"{hits} of {count}",
            "resumed": resumed,
            "ended with a typed error": counts["errors"],
            "wrong, or not resumed in time": counts["wrong"],
            "longest beyond a deadline, s": found.overdue_s,
        },
        {
            "every one hits": hits == count,
            "some resumed, some ended": min(resumed, counts["errors"]) > 0,
            "none wrong, none stuck": not counts["wrong"],
        },
        {"errors within a second of the deadline": found.overdue_s <= _GRACE_S},
    )


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
