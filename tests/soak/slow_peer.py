"""Row: a client whose connection is very slow, beside others whose is not.

The slow one goes through a proxy that lets 10 kB a second through, or cuts everything into single
bytes. It must get its tokens, or an error by its deadline; the others must not notice. What the
proxy itself takes of the processor is no matter of the service: the others are compared with
themselves while the slow client is as slow at another service.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache

import torch

from protocol.errors import TsqpError
from protocol.messages import FUSED_MODULES, RingLinearRequest, TensorReply
from protocol.model.checkpoint import Checkpoint
from protocol.model.config import read_config
from protocol.model.quantized import load_quantized
from protocol.tensors import from_torch, to_torch
from protocol.zmq_channel import ZmqChannel
from tee_side.runner import Runner
from tests.soak.crowd import Job, crowd
from tests.soak.demo import DEMO
from tests.soak.row import RowResult, is_full, percentile, progress
from tests.soak.sessions import expected, generate, prompts, settings, start
from tests.tools.proxy import Fault, Proxy
from tests.tools.workers import Worker, Workers

NAME = "slow peer (10 kB/s, one-byte slices)"
TEST = "half with a deadline that is too short for it, beside two sessions at full speed"
PASS = "deadline kept; other sessions <= 10 % slower"
FULL, SHORT = 20, 2
MINUTES = 6
ALONE = True

FAULTS = {"10 kB/s": Fault(bytes_per_s=10_000), "one-byte slices": Fault(slice_bytes=1)}
_NEW_TOKENS = 8
_LONG_S, _SHORT_S = 30.0, 0.05
_DEADLINES_S = (_LONG_S, _SHORT_S)
_GRACE_S = 1.0
_MOST_SLOWER = 1.10
# How long the slow client is at each of the two services, in turns, once it has connected.
_SETTLE_S, _WINDOW_S = 0.7, 3.0
_SHORT_WINDOW_S = 0.1
_OTHERS = 2
_UNTIL_STOPPED_S = 3600.0


@cache
def slow_prompt() -> tuple[int, ...]:
    """Return what the slow client asks."""
    return prompts(1, 6, seed=3)[0]


@dataclass(frozen=True)
class Window:
    """A time (time.monotonic) in which the client was slow, at the others' service or another."""

    place: int
    fault: Fault
    shared: bool
    begin: float
    end: float


@dataclass
class Slow:
    """What the slow client got, and when it was at which service."""

    right: int = 0
    errors: int = 0
    wrong: int = 0
    overdue_s: list[float] = field(default_factory=list)
    windows: list[Window] = field(default_factory=list)

    def count(self, *, right: bool, error: str | None, overdue_s: float = 0.0) -> None:
        """Count a generation, or a request."""
        self.right += right
        self.errors += error is not None
        self.wrong += not right and error is None
        self.overdue_s.append(overdue_s)


def generate_until(stop: threading.Event, endpoint: str, deadline_s: float, slow: Slow) -> None:
    """Be a session; every request has more time than it needs."""
    with Runner(settings([endpoint], request_timeout_s=deadline_s)) as runner:
        while not stop.is_set():
            said = generate(runner, slow_prompt(), _NEW_TOKENS)
            slow.count(right=said.is_right(slow_prompt(), _NEW_TOKENS), error=said.error)


def ask_until(stop: threading.Event, endpoint: str, deadline_s: float, slow: Slow) -> None:
    """Ask for a product that cannot come in time, and see when that is said."""
    elements = torch.arange(192, dtype=torch.int32).view(1, 192)
    right = load_quantized(Checkpoint(DEMO), read_config(DEMO), 0, "gate_up_proj").product(elements)
    request = RingLinearRequest(
        layer_idx=0, module_names=FUSED_MODULES["gate_up_proj"], elements=from_torch(elements)
    )
    with ZmqChannel(endpoint, timeout_s=deadline_s) as channel:
        while not stop.is_set():
            began, error, same = time.monotonic(), None, False
            try:
                reply = channel.call(request).response
                same = isinstance(reply, TensorReply) and torch.equal(to_torch(reply.output), right)
            except TsqpError as found:
                error = type(found).__name__
            slow.count(right=same, error=error, overdue_s=time.monotonic() - began - deadline_s)


