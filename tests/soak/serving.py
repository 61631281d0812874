"""Row: many streams at once over HTTP, for as long as it takes to see what grows.

Completions and chats, streamed and whole, drawn from seeds at all temperatures, with stop strings,
several samples and grammars; what each is answered is compared with what the model says to its
prompt alone: text, tokens, logprobs, counts, ids, indices, offsets. Some clients leave at random.
"""

from __future__ import annotations

import asyncio
import random
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from tests.kit.service import Workers
from tests.soak.asked import Asker, Job, Tally
from tests.soak.crowd import relative_slope, resident_bytes
from tests.soak.row import RowResult, is_full, note, progress
from tests.soak.served import Leave, Server, ask, is_idle, server
from tests.soak.sessions import start

NAME = "serving: 64 concurrent streams over HTTP, 10 min"
TEST = "at least so many answers, each compared with what the model says to its prompt alone"
PASS = (
    "0 lost, duplicated or crossed; gauges back at zero, counters as sent; memory slope < 1 % after"
    " warm-up"
)
FULL, SHORT = 10_000, 60
MINUTES = 11
ALONE = True

_SECONDS = 600.0
_STREAMS, _STREAMS_SHORT = 64, 12
_JOBS, _JOBS_SHORT = 240, 32
_NEW_TOKENS, _NEW_TOKENS_SHORT = 48, 12
_LEAVES = 0.1
_MAX_SLOPE = 0.01
_SAMPLE_S = 1.0


@dataclass
class _Load:
    """Clients side by side; `until` (time.monotonic) and `count` are both to be reached."""

    served: Server
    jobs: Sequence[Job]
    count: int
    until: float
    tally: Tally = field(default_factory=Tally)
    left: int = 0
    rss: list[tuple[float, int]] = field(default_factory=list)

    async def run(self, streams: int) -> None:
        sampling = asyncio.create_task(self._sample())
        async with asyncio.TaskGroup() as group:
            for number in range(streams):
                group.create_task(self._client(random.Random(number)))
        sampling.cancel()
        with suppress(asyncio.CancelledError):
            await sampling

    async def _client(self, chance: random.Random) -> None:
        while self.tally.right + self.tally.wrong < self.count or time.monotonic() < self.until:
            job = chance.choice(self.jobs)
            leave = None
            if chance.random() < _LEAVES:
                leave = chance.choice([Leave(events=1), Leave(chance.uniform(0, 0.5))])
            await self.ask(job, chance, leave)
            progress(self.tally.right)

    async def ask(self, job: Job, chance: random.Random, leave: Leave | None = None) -> None:
        """Ask for one answer, streamed or whole; one that is left is streamed."""
        fields = dict(job.fields)
        if leave is not None or chance.random() < 0.75:
            usage = {"stream_options": {"include_usage": True}} if chance.random() < 0.5 else {}
            fields |= {"stream": True} | usage
        try:
            reply = await ask(self.served.address, job.path, fields, leave=leave)
        except (TimeoutError, OSError) as error:
            note(f"got {type(error).__name__}, expected an answer")
            self.tally.lost += 1
            self.tally.wrong += 1
            return
        if reply.left:
            self.left += 1
        else:
            self.tally.judge(job, reply, self.jobs)

    async def _sample(self) -> None:
        while True:
            self.rss.append((time.monotonic(), resident_bytes(self.served.process.pid)))
            await asyncio.sleep(_SAMPLE_S)


def _as_sent(before: dict[str, float], after: dict[str, float], load: _Load) -> bool:
    """Say whether the counters are what was sent; of those that left, what they may be."""
    more = {name: after[name] - before[name] for name in after}
    done = load.tally.right
    ended = more["ended_stop"] + more["ended_length"]
    # Who leaves before the request is read is not counted; who leaves late may have had it all.
    agrees = (
        done <= ended <= ended + more["ended_abort"] <= done + load.left
        and not more["ended_error"]
        and more["generation_tokens"] >= load.tally.tokens
        and more["prompt_tokens"] >= load.tally.prompt_tokens
    )
    if not load.left:
        tokens = more["generation_tokens"], more["prompt_tokens"]
        agrees = agrees and tokens == (load.tally.tokens, load.tally.prompt_tokens)
    if not agrees:
        note(f"counters: got {more} more, expected {load.tally}, {load.left} left")
    return agrees


async def _run(
    served: Server, jobs: Sequence[Job], count: int, *, full: bool
) -> tuple[_Load, bool]:
    """Return what came of it, and whether gauges and counters are right."""
    first = await served.metrics()
    load = _Load(served, jobs, count, time.monotonic() + (_SECONDS if full else 0.0))
    await load.run(_STREAMS if full else _STREAMS_SHORT)
    await served.until(is_idle)
    between = await served.metrics()
    # Where all stay to the end, the counters are exact.
    exact = _Load(served, jobs, 0, 0.0)
    chance = random.Random(0)
    for job in jobs[: len(jobs) // 4]:
        await exact.ask(job, chance)
    await served.until(is_idle)
    last = await served.metrics()
    agrees = _as_sent(first, between, load) and _as_sent(between, last, exact)
    load.tally.wrong += exact.tally.wrong
    return load, agrees


def run(count: int) -> RowResult:
    """Ask for ten minutes, and judge whether that were enough answers and right."""
    began, full = time.monotonic(), is_full(FULL, count)
    asker = Asker()
    jobs = asker.jobs(*((_JOBS, _NEW_TOKENS) if full else (_JOBS_SHORT, _NEW_TOKENS_SHORT)))
    asker.close()
    with tempfile.TemporaryDirectory(prefix="tsqp-soak-") as folder, Workers() as workers:
        gpu = start(workers, "--arithmetic", "int8", bind=f"unix://{folder}/gpu")
        with server([gpu.endpoint]) as served:
            load, agrees = asyncio.run(_run(served, jobs, count, full=full))
    tally, slope = load.tally, relative_slope(load.rss)
    return RowResult(
        NAME,
        TEST,
        PASS,
        count,
        {
            "answers": tally.right + tally.wrong,
            "lost": tally.lost,
            "duplicated": tally.duplicated,
            "crossed": tally.crossed,
            "other than alone": tally.wrong,
            "left before the end": load.left,
            "tokens": tally.tokens,
            "gauges and counters": "as sent" if agrees else "other than sent",
            "memory slope of the server, %": 100 * slope,
            "MiB of the server": load.rss[-1][1] / 2**20,
        },
        time.monotonic() - began,
        passed=tally.right >= count
        and not (tally.wrong or tally.lost or tally.duplicated or tally.crossed)
        and load.left > 0
        and agrees
        and (slope < _MAX_SLOPE or not full),
    )
