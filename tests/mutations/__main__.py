"""The command: try every mutation, and say which of them no test noticed."""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from queue import SimpleQueue

from tests.mutations import Copy, Mutation, MutationError, Result, Table

# As the tests have it, in which kernels run: they are imported before the tests are.
os.environ.setdefault("TRITON_INTERPRET", "1")


def main() -> int:
    """Run the command; 1 if a mutation was missed that `--against` says was caught, or any."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutations", description=__doc__)
    parser.add_argument("--only", action="append", metavar="NAME", help="a mutation or a concern")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results here")
    parser.add_argument("--against", type=Path, metavar="FILE", help="results that must not worsen")
    parser.add_argument("--more", action="store_true", help="run the cases of test-more, too")
    parser.add_argument("--jobs", type=int, default=1, help="how many to try at once")
    given = parser.parse_args()
    table = Table.read()
    if problems := table.problems():
        print("\n".join(problems), file=sys.stderr)  # noqa: T201
        return 2
    chosen = [
        mutation
        for mutation in table.mutations
        if given.only is None or {mutation.name, mutation.concern} & set(given.only)
    ]
    try:
        results = _try_all(table, chosen, given.jobs, more=given.more)
    except MutationError as error:
        print(error, file=sys.stderr)  # noqa: T201
        return 2
    if given.json is not None:
        content = {name: result._asdict() for name, result in results.items()}
        given.json.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    missed = {name for name, result in results.items() if result.outcome == "missed"}
    print(f"{len(results) - len(missed)} of {len(results)} mutations were caught")  # noqa: T201
    if given.against is not None:
        before = json.loads(given.against.read_text(encoding="utf-8"))
        missed &= {name for name, result in before.items() if result["outcome"] == "caught"}
    for name in sorted(missed):
        print(f"missed: {name}")  # noqa: T201
    return 1 if missed else 0


def _try_all(table: Table, chosen: list[Mutation], jobs: int, *, more: bool) -> dict[str, Result]:
    """Try mutations in `jobs` copies, after their tests passed without. Raises MutationError."""
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="tsqp-mutations-"))
        copies: SimpleQueue[Copy] = SimpleQueue()
        for number in range(jobs):
            root = Path(folder) / str(number)
            root.mkdir()
            copy = Copy(root, more=more)
            stack.callback(copy.close)
            copies.put(copy)

        def unchanged(concern: str) -> None:
            copy = copies.get()
            result = copy.run(table.tests_of(concern, copy.root))
            copies.put(copy)
            if result.outcome == "caught":
                raise MutationError(f"{concern}: {result.by} fails without any mutation")

        def mutated(mutation: Mutation) -> Result:
            copy = copies.get()
            result = copy.try_mutation(mutation, table.tests_of(mutation.concern, copy.root))
            copies.put(copy)
            print(f"{result.outcome}  {mutation.concern}/{mutation.name}  {result.by}", flush=True)  # noqa: T201
            return result

        with ThreadPoolExecutor(jobs) as pool:
            list(pool.map(unchanged, dict.fromkeys(mutation.concern for mutation in chosen)))
            return {
                mutation.name: result
                for mutation, result in zip(chosen, pool.map(mutated, chosen), strict=True)
            }


if __name__ == "__main__":
    sys.exit(main())
