"""Mistakes made on purpose, each of which a test must notice: `python -m tests.mutations`.

`mistakes/` has a file for each concern: its tests, and a row for each mistake with the one of them
that must notice it. A mutation replaces one piece of text, which stands in its file exactly once,
in a copy of the tree; that test runs there. A new check in the code gets a row that takes it away.
"""

from __future__ import annotations

import ast
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Literal, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
MISTAKES = Path(__file__).with_name("mistakes")

FORKS = Path(__file__).with_name("forks.py")

# Plugins that the process before a fork has loaded without pytest's rewriting are not ours.
_REWRITTEN = "ignore:Module already imported:pytest.PytestAssertRewriteWarning"
# Many a mistake is a wait without an end: a test that takes seconds is not waited for so long.
_OPTIONS = ("-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-W", _REWRITTEN, "--timeout", "40")

# pytest's exit statuses: all passed, some failed, and collection was interrupted by an error.
_PASSED, _FAILED, _INTERRUPTED = 0, 1, 2
# What pytest-timeout says, wherever pytest is then.
_OUT_OF_TIME = "Failed: Timeout (>"

Outcome = Literal["caught", "missed"]


class MutationError(Exception):
    """The table does not fit the tree, or the tests fail without any mutation."""


@dataclass(frozen=True)
class Mutation:
    """A piece of text of a file, and what replaces it. `by`: the test function that notices."""

    name: str
    concern: str
    file: str
    old: str
    new: str
    by: str

    def applied(self, root: Path) -> str:
        """Return the file's text with the mutation.

        Raises MutationError unless the file has the old text exactly once.
        """
        path = root / self.file
        if not path.is_file():
            raise MutationError(f"{self.name}: {self.file}: got no such file, expected one")
        text = path.read_text(encoding="utf-8")
        if (count := text.count(self.old)) != 1:
            raise MutationError(f"{self.name}: {self.file}: got the text {count} times, expected 1")
        return text.replace(self.old, self.new)


class Result(NamedTuple):
    """What the tests said to a mutation. `by`: the cases that failed; the first alone with -x."""

    outcome: Outcome
    by: list[str]


@dataclass(frozen=True)
class Table:
    """All mutations, and for each concern the files of tests (patterns) that must notice them.

    `slow`: concerns of which only tests that are left to `make test-slow` can notice anything.
    """

    concerns: dict[str, list[str]]
    mutations: list[Mutation]
    slow: frozenset[str] = frozenset()

    @staticmethod
    def read(folder: Path = MISTAKES) -> Table:
        """Read all files of a folder. Raises MutationError for a name that is used twice."""
        concerns, mutations, slow = {}, [], set()
        for path in sorted(folder.glob("*.toml")):
            content = tomllib.loads(path.read_text(encoding="utf-8"))
            concerns[path.stem] = content["tests"]
            slow |= {path.stem} if content.get("slow", False) else set()
            mutations += [Mutation(concern=path.stem, **row) for row in content["mistakes"]]
        names = Counter(mutation.name for mutation in mutations)
        if twice := sorted(name for name, count in names.items() if count > 1):
            raise MutationError(f"{folder.name}: got {', '.join(twice)} twice, expected each once")
        return Table(concerns, mutations, frozenset(slow))

    def chosen(self, names: Sequence[str] | None) -> list[Mutation]:
        """Return the mutations that are named, or whose concern is; without names all."""
        found = [
            mutation
            for mutation in self.mutations
            if not names or {mutation.name, mutation.concern} & set(names)
        ]
        if unknown := set(names or ()) - {n for m in found for n in (m.name, m.concern)}:
            raise MutationError(f"got {', '.join(unknown)}, expected mutations or concerns")
        return found

    def tests_of(self, concern: str, root: Path) -> list[str]:
        """Return the tests of a concern. Raises MutationError for a pattern that matches none."""
        found: list[str] = []
        for pattern in self.concerns[concern]:
            paths = sorted(path.relative_to(root).as_posix() for path in root.glob(pattern))
            if not paths:
                raise MutationError(f"{concern}: got no file for {pattern}, expected tests")
            found += paths
        return found

    def marks(self, concern: str) -> list[str]:
        """Return pytest's options that choose tests of a concern."""
        return ["-m", "slow" if concern in self.slow else "not slow"]

    def problems(self, root: Path = ROOT) -> list[str]:
        """Say what of the table does not fit the tree."""
        problems = []
        for mutation in self.mutations:
            try:
                changed = mutation.applied(root)
                if changed == (root / mutation.file).read_text(encoding="utf-8"):
                    problems.append(f"{mutation.name}: got the same text twice")
                # One that no interpreter reads would be noticed by everything.
                if mutation.file.endswith(".py"):
                    ast.parse(changed, mutation.file)
            except SyntaxError as error:
                problems.append(f"{mutation.name}: {error}")
            except MutationError as error:
                problems.append(str(error))
            file, _, name = mutation.by.removesuffix("::runTest").partition("::")
            text = path.read_text(encoding="utf-8") if (path := root / file).is_file() else ""
            # A state machine of hypothesis is assigned.
            if re.search(rf"^(async def |def )?{name}(\(| =)", text, re.MULTILINE) is None:
                problems.append(f"{mutation.name}: got no {mutation.by}, which noticed it")
        for concern in self.concerns:
            try:
                self.tests_of(concern, root)
            except MutationError as error:
                problems.append(str(error))
        return problems


