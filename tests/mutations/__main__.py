"""The command: try every mutation, and say which of them no test noticed."""

import argparse
import sys

from tests.mutations import MutationError, Table, try_all


def main() -> int:
    """Run the command; 1 if a mutation was missed."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutations", description=__doc__)
    parser.add_argument("--only", action="append", metavar="NAME", help="a mutation or a concern")
    parser.add_argument("--jobs", type=int, default=1, help="how many to try at once")
    given = parser.parse_args()
    try:
        table = Table.read()
        results = try_all(table, table.chosen(given.only), given.jobs, each=False)
    except MutationError as error:
        print(error, file=sys.stderr)  # noqa: T201
        return 2
    missed = {name for name, result in results.items() if result.outcome == "missed"}
    print(f"{len(results) - len(missed)} of {len(results)} mutations were caught")  # noqa: T201
    for name in sorted(missed):
        print(f"missed by the test that its row names: {name}")  # noqa: T201
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
