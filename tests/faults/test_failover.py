"""Real gpu-services that are killed, stopped, restarted and exchanged in the middle of a decode.

The output must be that of the undisturbed run, or one typed error must come; and no service may
ever get the other share, whatever fails.
"""

import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from protocol.messages import RingLinearRequest, RingLMHeadRequest, SeededRingLinearRequest
from tee_side.policy.placement import load_policy
from tee_side.runner import Runner, RunnerSettings
from tests.faults.disturbed import PATIENT_S, Disturbed, Fault, Peer
from tests.faults.row import Found, Row, percentile
from tests.kit.demo import watched
from tests.kit.model import SavedModel
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
    "at random points of a generation, half of them over shared memory, half under dealt",
    "outputs identical to the undisturbed run; p95 recovery <= 2 s",
    short=2,
    long=200,
    minutes=4,
)
def worker_killed(count: int, full: bool) -> Found:
    """Kill the service in use so often, each time in another generation of one of two sessions."""
    found = Disturbed()
    with Workers() as workers, watched() as sent:
        # One of each: after every hit it is the other one that is asked, and then killed.
        for dealt in (False, True):
            kills = [KILL] * ((count + (not dealt)) // 2)
            found.session(workers, sent, ("tcp", "shm"), kills, 10, dealt=dealt)
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
    " and shared memory in turns, half of the sessions under dealt",
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
        how: dict[str, Any] = {"timeout_s": timeout_s, "dealt": number in (0, 3)}
        found.session(workers, sent, (scheme,), faults, number, **how)

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


def service_of(model: SavedModel, workers: Workers, bind: str = "tcp://127.0.0.1:*") -> Service:
    return workers.start(str(model.directory), "--bind", bind, "--dtype", "float32", *CALM)


def runner_of(model: SavedModel, policy: str, *gpu: str, **more: Any) -> Runner:
    chosen = load_policy(policy)
    given: dict[str, Any] = {"dtype": "float32", "dealer_in_the_clear": True, **more}
    given |= {"request_timeout_s": 30.0, "heartbeat_timeout_s": CALM_S}
    masks = model.masks(chosen)
    return Runner(RunnerSettings(model.directory, chosen, gpu, masks=masks, **given))


def tokens(runner: Runner, at: int = -1, happens: Callable[[], object] = lambda: None) -> list[int]:
    """Generate; something `happens` behind a token."""
    with runner:
        generation = runner.generate(PROMPT, max_new_tokens=NEW_TOKENS, with_text=False)
        for number, _ in enumerate(generation):
            if number == at:
                happens()
        return generation.result().token_ids


def test_sessions_of_a_killed_service_are_made_again(
    saved_model: Callable[..., SavedModel], tmp_path: Path
) -> None:
    """A service that starts again has never heard of the session."""
    model = saved_model("llama")
    with Workers() as workers:
        first = Peer(workers, service_of(model, workers, f"unix://{tmp_path}/s"))

        def happens() -> None:
            first.kill()
            first.restart()

        runner = runner_of(model, "clear-segment", first.service.endpoint, micro_batches=2)
        assert tokens(runner, NEW_TOKENS // 2, happens) == model.greedy(PROMPT, NEW_TOKENS)


def test_no_dealer_ever_gets_what_is_for_the_service(
    saved_model: Callable[..., SavedModel],
) -> None:
    model = saved_model("llama")
    with Workers() as workers, watched() as sent:
        *gpu, dealer = [service_of(model, workers) for _ in range(3)]
        named = [one.endpoint for one in gpu]
        runner = partial(runner_of, model, "dealt", *named, dealers=(dealer.endpoint,))
        undisturbed = tokens(runner())
        sent.strike({(24, True): gpu[0].kill})
        assert tokens(runner()) == undisturbed
    asked, of_dealer = ([*sent.to(one.endpoint)] for one in (gpu[1], dealer))
    assert asked
    assert of_dealer
    # Linear operators of layers by seeds, which the service never gets.
    kinds = [{type(request) for request in found} for found in (asked, of_dealer)]
    assert kinds == [
        {RingLinearRequest, RingLMHeadRequest},
        {SeededRingLinearRequest, RingLMHeadRequest},
    ]
    heads = [
        {bytes(one.elements.data) for one in found if isinstance(one, RingLMHeadRequest)}
        for found in (asked, of_dealer)
    ]
    assert not heads[0] & heads[1]
