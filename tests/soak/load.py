"""Row: many sessions at once, for as long as it takes to see what grows.

64 sessions in four processes over one service, each with a prompt of its own, to which the model
says other tokens than to any other. The service counts what it answered, and the sessions what they
were answered: nothing may be lost or done twice, and every operator of every token has to have been
asked for. A reply that comes when nobody waits for it counts as done twice, too.
"""

from __future__ import annotations

import re
import tempfile
import time
import urllib.request
from contextlib import ExitStack
from pathlib import Path

from protocol.messages import FUSED_MODULES
from protocol.model.config import read_config
from tee_side.policy.placement import load_policy
from tests.kit.service import Worker, Workers
from tests.soak.crowd import (
    FROM_SERVICE,
    Crowd,
    Job,
    crowd,
    relative_slope,
    resident_bytes,
    unlike_prompts,
)
from tests.soak.demo import DEMO
from tests.soak.row import RowResult, is_full, note, progress
from tests.soak.sessions import POLICY, start

NAME = "load: 64 concurrent sessions, 10 min"
TEST = "at least so many generations, each compared with what the model says to its prompt"
PASS = "0 lost, 0 duplicated, 0 tokens crossed between sessions; memory slope < 1 % after warm-up"
FULL, SHORT = 10_000, 60
MINUTES = 11
ALONE = True

_SECONDS, _SECONDS_SHORT = 600.0, 3.0
_PROCESSES, _SESSIONS_EACH = 4, 16
_SESSIONS_SHORT = 2
_PROMPT_TOKENS, _NEW_TOKENS = 6, 3
_MAX_SLOPE = 0.01
_REQUESTS = re.compile(r'^tsqp_requests_total\{code="(\w+)",method="(\w+)"\} (\S+)$', re.MULTILINE)


def answered(url: str) -> dict[tuple[str, str], int]:
    """Return how many requests a service answered, by code and method."""
    with urllib.request.urlopen(url, timeout=10) as reply:
        text = reply.read().decode()
    return {(code, method): int(float(n)) for code, method, n in _REQUESTS.findall(text)}


def start_counting(workers: Workers, log: Path) -> tuple[Worker, str]:
    """Start a service that serves metrics, and return it with their address."""
    worker = start(workers, "--metrics", "127.0.0.1:0", log=log)
    found = re.search(r"url=(\S+)", log.read_text(encoding="utf-8"))
    if found is None:
        raise RuntimeError("the service's log: got no address of metrics, expected one")
    return worker, found[1]


def _jobs(endpoint: str, processes: int, sessions: int, seconds: float) -> list[Job]:
    """Return what each process does; what one session is told is unlike what any other is."""
    answers = unlike_prompts(processes * sessions, _PROMPT_TOKENS, _NEW_TOKENS)
    texts, others = tuple(answers), tuple(answers.values())
    return [
        Job(
            (endpoint,),
            sessions,
            seconds,
            _NEW_TOKENS,
            texts=texts[first : first + sessions],
            others=others,
        )
        for first in range(0, len(texts), sessions)
    ]


def operators_of_a_generation() -> int:
    """Return how many linear operators of one generation the policy places on a service."""
    policy, layers = load_policy(POLICY), read_config(DEMO).num_hidden_layers
    of_a_token = sum(
        policy.at(operator, layer, "decode").place == "gpu"
        for operator in FUSED_MODULES
        for layer in range(layers)
    )
    return (_NEW_TOKENS - FROM_SERVICE) * of_a_token


def run(count: int) -> RowResult:
    """Generate for ten minutes, and judge whether that were enough and right."""
    began = time.monotonic()
    full = is_full(FULL, count)
    seconds = _SECONDS if full else _SECONDS_SHORT
    sessions = _SESSIONS_EACH if full else _SESSIONS_SHORT
    processes = _PROCESSES if full else 1
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tsqp-soak-")))
        workers = stack.enter_context(Workers())
        worker, url = start_counting(workers, folder / "log")
        crowds = [
            stack.enter_context(crowd(job))
            for job in _jobs(worker.endpoint, processes, sessions, seconds)
        ]
        for one in crowds:
            one.wait_until_ready()
        rss: list[tuple[float, int]] = []
        ready = time.monotonic()
        while (now := time.monotonic()) < ready + seconds:
            rss.append((now - ready, resident_bytes(worker.pid)))
            progress(int(count * (now - ready) / seconds))
            time.sleep(min(1.0, max(0.01, ready + seconds - now)))
        found = [one.result() for one in crowds]
        counted = answered(url)
    return _judged(count, found, counted, rss, time.monotonic() - began)


def _judged(
    count: int,
    found: list[Crowd],
    counted: dict[tuple[str, str], int],
    rss: list[tuple[float, int]],
    seconds: float,
) -> RowResult:
    requests = sum(one.requests for one in found)
    errors = sum(one.errors for one in found)
    lost = sum(one.lost for one in found) + errors
    crossed = sum(one.crossed for one in found)
    wrong = sum(one.wrong for one in found)
    asked = sum(one.round_trips for one in found)
    done = sum(n for (code, method), n in counted.items() if method not in ("Init", "Health"))
    duplicated = sum(one.duplicated for one in found) + max(0, done - asked)
    slopes = [relative_slope(one.rss) for one in found]
    service_slope = relative_slope(rss)
    expected = requests * operators_of_a_generation()
    if asked != done or asked < expected:
        note(f"requests: got {asked}, the service counted {counted}; expected {expected}")
    grows = max([service_slope, *slopes]) >= _MAX_SLOPE and is_full(FULL, count)
    return RowResult(
        NAME,
        TEST,
        PASS,
        count,
        {
            "generations": requests,
            "lost": lost,
            "duplicated": duplicated,
            "crossed": crossed,
            "other tokens": wrong,
            "operators asked for": asked,
            "of these answered once": done,
            "memory slope of the service, %": 100 * service_slope,
            "largest of a runner process, %": 100 * max(slopes),
            "MiB of the service": rss[-1][1] / 2**20,
        },
        seconds,
        passed=(requests >= count or not is_full(FULL, count))
        and requests > 0
        and not (lost or duplicated or crossed or wrong)
        and asked == done >= expected
        and not grows,
    )
