"""The loop: take a case, change it, read it, judge it, keep it if it did something new.

A case passes if it ends in a result or in one of the errors that its target may raise, within
50 ms and 64 MiB, and the error's text is one short printable line.

*New* is an outcome that no kept case has: what was refused where, digits, quoted parts and unknown
names left out, or the kind of message that was read. Of cases with one outcome a small one stays.

`corpus/` has a file for each target: cases that are read as they are, the *seeds*, and what was
found since. A kept case is a line, its parts in base64.
"""

import base64
import re
import resource
import time
import tracemalloc
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from protocol.errors import TsqpError
from tests.kit.mutate import Case, Change, Mutator

MAX_SECONDS = 0.050
MAX_BYTES = 64 * 1024 * 1024
_MAX_TEXT = 3100
# Of a finding, in base64: enough to be read again.
_MAX_SHOWN = 100_000
# Read between two looks at the memory of the process.
BATCH = 2000
# Kept on disk, for each target, beside its seeds.
_MAX_KEPT = 120
_MAX_KEPT_BYTES = 1536
CORPUS = Path(__file__).with_name("corpus")
_FOUND = "# found"

_DIGITS = str.maketrans("", "", "0123456789")
_WORD = re.compile("[A-Za-z_]+")
_QUOTED = re.compile(r"'[^']*'|\"[^\"]*\"|\[[^]]*\]|\(.*\)|/[^ :]*/")


@dataclass(frozen=True)
class Target:
    """One reader. `read` returns what kind of result a case was, or raises one of `errors`.

    `change`: how a case becomes another; `weight`: how many of all executions, in proportion;
    `made`: seeds that cannot be kept on disk.
    """

    name: str
    read: Callable[[Case], str]
    change: Change
    errors: tuple[type[TsqpError], ...]
    weight: float = 0.1
    made: Callable[[], list[Case]] = list

    def seeds(self, folder: Path = CORPUS) -> list[Case]:
        """Return the cases that are read as they are."""
        return [*self.made(), *_cases(self._lines(folder)[0])]

    def found(self, folder: Path = CORPUS) -> list[Case]:
        """Return one case for each other outcome that was met."""
        return _cases(self._lines(folder)[1])

    def keep(self, cases: list[Case], folder: Path = CORPUS) -> None:
        """Write the smallest of these in place of those found before."""
        kept = sorted((c for c in cases if _size(c) <= _MAX_KEPT_BYTES), key=_size)[:_MAX_KEPT]
        lines = [*self._lines(folder)[0], _FOUND, *sorted(map(encode_case, kept))]
        (folder / f"{self.name}.txt").write_text("\n".join(lines) + "\n", encoding="ascii")

    def _lines(self, folder: Path) -> tuple[list[str], list[str]]:
        path = folder / f"{self.name}.txt"
        text = path.read_text(encoding="ascii") if path.exists() else ""
        seeds, _, found = text.partition(f"{_FOUND}\n")
        return seeds.splitlines(), found.splitlines()


def encode_case(case: Case) -> str:
    """Write a case as one line of text."""
    return ",".join(base64.b64encode(part).decode() for part in case)


def _cases(lines: list[str]) -> list[Case]:
    kept = (line.split(",") for line in lines if not line.startswith("#"))
    return [tuple(base64.b64decode(part, validate=True) for part in case) for case in kept]


def _size(case: Case) -> int:
    return sum(map(len, case)) + len(case)


@dataclass
class Report:
    """What a run found. `slowest_s`: of the case that takes longest, at its quickest.

    `largest_bytes`: of one measured case. `peak_bytes`: by how much a whole batch raised resident
    memory, at most.
    """

    executions: Counter[str] = field(default_factory=Counter)
    findings: list[str] = field(default_factory=list)
    slowest_s: float = 0.0
    largest_bytes: int = 0
    peak_bytes: int = 0
    seconds: float = 0.0


