"""Row: clients that close their connections; what they had is free at once.

Two others go on beside them. A place is free again when nothing runs but these two, seen in the
server's metrics at a moment at which both are under way.
"""

from __future__ import annotations

import asyncio
import random
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from tests.kit.service import Workers
from tests.soak.asked import COMPLETIONS, Asker, Job, Tally
from tests.soak.demo import prompt
from tests.soak.row import RowResult, is_full, note, percentile, progress
from tests.soak.served import HANGS_S, Leave, Reply, Server, ask, is_idle, server
from tests.soak.sessions import start

NAME = "requests cancelled by their clients"
TEST = "streamed and whole; at once, before the first byte, mid-stream, in a prompt, in the queue"
PASS = "places free within 1 s each, gauges back at zero, other streams' tokens unaffected"
FULL, SHORT = 200, 6
MINUTES = 2
ALONE = True

_LIMIT_S = 1.0
_OTHERS = 2
_OTHER_TOKENS, _OTHER_TOKENS_SHORT = 400, 80
_LONG_TOKENS, _PROMPT_TOKENS = 450, 480
# Which cuts a long prompt into tens of steps.
_STEP_TOKENS = 16
_LOOK_S = 0.002


@dataclass(frozen=True)
class _Way:
    """How a client leaves: `when`: at once, once it is running, or behind some events."""

    streamed: bool
    when: Literal["at once", "running", "mid-stream"]
    prompt_tokens: int = 6


_WAYS = (
    _Way(streamed=True, when="at once"),
    _Way(streamed=False, when="running"),
    _Way(streamed=True, when="mid-stream"),
    _Way(streamed=True, when="running", prompt_tokens=_PROMPT_TOKENS),
    _Way(streamed=False, when="running", prompt_tokens=_PROMPT_TOKENS),
)


@dataclass
class _Row:
    """One server, two clients that stay, and others that leave."""

    served: Server
    others: Sequence[Job]
    tally: Tally = field(default_factory=Tally)
    free_s: list[float] = field(default_factory=list)
    left: int = 0
    left_at_once: int = 0
    _chance: random.Random = field(default_factory=lambda: random.Random(1))
    # Whose answer has begun and goes on.
    _under_way: set[int] = field(default_factory=set)
    _over: bool = False

    async def run(self, count: int) -> None:
        """Leave so often: in every way in turn, and then while another one has the last place."""
        async with asyncio.TaskGroup() as group:
            for number in range(_OTHERS):
                group.create_task(self._stay(number))
            for number in range(count):
                if way := dict(enumerate(_WAYS)).get(number % (len(_WAYS) + 1)):
                    await self._leave(way)
                else:
                    await self._leave_the_queue()
                await self._until_free()
                progress(number + 1)
            self._over = True

    async def _stay(self, number: int) -> None:
        turn = number
        while not self._over:
            job = self.others[turn % len(self.others)]
            turn += _OTHERS

            def arrived() -> None:
                self._under_way.add(number)

            fields = job.fields | {"stream": True}
            try:
                reply = await ask(self.served.address, job.path, fields, on_events=arrived)
            finally:
                self._under_way.discard(number)
            self.tally.judge(job, reply, self.others)

    async def _leave(self, way: _Way) -> None:
        leave = {"at once": Leave(after_s=0.0), "mid-stream": Leave(events=5)}.get(way.when)
        asking = asyncio.create_task(self._ask(way.prompt_tokens, way.streamed, leave))
        self.left_at_once += way.when == "at once"
        if way.when == "running":
            await self.served.until(lambda now: now["num_requests_running"] > _OTHERS)
            asking.cancel()
        await asyncio.wait([asking])
        self._note_left(asking)

    async def _leave_the_queue(self) -> None:
        """Leave while another one has the last place, which then leaves, too."""
        both: list[asyncio.Task[Reply]] = []
        for gauge, least in (("num_requests_running", _OTHERS + 1), ("num_requests_waiting", 1)):
            both.append(asyncio.create_task(self._ask(6, streamed=True)))
            await self.served.until(lambda now, of=gauge, n=least: now[of] >= n)  # type: ignore[misc]
        for asking in reversed(both):
            asking.cancel()
            await asyncio.wait([asking])
            self._note_left(asking)

    async def _ask(self, prompt_tokens: int, streamed: bool, leave: Leave | None = None) -> Reply:
        fields = {
            "prompt": prompt(prompt_tokens, self._chance),
            "max_tokens": min(_LONG_TOKENS, 512 - prompt_tokens),
            "ignore_eos": True,
            "stream": streamed,
        }
        return await ask(self.served.address, COMPLETIONS, fields, leave=leave)

    def _note_left(self, asking: asyncio.Task[Reply]) -> None:
        if asking.cancelled() or asking.result().left:
            self.left += 1
        else:
            note(f"got {asking.result()}, expected to leave before its end")

    async def _until_free(self) -> None:
        began = time.monotonic()
        while time.monotonic() < began + HANGS_S:
            before = set(self._under_way)
            metrics = await self.served.metrics()
            whole = len(before) == _OTHERS and before == self._under_way
            running, waiting = metrics["num_requests_running"], metrics["num_requests_waiting"]
            if whole and (running, waiting) == (_OTHERS, 0):
                self.free_s.append(time.monotonic() - began)
                return
            await asyncio.sleep(_LOOK_S)
        raise TimeoutError(f"got {metrics}, expected nothing but {_OTHERS} requests")


async def _run(row: _Row, count: int) -> bool:
    before = await row.served.metrics()
    await row.run(count)
    await row.served.until(is_idle)
    after = await row.served.metrics()
    more = {name: after[name] - before[name] for name in after}
    ended = more["ended_stop"] + more["ended_length"]
    # One that leaves before it is read was never there.
    least = row.left - row.left_at_once
    agrees = ended == row.tally.right and least <= more["ended_abort"] <= row.left
    agrees = agrees and not more["ended_error"]
    if not agrees:
        note(f"counters: got {more} more, expected {row.tally} and {row.left} that left")
    return agrees


def run(count: int) -> RowResult:
    """Leave so often, one after the other."""
    began, full = time.monotonic(), is_full(FULL, count)
    asker = Asker()
    tokens = _OTHER_TOKENS if full else _OTHER_TOKENS_SHORT
    others = [asker.long(tokens) for _ in range(8 if full else _OTHERS)]
    asker.close()
    with tempfile.TemporaryDirectory(prefix="tsqp-soak-") as folder, Workers() as workers:
        gpu = start(workers, "--arithmetic", "int8", bind=f"unix://{folder}/gpu")
        options = ("--max-sequences", str(_OTHERS + 1), "--step-tokens", str(_STEP_TOKENS))
        with server([gpu.endpoint], *options) as served:
            row = _Row(served, others)
            agrees = asyncio.run(_run(row, count))
    slowest_s = percentile(row.free_s, 100)
    return RowResult(
        NAME,
        TEST,
        PASS,
        count,
        {
            "left before the end": row.left,
            "p95 until free, s": percentile(row.free_s, 95),
            "longest until free, s": slowest_s,
            "other answers right": f"{row.tally.right} of {row.tally.right + row.tally.wrong}",
            "gauges and counters": "as sent" if agrees else "other than sent",
        },
        time.monotonic() - began,
        passed=row.left >= count
        and len(row.free_s) == count
        and row.tally.right >= _OTHERS
        and not row.tally.wrong
        and agrees
        and (slowest_s <= _LIMIT_S or not full),
    )
