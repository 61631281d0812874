"""Which test functions notice which mistakes: `python -m tests.mutations.matrix NAME ...`.

A function that is the only one to notice a mistake stays; one that is never the only one may go.
"""

import argparse
import sys
from collections import defaultdict

from tests.mutations import MutationError, Table, try_all


def main() -> int:
    """Try mistakes without stopping at the first failure, and print both sides of the matrix."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutations.matrix", description=__doc__)
    parser.add_argument("only", nargs="*", metavar="NAME", help="a mutation or a concern")
    parser.add_argument("--jobs", type=int, default=1, help="how many to try at once")
    given = parser.parse_args()
    try:
        table = Table.read()
        results = try_all(table, table.chosen(given.only), given.jobs, each=True)
    except MutationError as error:
        print(error, file=sys.stderr)  # noqa: T201
        return 2
    noticed = {
        name: sorted({case.partition("[")[0] for case in result.by})
        for name, result in results.items()
    }
    mistakes: dict[str, list[str]] = defaultdict(list)
    for name, functions in noticed.items():
        print(f"{len(functions):4} {name}")  # noqa: T201
        for function in functions:
            mistakes[function].append(name)
    for function, names in sorted(mistakes.items()):
        alone = [name for name in names if len(noticed[name]) == 1]
        says = f"alone: {', '.join(alone)}" if alone else "never alone"
        print(f"{function}  notices {len(names)}, {says}")  # noqa: T201
    return 0


if __name__ == "__main__":
    sys.exit(main())
