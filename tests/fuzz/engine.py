"""The loop: take a kept case, change it, execute it, judge it, keep it if it did something new.

A case passes if it ends in a result or in one of the errors that its target may raise, within
50 ms and 64 MiB, and the error's text is one short printable line.

*New* is an outcome that no kept case has: what was refused where, digits, quoted parts and unknown
names left out, or the kind of message that was read. Of cases with one outcome a small one stays.

**Time** is looked at in every execution. What took longer on the clock than anything before is
executed again, three times, and counts as the quickest of all, by this thread's own time: the
machine is shared. **Memory** is looked at in every execution, too: the peak of the process's
resident memory is set back before each batch and read after it (/proc/self/clear_refs), and no
execution can have taken more than the batch did. Where a batch took too much, and in every 1000th
execution, and in every one whose outcome is new, tracemalloc says what the one execution took.
"""

from __future__ import annotations

import base64
import re
import time
import tracemalloc
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

from protocol.errors import TsqpError
from tests.fuzz.mutate import NAMES, Mutator

# What a target reads: frames, pieces of a stream, or one file.
Case: TypeAlias = tuple[bytes, ...]

MAX_SECONDS = 0.050
MAX_BYTES = 64 * 1024 * 1024
MAX_TEXT = 3100
BATCH = 2000
_SAMPLED_EVERY = 1000
# Kept on disk, for each target.
MAX_KEPT = 80
MAX_KEPT_BYTES = 1536
CORPUS = Path(__file__).with_name("corpus")

_DIGITS = str.maketrans("", "", "0123456789")
_WORD = re.compile("[A-Za-z_]+")
_QUOTED = re.compile(r"'[^']*'|\"[^\"]*\"|\[[^]]*\]|\(.*\)|/[^ :]*/")


@dataclass(frozen=True)
class Target:
    """One reader. `execute` returns what kind of result it was, or raises one of `errors`.

    `weight`: how many of all executions it gets, in proportion.
    """

    name: str
    seeds: Callable[[], list[Case]]
    mutate: Callable[[Mutator, Case, Case], Case]
    execute: Callable[[Case], str]
    errors: tuple[type[TsqpError], ...]
    weight: float = 1.0


@dataclass(frozen=True)
class Finding:
    """A case that does not pass, and why."""

    target: str
    why: str
    case: Case

    def __str__(self) -> str:
        return f"{self.target}: {self.why}: {encode_case(self.case)[:400]}"


@dataclass
class Report:
    """What a run found. `slowest_s`: of the execution that takes longest, at its quickest.

    `largest_bytes`: of one measured execution. `peak_bytes`: by how much a whole batch raised
    resident memory, at most.
    """

    executions: dict[str, int] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)
    slowest_s: float = 0.0
    largest_bytes: int = 0
    peak_bytes: int = 0
    seconds: float = 0.0


def encode_case(case: Case) -> str:
    """Write a case as one line of text."""
    return ",".join(base64.b64encode(part).decode() for part in case)


def decode_case(line: str) -> Case:
    """Read what `encode_case` wrote."""
    return tuple(base64.b64decode(part, validate=True) for part in line.split(","))


def read_corpus(target: Target, folder: Path = CORPUS) -> list[Case]:
    """Return the kept cases of a target."""
    path = folder / f"{target.name}.txt"
    if not path.exists():
        return []
    lines = path.read_text(encoding="ascii").splitlines()
    return [decode_case(line) for line in lines if line and not line.startswith("#")]


def write_corpus(target: Target, cases: Sequence[Case], folder: Path = CORPUS) -> None:
    """Replace the kept cases of a target by the smallest of these."""
    kept = sorted((c for c in cases if _size(c) <= MAX_KEPT_BYTES), key=_size)[:MAX_KEPT]
    head = f"# {target.name}: one case a line, its parts in base64\n"
    text = head + "".join(f"{encode_case(case)}\n" for case in sorted(kept))
    (folder / f"{target.name}.txt").write_text(text, encoding="ascii")


def _size(case: Case) -> int:
    return sum(map(len, case)) + len(case)


def _kind(error: TsqpError, known: frozenset[str]) -> str:
    """Say which check refused what, whatever names and numbers stood in the case.

    `known`: names that stay; of the others there are as many as there are cases.
    """
    where = _WORD.sub(lambda word: word[0] if word[0] in known else "?", _plain(error.where))
    got, expected = _plain(error.got)[:40], _plain(error.expected)[:60]
    return f"{type(error).__name__}|{where[-80:]}|{got}|{expected}"


def _plain(text: str) -> str:
    return _QUOTED.sub("", text[:400]).translate(_DIGITS)


