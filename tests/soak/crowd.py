"""Sessions that generate side by side in a process of their own: `python -m tests.soak.crowd`.

Reads a Job as a line of JSON from stdin, prints a line `ready` when all sessions are connected and
another line of JSON, a Crowd, when the time is up or stdin is closed. Each session is a runner with
a thread of its own; what it generates it compares with what the model says, and with what the model
says to the others, of other processes too.
"""

from __future__ import annotations

import dataclasses
import json
import os
import select
import subprocess
import sys
import threading
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

from protocol.pending import PendingChannel
from tee_side.runner import Runner
from tests.kit.model import assemble
from tests.soak.demo import DEMO
from tests.soak.sessions import POLICY, expected, generate, prompts, settings

Tokens: TypeAlias = tuple[int, ...]

# The first token comes of the prompt, which the runner reads by itself.
FROM_SERVICE = 1
# So many prompts for each that is wanted: many answers have a token in common.
_CANDIDATES = 20
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_SAMPLE_S = 1.0


@dataclass(frozen=True)
class Job:
    """`seconds`: how long, from when all are connected. `seed`: another one, other prompts.

    `timed`: whether to note each token's time, which takes memory. `texts`: the prompt of each
    session, if it is to be none of the seed. `others`: what the model says to sessions elsewhere.
    """

    gpu: tuple[str, ...]
    sessions: int
    seconds: float
    new_tokens: int
    seed: int = 1
    prompt_tokens: int = 6
    timed: bool = False
    texts: tuple[Tokens, ...] = ()
    others: tuple[Tokens, ...] = ()


@dataclass
class Crowd:
    """What came of it.

    `requests`: generations that ended, `errors` those by an error. `crossed`: in which a token is
    what another session's prompt has there; `lost`: with too few tokens; `wrong`: with other ones
    than the model's, crossed and lost among them. `duplicated`: replies that nobody waited for, to
    requests that were answered before. `round_trips`: of all sessions, Init not among them.
    `steps`: when each token came (time.monotonic, one clock for the machine), and how long it took.
    `rss`: when, and bytes.
    """

    requests: int = 0
    errors: int = 0
    crossed: int = 0
    duplicated: int = 0
    lost: int = 0
    wrong: int = 0
    round_trips: int = 0
    steps: list[tuple[float, float]] = field(default_factory=list)
    rss: list[tuple[float, int]] = field(default_factory=list)

    def judge(self, tokens: Tokens, right: Tokens, answers: Collection[Tokens]) -> None:
        """Count a generation that ended well. `answers`: what the model says to all sessions."""
        if tokens == right:
            return
        self.wrong += 1
        self.lost += len(tokens) < len(right)
        places = list(zip(tokens, right, strict=False))[FROM_SERVICE:]
        self.crossed += any(
            token != own and any(answer[at : at + 1] == (token,) for answer in answers)
            for at, (token, own) in enumerate(places, FROM_SERVICE)
        )


def resident_bytes(pid: int | str = "self") -> int:
    """Return how much memory a process has in use."""
    fields = Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()
    return int(fields[1]) * _PAGE_BYTES


def relative_slope(samples: list[tuple[float, int]], warm_up: float = 0.2) -> float:
    """Return by what part memory grows over the time after the warm-up, by linear regression."""
    kept = samples[int(len(samples) * warm_up) :]
    if len(kept) < 3:
        return 0.0
    mean_t = sum(t for t, _ in kept) / len(kept)
    mean = sum(size for _, size in kept) / len(kept)
    spread = sum((t - mean_t) ** 2 for t, _ in kept)
    slope = sum((t - mean_t) * (size - mean) for t, size in kept) / spread
    return slope * (kept[-1][0] - kept[0][0]) / mean


def unlike_prompts(count: int, length: int, new_tokens: int) -> dict[Tokens, Tokens]:
    """Return prompts, with what the model says to them: no two of them alike in a token of it.

    Of what comes from a service, that is. Raises RuntimeError if there are not so many.
    """
    tee = assemble(DEMO, POLICY)
    engine = tee.engine(step_tokens=64)
    found: dict[Tokens, Tokens] = {}
    taken: set[tuple[int, int]] = set()
    for ids in prompts(_CANDIDATES * count, length):
        sequence = engine.add(ids, max_new_tokens=new_tokens)
        while engine.running:
            engine.step()
        places = set(list(enumerate(sequence.token_ids))[FROM_SERVICE:])
        if len(sequence.token_ids) == new_tokens and not places & taken:
            taken |= places
            found[ids] = tuple(sequence.token_ids)
        if len(found) == count:
            break
    tee.assembly.close()
    if len(found) < count:
        raise RuntimeError(f"prompts with unlike answers: got {len(found)}, expected {count}")
    return found


