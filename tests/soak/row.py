"""What a row of the reliability scorecard is, and what it reports.

A row is a module of this folder with

    NAME, TEST, PASS    its texts in the scorecard: class of fault, what is done, when it passes
    FULL, SHORT         how often: for `make soak`, and for `make test-more`
    run(count)          does it, and returns a RowResult
    MINUTES             how long the full form takes on two cores (left out: under one)
    ALONE               True for a row that measures time, and shares the machine with no other row

A module without NAME is a helper. With fewer than FULL repetitions a verdict must not depend on
how long anything took: `is_full` says which form it is.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from typing import Protocol, TypeAlias, runtime_checkable

Measured: TypeAlias = float | int | str

# The order of the scorecard; a row that is not named here comes after these.
ORDER = (
    "worker_killed",
    "only_worker_killed",
    "peer_stopped",
    "slow_peer",
    "malicious_service",
    "malicious_shm",
    "wrong_results",
    "pads",
    "fuzz",
    "model_directories",
    "load",
    "serving",
    "cancelled",
    "overload",
    "serving_faults",
    "access",
    "secrets",
)


@dataclass(frozen=True)
class RowResult:
    """What a row found. `seconds`: how long it took; `measured`: numbers by what they are of."""

    name: str
    test: str
    passes: str
    count: int
    measured: dict[str, Measured]
    seconds: float
    passed: bool


@runtime_checkable
class Row(Protocol):
    """A module of this folder that is a row; see above."""

    __name__: str
    NAME: str
    TEST: str
    PASS: str
    FULL: int
    SHORT: int

    def run(self, count: int) -> RowResult:
        """Do it so often, and say what was found."""
        ...


def minutes(row: Row) -> float:
    """Return how many minutes the full form takes on two cores."""
    return float(getattr(row, "MINUTES", 1))


def alone(row: Row) -> bool:
    """Say whether a row shares the machine with no other."""
    return bool(getattr(row, "ALONE", False))


def module_of(row: Row) -> str:
    """Return the short name of a row's module, by which it is chosen and recorded."""
    return row.__name__.rpartition(".")[2]


def is_full(row_full: int, count: int) -> bool:
    """Say whether so many repetitions are the full form, in which times are judged."""
    return count >= row_full


def find_rows() -> list[Row]:
    """Import every row of this folder, in the order of the scorecard."""
    found: list[Row] = []
    for module in iter_modules([str(Path(__file__).parent)]):
        if module.name.startswith(("_", "test_")):
            continue
        loaded = import_module(f"{__package__}.{module.name}")
        if hasattr(loaded, "NAME"):
            if not isinstance(loaded, Row):
                raise TypeError(f"{loaded.__name__}: has NAME, but is no row")
            found.append(loaded)
    return sorted(found, key=_place)


def _place(row: Row) -> tuple[int, str]:
    name = module_of(row)
    return (ORDER.index(name) if name in ORDER else len(ORDER), name)


# ------------------------------------------------------------------------- for rows to report by

_on_progress: Callable[[int], None] = lambda done: None  # noqa: E731


def report_progress_to(listener: Callable[[int], None]) -> None:
    """Have `progress` tell this function; for who runs rows."""
    global _on_progress  # noqa: PLW0603
    _on_progress = listener


def progress(done: int) -> None:
    """Tell whoever runs this row how many of its repetitions are done."""
    _on_progress(done)


def note(text: str) -> None:
    """Write a line about something unexpected to stderr, for who looks into a failed row."""
    print(text, file=sys.stderr, flush=True)  # noqa: T201


def percentile(values: Iterable[float], percent: float) -> float:
    """Return the smallest value that at least `percent` of them do not exceed; 0 of none."""
    ordered: Sequence[float] = sorted(values)
    if not ordered:
        return 0.0
    place = -(-len(ordered) * percent // 100)  # rounded up: p95 of 20 values is the 19th
    return ordered[max(0, min(len(ordered), int(place)) - 1)]