class Fuzzer:
    """Executes cases of one target, and keeps what is new.

    `timed`: whether an execution that takes too long is a finding.
    """

    def __init__(
        self, target: Target, seed: int, *, folder: Path = CORPUS, timed: bool = True
    ) -> None:
        self.target = target
        self._timed = timed
        self.report = Report({target.name: 0})
        self._mutator = Mutator(seed)
        self._kept: dict[str, Case] = {}
        self._cases: list[Case] = []
        self._good: list[Case] = []
        parts = [part for case in target.seeds() for part in case]
        words = {word for part in parts for word in _WORD.findall(part.decode("latin-1"))}
        self._known = frozenset(words.union(NAMES))
        for case in [*target.seeds(), *read_corpus(target, folder)]:
            self.execute(case)

    @property
    def kept(self) -> list[Case]:
        """One case for each outcome."""
        return list(self._kept.values())

    @property
    def outcomes(self) -> list[str]:
        """Every outcome that was met."""
        return sorted(self._kept)

    def run(self, executions: int) -> None:
        """Execute so many changed cases."""
        began = time.monotonic()
        left = executions
        while left > 0:
            self._batch(min(left, BATCH))
            left -= BATCH
        self.report.seconds += time.monotonic() - began

    def _batch(self, count: int) -> None:
        mutator, mutate = self._mutator, self.target.mutate
        before = _reset_peak()
        state = mutator.choose.getstate()
        # What is refused already hides what would be refused later: half start from what is not.
        good, cases = list(self._good), list(self._cases)

        def changed() -> Case:
            first = mutator.pick(good if good and mutator.chance(0.5) else cases)
            return mutate(mutator, first, mutator.pick(cases))

        for _ in range(count):
            self.execute(changed())
        grown = _peak() - before
        self.report.peak_bytes = max(self.report.peak_bytes, grown)
        if grown > MAX_BYTES:
            mutator.choose.setstate(state)
            for _ in range(count):
                self._measure(changed())

    def execute(self, case: Case) -> None:
        """Execute one case, and judge it."""
        report = self.report
        report.executions[self.target.name] += 1
        began = time.perf_counter()
        outcome, good = self._outcome(case)
        seconds = time.perf_counter() - began
        if seconds > report.slowest_s:
            self._time(case, seconds)
        kept = self._kept.get(outcome)
        if kept is None or 2 * _size(case) < _size(kept):
            if kept is None:
                self._cases.append(case)
            else:
                self._cases[self._cases.index(kept)] = case
            self._kept[outcome] = case
            if good:
                self._good.append(case)
            self._measure(case)
        elif report.executions[self.target.name] % _SAMPLED_EVERY == 0:
            self._measure(case)

    def _outcome(self, case: Case) -> tuple[str, bool]:
        """Execute a case; say how it ended, and whether with a result."""
        try:
            return self.target.execute(case), True
        except self.target.errors as error:
            text = str(error)
            if len(text) > MAX_TEXT or not text.isprintable():
                self._found(f"a text of {len(text)} characters, not one short line: {text!r}", case)
            return _kind(error, self._known), False
        except Exception as error:  # noqa: BLE001 - that is what is looked for
            self._found(f"{type(error).__name__}: {error}"[:300], case)
            return f"finding {type(error).__name__}", False

    def _time(self, case: Case, seconds: float) -> None:
        """Execute again what took so long on the clock, which may be something else's doing."""
        quickest = seconds
        for _ in range(3):
            began = time.thread_time()
            self._outcome(case)
            quickest = min(quickest, time.thread_time() - began)
        self.report.slowest_s = max(self.report.slowest_s, quickest)
        if quickest > MAX_SECONDS and self._timed:
            self._found(f"{quickest * 1000:.0f} ms", case)

    def _measure(self, case: Case) -> None:
        tracemalloc.start()
        self._outcome(case)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        self.report.largest_bytes = max(self.report.largest_bytes, peak)
        if peak > MAX_BYTES:
            self._found(f"{peak} bytes", case)

    def _found(self, why: str, case: Case) -> None:
        # One of each kind: a mistake that is met once is met a thousand times.
        known = {finding.why.translate(_DIGITS)[:40] for finding in self.report.findings}
        if why.translate(_DIGITS)[:40] not in known:
            self.report.findings.append(Finding(self.target.name, why, case))


def _status_bytes(name: str) -> int:
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith(name):
            return int(line.split()[1]) * 1024
    return 0


def _peak() -> int:
    return _status_bytes("VmHWM:")


def _reset_peak() -> int:
    """Set the peak of resident memory back to what it is now, and return that."""
    # Where that is not allowed it is the peak since the process began, and a growth of that.
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    return _peak()