def _arrived(channel: PendingChannel) -> int:
    return sum(pending.reply is not None for pending in channel._pending.values())


@contextmanager
def counted_replies(found: Crowd) -> Iterator[None]:
    """Count replies for which nobody waits, or nobody any more: all but the first to a request."""
    accept, lock = PendingChannel._accept, threading.Lock()

    def _accept(channel: PendingChannel, frames: Sequence[memoryview], received_ns: int) -> None:
        arrived = _arrived(channel)
        accept(channel, frames, received_ns)
        with lock:
            found.duplicated += _arrived(channel) == arrived

    PendingChannel._accept = _accept  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        PendingChannel._accept = accept  # type: ignore[method-assign]


def run(job: Job) -> Crowd:
    """Connect all sessions, say ready, and generate until the time is up."""
    found = Crowd()
    with counted_replies(found):
        _run(job, found)
    return found


def _run(job: Job, found: Crowd) -> None:
    lock = threading.Lock()
    texts = job.texts or prompts(job.sessions, job.prompt_tokens, job.seed)
    answers = {*(expected(ids, job.new_tokens) for ids in texts), *job.others}
    runners = [Runner(settings(job.gpu)) for _ in texts]
    began = time.monotonic()
    until = began + job.seconds
    stopped, hung_up = threading.Event(), False

    def one(runner: Runner, ids: tuple[int, ...]) -> None:
        right = expected(ids, job.new_tokens)
        before = runner.traffic.round_trips
        while not stopped.is_set():
            said = generate(runner, ids, job.new_tokens)
            ended = time.monotonic()
            with lock:
                found.requests += 1
                at = ended - said.total_s
                for gap_s in said.gaps_s if job.timed else ():
                    at += gap_s
                    found.steps.append((at, gap_s))
                if said.error is not None:
                    found.errors += 1
                else:
                    found.judge(said.tokens, right, answers)
        with lock:
            found.round_trips += runner.traffic.round_trips - before

    sys.stdout.write("ready\n")
    sys.stdout.flush()
    threads = [threading.Thread(target=one, args=pair) for pair in zip(runners, texts, strict=True)]
    for thread in threads:
        thread.start()
    while not hung_up and (now := time.monotonic()) < until:
        found.rss.append((now - began, resident_bytes()))
        hung_up = bool(select.select([sys.stdin], [], [], min(_SAMPLE_S, until - now))[0])
    stopped.set()
    for thread in threads:
        thread.join()
    for runner in runners:
        runner.close()


class CrowdProcess:
    """A crowd that runs; `result` waits for its end."""

    def __init__(self, job: Job) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.soak.crowd"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).resolve().parents[2],
            env={**os.environ, "OMP_NUM_THREADS": "1", "GOMP_SPINCOUNT": "0"},
        )
        self._write(json.dumps(dataclasses.asdict(job)))

    def _write(self, line: str) -> None:
        if self._process.stdin is None:
            raise RuntimeError("crowd: got no pipe, expected stdin")
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()

    def _line(self) -> str:
        return "" if self._process.stdout is None else self._process.stdout.readline()

    def wait_until_ready(self) -> None:
        """Wait until all sessions are connected. Raises RuntimeError if one cannot be."""
        if self._line() != "ready\n":
            raise RuntimeError("crowd: got no sessions, expected all of them connected")

    def stop(self) -> Crowd:
        """Have it end before its time; see `result`."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        return self.result()

    def result(self) -> Crowd:
        """Wait for the end. Raises RuntimeError if there is no result."""
        fields = json.loads(self._line() or "null")
        if fields is None:
            raise RuntimeError("crowd: got no result, expected one")
        pairs = {name: [tuple(pair) for pair in fields[name]] for name in ("steps", "rss")}
        return Crowd(**{**fields, **pairs})

    def close(self) -> None:
        """End it."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()


@contextmanager
def crowd(job: Job) -> Iterator[CrowdProcess]:
    """Start a crowd, and end it with the block."""
    process = CrowdProcess(job)
    try:
        yield process
    finally:
        process.close()


def main() -> None:
    """Read a job, do it, print what came of it."""
    fields = json.loads(sys.stdin.readline())
    lists = {name: tuple(map(tuple, fields[name])) for name in ("texts", "others")}
    job = Job(**{**fields, **lists, "gpu": tuple(fields["gpu"])})
    sys.stdout.write(json.dumps(dataclasses.asdict(run(job))) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
