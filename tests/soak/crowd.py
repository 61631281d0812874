"""Sessions that generate side by side in a process of their own: `python -m tests.soak.crowd`.

Reads a Job as a line of JSON from stdin, prints a line `ready` when all sessions are connected and
another line of JSON, a Crowd, when the time is up or stdin is closed. Each session is a runner with
a thread of its own; what it generates it compares with what the model says, and with what the model
says to the others.
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
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from tee_side.runner import Runner
from tests.soak.sessions import expected, generate, prompts, settings

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_SAMPLE_S = 1.0


@dataclass(frozen=True)
class Job:
    """`seconds`: how long, from when all are connected. `seed`: another one, other prompts.

    `timed`: whether to note each token's time, which takes memory.
    """

    gpu: tuple[str, ...]
    sessions: int
    seconds: float
    new_tokens: int
    seed: int = 1
    prompt_tokens: int = 6
    timed: bool = False


@dataclass
class Crowd:
    """What came of it.

    `requests`: generations that ended, `errors` those by an error. `crossed`: whose tokens are
    those of another session's prompt; `duplicated`: tokens too many; `lost`: too few; `wrong`:
    other tokens. `round_trips`: of all sessions, Init not among them. `steps`: when each token came
    (time.monotonic, one clock for the machine), and how long it took. `rss`: when, and bytes.
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


def run(job: Job) -> Crowd:
    """Connect all sessions, say ready, and generate until the time is up."""
    found = Crowd()
    lock = threading.Lock()
    texts = prompts(job.sessions, job.prompt_tokens, job.seed)
    answers = {expected(ids, job.new_tokens) for ids in texts}
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
                elif said.tokens != right:
                    found.crossed += said.tokens in answers
                    found.duplicated += len(said.tokens) > len(right)
                    found.lost += len(said.tokens) < len(right)
                    found.wrong += 1
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
    return found


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
    job = Job(**{**fields, "gpu": tuple(fields["gpu"])})
    sys.stdout.write(json.dumps(dataclasses.asdict(run(job))) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
