"""Row: services are killed while a server has streams under way.

With a second service, every stream goes on and says what it would have said. With one, which comes
back within five seconds, a server that waits longer goes on, too; one that waits for less ends each
request by one typed error at most, says so in /health, and serves again.
"""

from __future__ import annotations

import asyncio
import json
import random
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from tests.kit.service import Worker, Workers
from tests.soak.asked import Asker, Job, Tally, is_broken_off
from tests.soak.row import RowResult, is_full, note, percentile, progress
from tests.soak.served import HANGS_S, Reply, Server, ask, is_idle, server
from tests.soak.sessions import start

NAME = "services killed (kill -9) under a server's streams"
TEST = "in turns: a second one present; the only one, with a deadline longer and shorter than that"
PASS = "tokens as alone, or one typed error where no service was there; /health 503, then 200 again"
FULL, SHORT = 90, 3
MINUTES = 4

_STREAMS = 6
_NEW_TOKENS = 40
_PATIENT_S, _IMPATIENT_S = 60.0, 1.0
_AWAY_S, _AWAY_SHORT_S = 5.0, 0.2
_LOOK_S = 0.02


@dataclass
class _Streams:
    """Clients that ask again and again. `errors`: answers that ended by one, rightly."""

    served: Server
    jobs: Sequence[Job]
    tally: Tally = field(default_factory=Tally)
    broken: int = 0
    refused: int = 0
    wrong: int = 0
    # Of answers that have begun and go on.
    under_way: int = 0
    over: bool = False

    @property
    def errors(self) -> int:
        """How many requests ended by an error, or were refused with one."""
        return self.broken + self.refused

    def has(self, right: int) -> bool:
        """Say whether so many answers were right."""
        return self.tally.right >= right

    async def client(self, number: int) -> None:
        """Ask until it is over."""
        chance = random.Random(number)
        while not self.over:
            job, begun = chance.choice(self.jobs), False

            def came() -> None:
                nonlocal begun
                self.under_way += not begun
                begun = True

            streamed = chance.random() < 0.75
            fields = job.fields | {"stream": streamed}
            try:
                reply = await ask(self.served.address, job.path, fields, on_events=came)
            except (TimeoutError, OSError) as error:
                self.wrong += 1
                note(f"got {type(error).__name__}, expected an answer or an error")
                continue
            finally:
                self.under_way -= begun
            await self._judge(job, reply)

    async def _judge(self, job: Job, reply: Reply) -> None:
        if reply.status == 503:
            self.refused += _is_typed(reply)
            self.wrong += not _is_typed(reply)
            await asyncio.sleep(_LOOK_S)
        elif is_broken_off(job, reply):
            self.broken += 1
        else:
            self.tally.judge(job, reply, self.jobs)


def _is_typed(reply: Reply) -> bool:
    error = json.loads(reply.body)["error"]
    return set(error) == {"message", "type", "param", "code"} and error["code"] is not None


@dataclass
class _Found:
    """What came of all three."""

    right: int = 0
    wrong: int = 0
    broken: int = 0
    refused: int = 0
    hits: int = 0
    back_s: list[float] = field(default_factory=list)

    def add(self, streams: _Streams) -> None:
        """Add what clients found."""
        self.right += streams.tally.right
        self.wrong += streams.tally.wrong + streams.wrong
        self.broken += streams.broken
        self.refused += streams.refused