@contextmanager
def slow_client(endpoint: str, fault: Fault, deadline_s: float, slow: Slow) -> Iterator[None]:
    """Have a client ask through a proxy with a fault for as long as the block runs."""
    stop = threading.Event()
    client = generate_until if deadline_s == _LONG_S else ask_until
    with Proxy(endpoint) as proxy, ThreadPoolExecutor(1) as pool:
        proxy.set(fault, fault)
        ended = pool.submit(client, stop, proxy.endpoint, deadline_s, slow)
        try:
            yield
        finally:
            stop.set()
            # What is under way may end at full speed.
            proxy.set()
        ended.result()


def run(count: int) -> RowResult:
    """Be slow so often, for a while each time at the others' service and at another one."""
    began = time.monotonic()
    full = is_full(FULL, count)
    settle_s, window_s = (_SETTLE_S, _WINDOW_S) if full else (0.0, _SHORT_WINDOW_S)
    slow = Slow()
    with Workers() as workers:
        shared, other = start(workers), start(workers)
        expected(slow_prompt(), _NEW_TOKENS)
        job = Job((shared.endpoint,), _OTHERS, _UNTIL_STOPPED_S, 16, seed=5, timed=True)
        steps = _windows(count, settle_s, window_s, (shared, other), job, slow)
    slower = {name: _slower(fault, slow, steps) for name, fault in FAULTS.items()}
    kept = percentile(slow.overdue_s, 100) <= _GRACE_S
    return RowResult(
        NAME,
        TEST,
        PASS,
        count,
        {
            "slow client right": slow.right,
            "ended with a typed error": slow.errors,
            "wrong": slow.wrong,
            "longest beyond a deadline, s": percentile(slow.overdue_s, 100),
            "a token of the others, ms": 1000 * percentile([took for _, took in steps], 50),
            **{f"others slower by, at {name}, %": 100 * (by - 1) for name, by in slower.items()},
        },
        time.monotonic() - began,
        passed=not slow.wrong
        and slow.right + slow.errors > 0
        and not (full and (max(slower.values()) > _MOST_SLOWER or not kept)),
    )


def _windows(
    count: int, settle_s: float, window_s: float, services: Sequence[Worker], job: Job, slow: Slow
) -> list[tuple[float, float]]:
    """Return when the others' tokens came and how long each took; note when what was slow."""
    with crowd(job) as others:
        others.wait_until_ready()
        for place in range(count):
            fault, deadline_s = (
                list(FAULTS.values())[place % 2],
                _DEADLINES_S[(place + place // 2) % 2],
            )
            # What drifts meanwhile is the same for both.
            for shared in (True, False, False, True):
                endpoint = services[0 if shared else 1].endpoint
                with slow_client(endpoint, fault, deadline_s, slow):
                    time.sleep(
                        settle_s
                    )  # it connects, which takes the processor and not the service
                    start_s = time.monotonic()
                    time.sleep(window_s)
                    slow.windows.append(Window(place, fault, shared, start_s, time.monotonic()))
            progress(place)
        return others.stop().steps


def _slower(fault: Fault, slow: Slow, steps: Sequence[tuple[float, float]]) -> float:
    """Return how many times as long the others' tokens took beside a slow client; 0 if unknown.

    The median over all times that it was slow, each of them compared within itself.
    """
    ratios = []
    for place in {window.place for window in slow.windows if window.fault == fault}:
        beside, apart = (
            [
                took
                for window in slow.windows
                if window.place == place and window.shared == shared
                for at, took in steps
                if window.begin + took < at < window.end
            ]
            for shared in (True, False)
        )
        if beside and apart:
            ratios.append(percentile(beside, 50) / percentile(apart, 50))
    return percentile(ratios, 50)
