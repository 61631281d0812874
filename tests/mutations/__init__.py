"""Mistakes made on purpose, each of which a test must notice: `python -m tests.mutations`.

The table is `table.toml`. Each mutation replaces one piece of text in a copy of the tree, and the
tests of its concern run there.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
TABLE = Path(__file__).with_name("table.toml")

FORKS = Path(__file__).with_name("forks.py")

# Plugins that the process before a fork has loaded without pytest's rewriting are not ours.
_REWRITTEN = "ignore:Module already imported:pytest.PytestAssertRewriteWarning"
_OPTIONS = ("-q", "-x", "-p", "no:cacheprovider", "-p", "no:xdist", "-W", _REWRITTEN)

# pytest's exit statuses: all passed, some failed, and collection was interrupted by an error.
_PASSED, _FAILED, _INTERRUPTED = 0, 1, 2

Outcome = Literal["caught", "missed"]


class MutationError(Exception):
    """The table does not fit the tree, or the tests fail without any mutation."""


@dataclass(frozen=True)
class Mutation:
    """A piece of text of a file, and what replaces it. `concern`: whose tests must notice."""

    name: str
    concern: str
    file: str
    old: str
    new: str

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
    """What the tests said to a mutation. `by`: the first test that failed, "" if none did."""

    outcome: Outcome
    by: str


@dataclass(frozen=True)
class Table:
    """All mutations, and for each concern the files of tests (patterns) that must notice them."""

    concerns: dict[str, list[str]]
    mutations: list[Mutation]

    @staticmethod
    def read(path: Path = TABLE) -> Table:
        """Read the table. Raises MutationError for a name that is used twice."""
        content = tomllib.loads(path.read_text(encoding="utf-8"))
        mutations = [Mutation(**entry) for entry in content["mutation"]]
        names = [mutation.name for mutation in mutations]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise MutationError(f"{path.name}: got {', '.join(twice)} twice, expected each once")
        return Table(content["concerns"], mutations)

    def tests_of(self, concern: str, root: Path) -> list[str]:
        """Return the files of tests of a concern. Raises MutationError for a pattern without."""
        found: list[str] = []
        for pattern in self.concerns[concern]:
            paths = sorted(path.relative_to(root).as_posix() for path in root.glob(pattern))
            if not paths:
                raise MutationError(f"{concern}: got no file for {pattern}, expected tests")
            found += paths
        return found

    def problems(self, root: Path = ROOT) -> list[str]:
        """Say what of the table does not fit the tree."""
        problems = []
        for mutation in self.mutations:
            try:
                if mutation.applied(root) == (root / mutation.file).read_text(encoding="utf-8"):
                    problems.append(f"{mutation.name}: got the same text twice")
            except MutationError as error:
                problems.append(str(error))
        for concern in self.concerns:
            try:
                self.tests_of(concern, root)
            except MutationError as error:
                problems.append(str(error))
        return problems


class Copy:
    """A copy of the tree, in which one mutation at a time is tried.

    A process that has loaded torch and pytest, and nothing of ours, is forked for every run.
    """

    def __init__(self, root: Path, *, more: bool) -> None:
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
        self._options = _OPTIONS if more else (*_OPTIONS, "-m", "not more")
        self._server = subprocess.Popen(
            (sys.executable, str(FORKS)),
            cwd=root,
            env=os.environ | {"PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"},
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
            return Result("missed", "")
        if status not in (_FAILED, _INTERRUPTED):
            raise MutationError(f"pytest: got status {status}:\n{text[-2000:]}")
        return Result("caught", _first_failure(text.splitlines()))

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


def _first_failure(lines: Iterable[str]) -> str:
    for line in lines:
        if line.startswith(("FAILED ", "ERROR ")):
            return line.split(" - ")[0].partition(" ")[2]
    return "pytest"
