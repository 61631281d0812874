"""Row: four times as many clients as a server runs at a time, more than run and wait together.

Some have a key that allows two requests at a time. Refused clients come again when they were told
to; all that are let in are compared with what the model says.
"""

from __future__ import annotations

import asyncio
import itertools
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tee_side.serve.keys import PREFIX, ApiKey, hash_of
from tests.kit.service import Workers
from tests.soak.asked import Asker, Job, Tally
from tests.soak.row import RowResult, is_full, note, percentile, progress
from tests.soak.served import Server, ask, is_idle, server
from tests.soak.sessions import start

NAME = "overload: four times as many clients as sequences"
TEST = "so many requests, some with a key that allows two at a time; then as many as at capacity"
PASS = (
    "admitted: right, p95 between two tokens <= 1.5 x that at capacity; refused: 429 or 503 with"
    " Retry-After; none hangs"
)
FULL, SHORT = 2000, 80
MINUTES = 3
ALONE = True

_SEQUENCES, _WAITING, _TIMES = 8, 8, 4
_LIMITED, _AT_A_TIME = 6, 2
_NEW_TOKENS, _NEW_TOKENS_SHORT = 48, 12
_MAX_RATIO = 1.5
# As the SDKs do; in the short form as soon as others have had a turn.
_PATIENCE_SHORT_S = 0.05
_KEYS = {name: f"{PREFIX}{name * 4}" for name in ("unlimited", "limited")}


@dataclass
class _Clients:
    """Clients side by side, until so many requests are over."""

    served: Server
    jobs: Sequence[Job]
    full: bool
    tally: Tally = field(default_factory=Tally)
    refused: Counter[int] = field(default_factory=Counter)
    untold: int = 0
    hung: int = 0
    gaps_s: list[float] = field(default_factory=list)
    _begun: int = 0

    async def run(self, clients: int, count: int, *, limited: int = 0) -> None:
        """Ask until `count` requests are over, with `limited` of the clients under a limit."""
        async with asyncio.TaskGroup() as group:
            for number in range(clients):
                headers = _headers("limited" if number < limited else "unlimited")
                group.create_task(self._client(number, headers, count))

    async def _client(self, number: int, headers: Mapping[str, str], count: int) -> None:
        for turn in itertools.count(number):
            if self._begun >= count:
                return
            self._begun += 1
            wait_s = await self._ask(self.jobs[turn % len(self.jobs)], headers)
            progress(self._begun)
            await asyncio.sleep(wait_s if self.full else min(wait_s, _PATIENCE_SHORT_S))

    async def _ask(self, job: Job, headers: Mapping[str, str]) -> float:
        """Return after how many seconds to come again."""
        try:
            fields = job.fields | {"stream": True}
            reply = await ask(self.served.address, job.path, fields, headers=headers)
        except (TimeoutError, OSError) as error:
            self.hung += 1
            note(f"got {type(error).__name__}, expected an answer or a refusal")
            return 0.0
        if reply.status not in (429, 503):
            self.tally.judge(job, reply, self.jobs)
            self.gaps_s += [b - a for a, b in itertools.pairwise(reply.times)]
            return 0.0
        self.refused[reply.status] += 1
        told = reply.headers.get("retry-after", "")
        self.untold += not told.isdigit()
        return float(told) if told.isdigit() else 1.0


async def _run(served: Server, jobs: Sequence[Job], count: int, *, full: bool) -> list[_Clients]:
    found = []
    for clients, requests, limited in (
        (_SEQUENCES, count // 4, 0),
        (_TIMES * _SEQUENCES, count, _LIMITED),
    ):
        one = _Clients(served, jobs, full)
        await one.run(clients, requests, limited=limited)
        await served.until(is_idle)
        found.append(one)
    return found


def _headers(name: str) -> dict[str, str]:
    return {"authorization": f"Bearer {_KEYS[name]}"}


def _keys(folder: Path) -> Path:
    limits = {"unlimited": None, "limited": _AT_A_TIME}
    entries = [
        ApiKey(name=name, sha256=hash_of(key), concurrent=limits[name]).entry()
        for name, key in _KEYS.items()
    ]
    path = folder / "keys.toml"
    path.write_text("\n".join(entries), encoding="utf-8")
    path.chmod(0o600)
    return path


def run(count: int) -> RowResult:
    """Ask at capacity first, and then with four times as many clients."""
    began, full = time.monotonic(), is_full(FULL, count)
    asker = Asker()
    jobs = [asker.long(_NEW_TOKENS if full else _NEW_TOKENS_SHORT) for _ in range(24)]
    asker.close()
    with tempfile.TemporaryDirectory(prefix="tsqp-soak-") as name, Workers() as workers:
        gpu = start(workers, "--arithmetic", "int8", bind=f"unix://{name}/gpu")
        options = ("--max-sequences", str(_SEQUENCES), "--max-waiting", str(_WAITING))
        keys = ("--api-keys", str(_keys(Path(name))))
        with server([gpu.endpoint], *options, *keys, headers=_headers("unlimited")) as served:
            usual, over = asyncio.run(_run(served, jobs, count, full=full))
    p95_s = [percentile(one.gaps_s, 95) for one in (usual, over)]
    ratio = p95_s[1] / p95_s[0]
    return RowResult(
        NAME,
        TEST,
        PASS,
        count,
        {
            "answered right": over.tally.right + usual.tally.right,
            "other than alone": over.tally.wrong + usual.tally.wrong,
            "refused with 503": over.refused[503],
            "refused with 429": over.refused[429],
            "without Retry-After": over.untold,
            "hung": over.hung + usual.hung,
            "p95 between two tokens at capacity, ms": 1e3 * p95_s[0],
            "overloaded, ms": 1e3 * p95_s[1],
            "ratio": ratio,
        },
        time.monotonic() - began,
        passed=usual.tally.right >= count // 4
        and over.tally.right + over.refused.total() >= count
        and min(over.tally.right, over.refused[503], over.refused[429]) > 0
        and not usual.refused
        and not (usual.tally.wrong or over.tally.wrong or usual.hung or over.hung or over.untold)
        and (ratio <= _MAX_RATIO or not full),
    )
