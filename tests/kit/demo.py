"""Sessions of the demo model: what they ask, what the model says to it, what they send, and when.

Sessions side by side are a crowd: runners with a thread each, here or in processes of their own.

For tests and rows of real processes. What the model says is computed in this process, over a
service in it that is well: integers leave no room for rounding.
"""

import os
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cache, partial
from multiprocessing import get_context
from multiprocessing.synchronize import Barrier, Event
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

from protocol.channel import PendingChannel
from protocol.errors import TsqpError
from protocol.messages import InitRequest, Request
from tee_side import runner as runner_module
from tee_side.engine.engine import EngineSettings
from tee_side.engine.tokenizer import Tokenizer
from tee_side.policy.placement import load_policy
from tee_side.runner import Runner, RunnerSettings
from tests.kit.model import assemble, finish
from tests.kit.service import Service, Workers
from tsqp.run.settings import model_directory

DEMO = model_directory("demo")
Tokens = tuple[int, ...]


@cache
def _text_ids() -> Tokens:
    """Return the token ids of a text that the demo model was never trained on."""
    text = (DEMO / "validation.txt").read_text(encoding="utf-8")
    return tuple(Tokenizer(DEMO).encode(text[:40_000]))


def prompt(length: int, chance: random.Random) -> Tokens:
    start = chance.randrange(len(_text_ids()) - length)
    return _text_ids()[start : start + length]


def prompts(count: int, length: int, seed: int = 1) -> list[Tokens]:
    chance = random.Random(seed)
    found: dict[Tokens, None] = {}
    while len(found) < count:
        found[prompt(length, chance)] = None
    return list(found)


def settings(gpu: Sequence[str], dealer: str = "", **more: Any) -> RunnerSettings:
    """Return the settings of a runner of the demo model. `more`: other fields of them.

    It is shielded, or dealt where there is a dealer.
    """
    policy, engine = load_policy("dealt" if dealer else "shielded"), EngineSettings(step_tokens=64)
    dealt = {"dealers": (dealer,), "dealer_in_the_clear": True} if dealer else {}
    given = {"threads": 1, "policy": policy, "engine": engine, **dealt, **more}
    return RunnerSettings(model=DEMO, gpu=tuple(gpu), **given)


def start(
    workers: Workers, *arguments: str, bind: str = "tcp://127.0.0.1:*", log: Path | None = None
) -> Service:
    return workers.start("demo", "--bind", bind, "--threads", "1", *arguments, log=log)


@cache
def expected(ids: Tokens, new_tokens: int) -> Tokens:
    """Return what the model says to a prompt: the same as under pads, in less time."""
    tee = assemble(DEMO, "quantized-clear")
    engine = tee.engine(step_tokens=64)
    sequence = engine.add(ids, max_new_tokens=new_tokens)
    finish(engine)
    tee.assembly.close()
    return tuple(sequence.token_ids)


@dataclass(frozen=True)
class Said:
    """A generation: tokens, seconds between them (from the start to the first), and its error."""

    tokens: Tokens
    gaps_s: tuple[float, ...]
    error: str | None = None

    @property
    def longest_s(self) -> float:
        return max(self.gaps_s, default=0.0)

    def is_right(self, ids: Tokens, new_tokens: int) -> bool:
        return self.error is None and self.tokens == expected(ids, new_tokens)


def generate(runner: Runner, ids: Tokens, new_tokens: int) -> Said:
    """Generate to the end, or to an error of ours."""
    tokens: list[int] = []
    gaps: list[float] = []
    error = None
    last = time.monotonic()
    try:
        for sampled in runner.generate(ids, max_new_tokens=new_tokens, with_text=False).steps():
            tokens.append(sampled.token_id)
            now = time.monotonic()
            gaps.append(now - last)
            last = now
    except TsqpError as found:
        error = type(found).__name__
        gaps.append(time.monotonic() - last)
    return Said(tuple(tokens), tuple(gaps), error)


def asked(runner: Runner) -> str:
    """Return the endpoint of the service that a runner asks at the moment."""
    return str(runner.services.at(0)[0].endpoint)


class Sent(threading.local):
    """What the runners of this thread hand to their transports.

    `log`: where, and what; `last_s`: when the last but for Init was (time.monotonic).
    """

    def __init__(self) -> None:
        self.log: list[tuple[str, Request]] = []
        self.last_s = 0.0
        self._due: dict[tuple[int, bool], Callable[[], object]] = {}
        self._count = 0

    def to(self, *endpoints: str) -> list[Request]:
        """Return what services were sent, or these, but for Init."""
        return [
            request
            for where, request in self.log
            if not isinstance(request, InitRequest) and (not endpoints or where in endpoints)
        ]

    def strike(self, due: Mapping[tuple[int, bool], Callable[[], object]]) -> None:
        """Do something before (False) the request with this number is sent, or behind it (True).

        No Init is counted, and nothing before this call, which is forgotten.
        """
        self.log.clear()
        self._count, self._due = 0, dict(due)

    def carry(self, endpoint: str, request: Request, send: Callable[[], int]) -> int:
        counts = not isinstance(request, InitRequest)
        # Once: a request that could not be sent is sent again under the same number.
        if counts and (before := self._due.pop((self._count, False), None)):
            before()
        request_id = send()
        self.log.append((endpoint, request))
        if counts:
            self.last_s = time.monotonic()
            self._count += 1
            if behind := self._due.pop((self._count - 1, True), None):
                behind()
        return request_id


