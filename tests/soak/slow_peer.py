"""Row: a client whose connection is very slow, beside others whose is not.

The slow one goes through a proxy that lets 10 kB a second through, or cuts everything into single
bytes. It must get its tokens, or an error by its deadline; the others must not notice. What the
proxy itself takes of the processor is no matter of the service: the others are compared with
themselves while the slow client is as slow at another service.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache

import torch

from protocol.errors import TsqpError
from protocol.integer import exact_product
from protocol.messages import FUSED_MODULES, RingLinearRequest, TensorReply
from protocol.model.checkpoint import Checkpoint
from protocol.model.config import read_config
from protocol.model.quantized import load_quantized
from protocol.tensors import from_torch, to_torch
from protocol.zmq_channel import ZmqChannel
from tee_side.runner import Runner
from tests.kit.proxy import Fault, Proxy
from tests.kit.service import Worker, Workers
from tests.soak.crowd import Crowd, Job, crowd
from tests.soak.demo import DEMO
from tests.soak.row import Measured, RowResult, is_full, percentile, progress
from tests.soak.sessions import expected, generate, prompts, settings, start

NAME = "slow peer (10 kB/s, one-byte slices)"
TEST = (
    "half with a deadline that is too short for it, beside two sessions at full speed, which are"
    " compared with themselves while it is as slow at another service"
)
PASS = (
    "deadline kept: right tokens with a long one, errors with a short one; other sessions <= 10 %"
    " fewer tokens per second, p95 of a token at most doubled, none of them wrong"
)
FULL, SHORT = 20, 4
MINUTES = 6
ALONE = True

FAULTS = {"10 kB/s": Fault(bytes_per_s=10_000), "one-byte slices": Fault(slice_bytes=1)}
# The first is computed in the TEE; the other takes five seconds at 10 kB/s.
_NEW_TOKENS = 2
_LONG_S, _SHORT_S = 30.0, 0.05
_DEADLINES_S = (_LONG_S, _SHORT_S)
_GRACE_S = 1.0
_MOST_SLOWER, _MOST_SLOWER_P95 = 1.10, 2.0
# Never reached by what works: until what the slow client asks first has ended.
_FIRST_END_S = 120.0
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
    """What the slow client got, and when it was at which service.

    `right`, `errors`: by fault and deadline, of what ended while the fault lasted.
    """

    right: Counter[tuple[Fault, float]] = field(default_factory=Counter)
    errors: Counter[tuple[Fault, float]] = field(default_factory=Counter)
    wrong: int = 0
    overdue_s: list[float] = field(default_factory=list)
    windows: list[Window] = field(default_factory=list)


@dataclass
class Client:
    """A slow client: where it asks and how; `ended` is set once something ended under the fault."""

    endpoint: str
    fault: Fault
    deadline_s: float
    slow: Slow
    stop: threading.Event = field(default_factory=threading.Event)
    ended: threading.Event = field(default_factory=threading.Event)

    def count(self, *, right: bool, error: str | None, longest_s: float) -> None:
        """Count a generation, or a request. `longest_s`: how long it waited for what."""
        self.slow.wrong += not right and error is None
        self.slow.overdue_s.append(longest_s - self.deadline_s)
        if not self.stop.is_set():
            key = self.fault, self.deadline_s
            self.slow.right[key] += right
            self.slow.errors[key] += error is not None
            self.ended.set()

    def generate(self) -> None:
        """Be a session until stopped; every request has more time than it needs."""
        ids = slow_prompt()
        with Runner(settings([self.endpoint], request_timeout_s=self.deadline_s)) as runner:
            while not self.stop.is_set():
                said = generate(runner, ids, _NEW_TOKENS)
                right = said.is_right(ids, _NEW_TOKENS)
                # A token takes longer than any of its requests.
                self.count(right=right, error=said.error, longest_s=said.longest_s)

    def ask(self) -> None:
        """Ask for a product that cannot come in time, and see when that is said."""
        elements = torch.arange(192, dtype=torch.int32).view(1, 192)
        loaded = load_quantized(Checkpoint(DEMO), read_config(DEMO), 0, "gate_up_proj")
        right = exact_product(elements, loaded.weight)
        request = RingLinearRequest(
            layer_idx=0, module_names=FUSED_MODULES["gate_up_proj"], elements=from_torch(elements)
        )
        with ZmqChannel(self.endpoint, timeout_s=self.deadline_s) as channel:
            while not self.stop.is_set():
                began, error, same = time.monotonic(), None, False
                try:
                    reply = channel.call(request).response
                    same = isinstance(reply, TensorReply)
                    same = same and torch.equal(to_torch(reply.output), right)
                except TsqpError as found:
                    error = type(found).__name__
                self.count(right=same, error=error, longest_s=time.monotonic() - began)


@contextmanager
def slow_client(
    endpoint: str, fault: Fault, deadline_s: float, slow: Slow
) -> Iterator[threading.Event]:
    """Have a client ask through a proxy with a fault; yields what is set once something ended."""
    with Proxy(endpoint) as proxy, ThreadPoolExecutor(1) as pool:
        client = Client(proxy.endpoint, fault, deadline_s, slow)
        proxy.set(fault, fault)
        over = pool.submit(client.generate if deadline_s == _LONG_S else client.ask)
        over.add_done_callback(lambda _: client.ended.set())
        try:
            yield client.ended
        finally:
            client.stop.set()
            # What is under way may end at full speed.
            proxy.set()
        over.result()


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
        others = _windows(count, settle_s, window_s, (shared, other), job, slow)
    slower = {name: _slower(fault, slow, others.steps) for name, fault in FAULTS.items()}
    kept = percentile(slow.overdue_s, 100) <= _GRACE_S
    both = all(
        slow.right[fault, _LONG_S] and slow.errors[fault, _SHORT_S] for fault in FAULTS.values()
    )
    fast = all(
        found is not None and found[0] <= _MOST_SLOWER and found[1] <= _MOST_SLOWER_P95
        for found in slower.values()
    )
    well = others.requests > 0 and not others.errors and not others.wrong
    measured: dict[str, Measured] = {
        "slow client right": slow.right.total(),
        "ended with a typed error": slow.errors.total(),
        "wrong": slow.wrong,
        "longest beyond a deadline, s": percentile(slow.overdue_s, 100),
        "others' generations": others.requests,
        "of them wrong or failed": others.wrong + others.errors,
    }
    for name, found in slower.items():
        fewer, p95 = found or (None, None)
        measured[f"others' seconds a token at {name}, times"] = _known(fewer)
        measured[f"their p95 at {name}, times"] = _known(p95)
    return RowResult(
        NAME,
        TEST,
        PASS,
        count,
        measured,
        time.monotonic() - began,
        passed=not slow.wrong and both and well and not (full and not (fast and kept)),
    )


def _known(value: float | None) -> Measured:
    return "unknown" if value is None else value


def _windows(
    count: int, settle_s: float, window_s: float, services: Sequence[Worker], job: Job, slow: Slow
) -> Crowd:
    """Return what came of the others; note when what was slow."""
    with crowd(job) as others:
        others.wait_until_ready()
        for place in range(count):
            fault, deadline_s = (
                list(FAULTS.values())[place % 2],
                _DEADLINES_S[(place + place // 2) % 2],
            )
            # What drifts meanwhile is the same for both.
            for turn, shared in enumerate((True, False, False, True)):
                endpoint = services[0 if shared else 1].endpoint
                with slow_client(endpoint, fault, deadline_s, slow) as ended:
                    # It connects, which takes the processor and not the service.
                    time.sleep(settle_s)
                    start_s = time.monotonic()
                    time.sleep(window_s)
                    slow.windows.append(Window(place, fault, shared, start_s, time.monotonic()))
                    # Something has to end while it is slow.
                    if turn == 0 and not ended.wait(_FIRST_END_S):
                        raise TimeoutError(f"{fault}: got no end within {_FIRST_END_S:g} s")
            progress(place + 1)
        return others.stop()


def _slower(
    fault: Fault, slow: Slow, steps: Sequence[tuple[float, float]]
) -> tuple[float, float] | None:
    """Return how many times as long the others' tokens took beside a slow client.

    On average, by tokens per second over all windows, and at the 95th percentile. None if there
    were none to compare.
    """
    took: dict[bool, list[float]] = {True: [], False: []}
    seconds = {True: 0.0, False: 0.0}
    for window in slow.windows:
        if window.fault == fault:
            seconds[window.shared] += window.end - window.begin
            took[window.shared] += [s for at, s in steps if window.begin < at <= window.end]
    if not took[True] or not took[False]:
        return None
    each = {shared: seconds[shared] / len(took[shared]) for shared in took}
    p95 = {shared: percentile(took[shared], 95) for shared in took}
    return each[True] / each[False], p95[True] / p95[False]