class Copy:
    """A copy of the tree, in which one mutation at a time is tried.

    A process that has loaded torch and pytest, and nothing of ours, is forked for every run.
    `options`: for pytest, beside those that every run has.
    """

    def __init__(self, root: Path, *options: str) -> None:
        self.root = root
        self._writes = 0
        listed = ("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard")
        names = subprocess.run(listed, cwd=ROOT, capture_output=True, check=True).stdout
        for name in names.decode().split("\0"):
            if name and (ROOT / name).is_file():
                (root / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(ROOT / name, root / name)
        # Not among them; without it the compiled path, and shared memory, would not be tried.
        for built in (ROOT / "protocol/native").glob("_native*.so"):
            shutil.copyfile(built, root / built.relative_to(ROOT))
        self._options = (*_OPTIONS, *options)
        self._server = subprocess.Popen(
            (sys.executable, str(FORKS)),
            cwd=root,
            # Kernels run as the tests have it: they are imported before the tests are.
            env=os.environ
            | {"PYTHONPATH": str(root), "OMP_NUM_THREADS": "1", "TRITON_INTERPRET": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(self, tests: Sequence[str]) -> Result:
        """Run tests in the copy as it is. Raises MutationError where pytest could not."""
        output = self.root / ".output"
        status = self._ask({"arguments": [*self._options, *tests], "output": str(output)})
        text = output.read_text(encoding="utf-8", errors="replace")
        if status == _PASSED:
            return Result("missed", [])
        # What a failed test left open can be an error of pytest's own at its end; and a test that
        # does not end may be past its time while pytest writes down where it was.
        ended = _failures(text) or _OUT_OF_TIME in text
        if status not in (_FAILED, _INTERRUPTED) and not ended:
            raise MutationError(f"pytest: got status {status}:\n{text[-2000:]}")
        return Result("caught", _failures(text) or ["pytest"])

    def try_mutation(self, mutation: Mutation, tests: Sequence[str]) -> Result:
        """Run tests with a mutation, and take it back."""
        path = self.root / mutation.file
        before = path.read_text(encoding="utf-8")
        self._write(path, mutation.applied(self.root))
        try:
            return self.run(tests)
        finally:
            self._write(path, before)

    def close(self) -> None:
        """End the process that is forked."""
        self._server.communicate()

    def _ask(self, question: dict[str, object]) -> int:
        if self._server.stdin is None or self._server.stdout is None:
            raise MutationError("got a process without pipes, expected both")
        self._server.stdin.write(json.dumps(question) + "\n")
        self._server.stdin.flush()
        return int(self._server.stdout.readline())

    def _write(self, path: Path, text: str) -> None:
        """Write a file with a time of its own: Python's cache of bytecode goes by time and size."""
        path.write_text(text, encoding="utf-8")
        self._writes += 1
        os.utime(path, (self._writes, self._writes))


def _failures(text: str) -> list[str]:
    """Return the cases that pytest's summary names."""
    lines = [line for line in text.splitlines() if line.startswith(("FAILED tests", "ERROR tests"))]
    return [line.split(" - ")[0].partition(" ")[2] for line in lines]


def try_all(
    table: Table, chosen: Sequence[Mutation], jobs: int, *, each: bool
) -> dict[str, Result]:
    """Try mutations in `jobs` copies, after their tests passed without. Raises MutationError.

    `each`: all tests of a concern say what they notice, and not only the one that a row names.
    """
    if problems := table.problems():
        raise MutationError("\n".join(problems))
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="tsqp-mutations-"))
        copies: SimpleQueue[Copy] = SimpleQueue()
        for number in range(jobs):
            root = Path(folder) / str(number)
            root.mkdir()
            copy = Copy(root, *([] if each else ["-x"]))
            stack.callback(copy.close)
            copies.put(copy)

        def tests(mutations: Sequence[Mutation], root: Path) -> list[str]:
            """Return pytest's arguments for mutations of one concern."""
            concern = mutations[0].concern
            names = table.tests_of(concern, root) if each else sorted({m.by for m in mutations})
            return [*names, *table.marks(concern)]

        def unchanged(mutations: Sequence[Mutation]) -> None:
            with _taken(copies) as copy:
                result = copy.run(tests(mutations, copy.root))
            if result.outcome == "caught":
                where = mutations[0].concern
                raise MutationError(f"{where}: {result.by} fails without any mutation")

        def mutated(mutation: Mutation) -> Result:
            with _taken(copies) as copy:
                try:
                    result = copy.try_mutation(mutation, tests([mutation], copy.root))
                except MutationError as error:  # the others are tried all the same
                    result = Result("missed", [str(error)])
            said = (result.outcome, f"{mutation.concern}/{mutation.name}", *result.by[:1])
            print(*said, sep="  ", file=sys.stderr, flush=True)  # noqa: T201
            return result

        of = {m.concern: [n for n in chosen if n.concern == m.concern] for m in chosen}
        with ThreadPoolExecutor(jobs) as pool:
            list(pool.map(unchanged, of.values()))
            results = list(pool.map(mutated, chosen))
    return {mutation.name: result for mutation, result in zip(chosen, results, strict=True)}


@contextmanager
def _taken(copies: SimpleQueue[Copy]) -> Iterator[Copy]:
    copy = copies.get()
    try:
        yield copy
    finally:
        copies.put(copy)