@contextmanager
def watched() -> Iterator[Sent]:
    """Look at what all runners send that connect in the block."""
    kept, connect = Sent(), runner_module.open_channel

    def watching(endpoint: str, **given: Any) -> PendingChannel:
        channel = connect(endpoint, **given)
        submit, begin = channel.submit, channel.start

        def submitted(request: Request, *arguments: Any, **more: Any) -> int:
            return kept.carry(endpoint, request, lambda: submit(request, *arguments, **more))

        def started(prepared: Any, payload: Any, timeout_s: float | None = None) -> int:
            request = prepared.request(payload)
            return kept.carry(endpoint, request, lambda: begin(prepared, payload, timeout_s))

        channel.submit, channel.start = submitted, started  # type: ignore[method-assign]
        return channel

    with mock.patch.object(runner_module, "open_channel", watching):
        yield kept


_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_READY_S = 300.0


@dataclass
class Crowd:
    """What came of sessions side by side.

    `counts`: generations that ended, `errors` those by an error; `wrong`: with other tokens than
    the model's; `round_trips`. `steps`: when each token came (time.monotonic), and how long it
    took. `rss`: when, and bytes.
    """

    counts: Counter[str] = field(default_factory=Counter)
    steps: list[tuple[float, float]] = field(default_factory=list)
    rss: list[tuple[float, int]] = field(default_factory=list)


def resident_bytes(pid: int | str = "self") -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * _PAGE_BYTES


def relative_slope(samples: Sequence[tuple[float, int]]) -> float:
    """Return by what part memory grows over the last four fifths of a time, by regression."""
    kept = samples[len(samples) // 5 :]
    if len(kept) < 3:
        return 0.0
    mean_t = sum(t for t, _ in kept) / len(kept)
    mean = sum(size for _, size in kept) / len(kept)
    spread = sum((t - mean_t) ** 2 for t, _ in kept)
    slope = sum((t - mean_t) * (size - mean) for t, size in kept) / spread
    return slope * (kept[-1][0] - kept[0][0]) / mean


class _Times(NamedTuple):
    """Of the crowds of a process: where all wait until they are connected, and until when."""

    ready: Barrier
    stop: Event


# One, which each process of crowds is given as it starts.
_TIMES: list[_Times] = []


def _set_times(times: _Times) -> None:
    _TIMES[:] = [times]


def _round_trips(runner: Runner) -> int:
    """Return how many there were, those for pads ahead among them."""
    ahead = getattr(runner._assembly.dealers_at, "__self__", None)
    return runner.totals().round_trips + (ahead.traffic.round_trips if ahead else 0)


def _touch(runner: Runner) -> None:
    """Use all the memory that pads are kept in, and leave none.

    Else a session's memory grows until its stock has gone round, which takes minutes in a crowd.
    """
    for pads in runner.pads:
        for _ in range(2):
            pads.stock_up()
            pads.drop()


def run_crowd(gpu: str, dealer: str, texts: Mapping[Tokens, Tokens]) -> Crowd:
    """Generate until told to stop. `texts`: each session's prompt, and what the model says.

    Where there is a dealer, every second session has its pads from it.
    """
    found, lock, (times,) = Crowd(), threading.Lock(), _TIMES

    def one(runner: Runner, ids: Tokens) -> None:
        right = texts[ids]
        while not times.stop.is_set():
            said = generate(runner, ids, len(right))
            ended = time.monotonic()
            wrong = said.error is None and said.tokens != right
            with lock:
                found.counts.update(generations=1, errors=said.error is not None, wrong=wrong)
                at = ended - sum(said.gaps_s)
                for gap_s in said.gaps_s:
                    at += gap_s
                    found.steps.append((at, gap_s))

    with ExitStack() as stack:
        runners = [
            stack.enter_context(Runner(settings([gpu], dealer if number % 2 else "")))
            for number in range(len(texts))
        ]
        before = sum(map(_round_trips, runners))
        for runner in runners:
            _touch(runner)
        pool = stack.enter_context(ThreadPoolExecutor(len(runners)))
        times.ready.wait(_READY_S)
        ended = [pool.submit(one, *pair) for pair in zip(runners, texts, strict=True)]
        while not times.stop.wait(1.0):
            found.rss.append((time.monotonic(), resident_bytes()))
        for session in ended:
            session.result()
        found.counts["round_trips"] = sum(map(_round_trips, runners)) - before
    return found


@contextmanager
def crowds(
    gpu: str, parts: Sequence[Mapping[Tokens, Tokens]], *, apart: bool, dealer: str = ""
) -> Iterator[list[Future[Crowd]]]:
    """Run a crowd of each part from when all are connected to the end of the block.

    `apart`: each in a process of its own. `dealer`: see `run_crowd`.
    """
    context = get_context("spawn")
    times = _Times(context.Barrier(len(parts) + 1), context.Event())
    make: Callable[..., Executor] = ThreadPoolExecutor
    if apart:
        make = partial(ProcessPoolExecutor, mp_context=context)
    # Of an arena for each thread, pieces stay that fit nothing: growth for minutes, and no leak.
    arenas = mock.patch.dict(os.environ, MALLOC_ARENA_MAX="1")
    with arenas, make(len(parts), initializer=_set_times, initargs=(times,)) as pool:
        found = [pool.submit(run_crowd, gpu, dealer, part) for part in parts]
        try:
            times.ready.wait(_READY_S)
            yield found
        finally:
            times.stop.set()