class _Part:
    """A server over some services, one of which is killed so often."""

    def __init__(self, workers: Workers, jobs: Sequence[Job], *, full: bool) -> None:
        self._workers, self._jobs, self._full = workers, jobs, full
        self._chance = random.Random(3)
        self.found = _Found()

    def run(self, services: list[Worker], kills: int, timeout_s: float, label: str) -> None:
        """Kill the services in turn."""
        found = self.found
        before = found.right, found.broken + found.refused
        options = ("--request-timeout-s", str(timeout_s))
        with server([one.endpoint for one in services], *options) as served:
            streams = _Streams(served, self._jobs)
            asyncio.run(self._kill(streams, services, kills, impatient=timeout_s < _AWAY_S))
            asyncio.run(served.until(is_idle))
        found.add(streams)
        errors = found.broken + found.refused - before[1]
        if found.right == before[0] or (errors > 0) != (timeout_s < _AWAY_S):
            found.wrong += 1
            note(f"{label}: got {streams}, expected other ends")

    async def _kill(
        self, streams: _Streams, services: list[Worker], kills: int, *, impatient: bool
    ) -> None:
        async with asyncio.TaskGroup() as group:
            for number in range(_STREAMS):
                group.create_task(streams.client(number))
            for number in range(kills):
                await self._until(lambda: streams.under_way > 0)
                await asyncio.sleep(self._chance.uniform(0, 0.1))
                at = number % len(services)
                lost, streaming = streams.served.logged("service_lost"), streams.under_way > 0
                errors = streams.errors
                services[at].kill()
                if len(services) == 1:
                    await self._until_health(streams.served, 503)
                if impatient:
                    # /health says 503 as soon as a step waits; here it is to wait in vain.
                    await self._until(lambda errors=errors: streams.errors > errors)
                else:
                    most_s = _AWAY_S if self._full else _AWAY_SHORT_S
                    await asyncio.sleep(self._chance.uniform(0, most_s))
                services[at] = await asyncio.to_thread(self._workers.restart, services[at])
                began, more = time.monotonic(), streams.tally.right + 1
                await self._until_health(streams.served, 200)
                await self._until(partial(streams.has, more))
                self.found.back_s.append(time.monotonic() - began)
                # The other one of two was in use since the last time.
                self.found.hits += streaming and streams.served.logged("service_lost") > lost
                progress(len(self.found.back_s))
            streams.over = True

    async def _until_health(self, served: Server, status: int) -> None:
        until = time.monotonic() + HANGS_S
        while (await ask(served.address, "/health")).status != status:
            if time.monotonic() > until:
                raise TimeoutError(f"/health: got another status, expected {status}")
            await asyncio.sleep(_LOOK_S)

    async def _until(self, holds: Callable[[], bool]) -> None:
        until = time.monotonic() + HANGS_S
        while not holds():
            if time.monotonic() > until:
                raise TimeoutError("streams: got none that go on, expected some")
            await asyncio.sleep(_LOOK_S / 10)


def run(count: int) -> RowResult:
    """Kill so often: a third each."""
    began, full = time.monotonic(), is_full(FULL, count)
    asker = Asker()
    jobs = [*asker.jobs(16, _NEW_TOKENS), *(asker.long(_NEW_TOKENS) for _ in range(8))]
    asker.close()
    with tempfile.TemporaryDirectory(prefix="tsqp-soak-") as folder, Workers() as workers:
        part = _Part(workers, jobs, full=full)

        def service(scheme: str, name: str) -> Worker:
            return start(workers, "--arithmetic", "int8", bind=f"{scheme}://{folder}/{name}")

        third = count // 3
        both = [service("unix", "a"), service("shm", "b")]
        part.run(both, count - 2 * third, _PATIENT_S, "a second one")
        part.run([service("shm", "c")], third, _PATIENT_S, "the only one, waited for")
        part.run([service("unix", "d")], third, _IMPATIENT_S, "the only one, given up")
    found = part.found
    return RowResult(
        NAME,
        TEST,
        PASS,
        count,
        {
            "killed under streams": f"{found.hits} of {count}",
            "right": found.right,
            "ended by one typed error": found.broken,
            "refused meanwhile": found.refused,
            "wrong": found.wrong,
            "p95 until right again, s": percentile(found.back_s, 95),
        },
        time.monotonic() - began,
        passed=found.hits == len(found.back_s) == count and not found.wrong,
    )