class Fuzzer:
    """Reads cases of one target, beginning with those that are kept, and keeps what is new.

    `timed`: whether one that takes too long is a finding.
    """

    def __init__(
        self, target: Target, seed: int, *, folder: Path = CORPUS, timed: bool = True
    ) -> None:
        self.target, self._timed = target, timed
        self.report = Report()
        # One case for each outcome, and those of them that ended in a result.
        self.kept: dict[str, Case] = {}
        self.good: dict[str, Case] = {}
        seeds = target.seeds(folder)
        text = "\n".join(part.decode("latin-1") for case in seeds for part in case)
        # The names that stay in an outcome; of others there are as many as there are cases.
        self._known = frozenset(_WORD.findall(text))
        self._mutator = Mutator(seed, sorted(self._known))
        for case in [*seeds, *target.found(folder)]:
            self.execute(case)

    def run(self, executions: int) -> None:
        """Read so many changed cases."""
        before, pick = _peak(), self._mutator.pick
        # What is refused already hides what would be refused later: half start from what is not.
        cases, good = list(self.kept.values()), list(self.good.values())
        for _ in range(executions):
            first = pick(good if good and self._mutator.chance(0.5) else cases)
            self.execute(self.target.change(self._mutator, first, pick(cases)))
        grown = _peak() - before
        self.report.peak_bytes = max(self.report.peak_bytes, grown)
        if grown > MAX_BYTES:
            self._found(f"{grown} bytes in a batch", ())

    def execute(self, case: Case) -> None:
        """Read one case, and judge it."""
        report = self.report
        report.executions[self.target.name] += 1
        began = time.perf_counter()
        outcome, good = self._outcome(case)
        seconds = time.perf_counter() - began
        if seconds > report.slowest_s:
            self._time(case, seconds)
        kept = self.kept.get(outcome)
        if kept is None or 2 * _size(case) < _size(kept):
            self.kept[outcome] = case
            if good:
                self.good[outcome] = case
        if kept is None or report.executions[self.target.name] % 1000 == 0:
            self._measure(case)

    def _outcome(self, case: Case) -> tuple[str, bool]:
        """Read a case; say how it ended, and whether with a result."""
        try:
            return self.target.read(case), True
        except self.target.errors as error:
            text = str(error)
            if len(text) > _MAX_TEXT or not text.isprintable():
                self._found(f"a text of {len(text)} characters, not one short line", case)
            where, got, expected = (
                _QUOTED.sub("", part[:400]).translate(_DIGITS)
                for part in (error.where, error.got, error.expected)
            )
            where = _WORD.sub(lambda w: w[0] if w[0] in self._known else "?", where)
            return f"{type(error).__name__}|{where[-80:]}|{got[:40]}|{expected[:60]}", False
        except Exception as error:  # noqa: BLE001 - that is what is looked for
            self._found(f"{type(error).__name__}: {error}"[:300], case)
            return f"finding {type(error).__name__}", False

    def _time(self, case: Case, seconds: float) -> None:
        """Read again what took so long on the clock, which may be something else's doing."""
        for _ in range(3):
            began = time.thread_time()
            self._outcome(case)
            seconds = min(seconds, time.thread_time() - began)
        self.report.slowest_s = max(self.report.slowest_s, seconds)
        if seconds > MAX_SECONDS and self._timed:
            self._found(f"{seconds * 1000:.0f} ms", case)

    def _measure(self, case: Case) -> None:
        tracemalloc.start()
        self._outcome(case)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        self.report.largest_bytes = max(self.report.largest_bytes, peak)
        if peak > MAX_BYTES:
            self._found(f"{peak} bytes", case)

    def _found(self, why: str, case: Case) -> None:
        finding = f"{self.target.name}: {why}: {encode_case(case)[:_MAX_SHOWN]}"
        # One of each kind: a mistake that is met once is met a thousand times.
        if kind_of(finding) not in map(kind_of, self.report.findings):
            self.report.findings.append(finding)


def kind_of(finding: str) -> str:
    """Return what is the same in findings that one mistake makes."""
    return finding.translate(_DIGITS)[:60]


def _peak() -> int:
    """Return the most memory that the process has had so far."""
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
