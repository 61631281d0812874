"""What a row of the reliability scorecard is, and what a run of it found.

A fault is a row, which a module of this folder defines beside the tests of the same subject. Its
short run is a test of `make test` (`test_rows.py`), in which no time is judged; `make soak` makes
the long one, and docs/reliability.md of what it found.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TypeAlias

Measured: TypeAlias = float | int | str


@dataclass(frozen=True)
class Found:
    """`measured`: numbers, by what they are of; `holds`: what has to be so, by what it says.

    `in_time`: what has to be so as well where time is judged.
    """

    measured: Mapping[str, Measured]
    holds: Mapping[str, bool]
    in_time: Mapping[str, bool] = field(default_factory=dict)

    def failed(self, *, timed: bool) -> list[str]:
        """Return what is not as it has to be."""
        judged = {**self.holds, **(self.in_time if timed else {})}
        return [what for what, is_so in judged.items() if not is_so]


def _no_run(count: int, full: bool) -> Found:
    raise NotImplementedError


@dataclass(frozen=True)
class Row:
    """`name`: by which it is chosen and recorded; `title`, `test`, `passes`: its texts on the page.

    `run`: gets how often, which is `short` or `long`, and whether it is the long run. `minutes`:
    how long that takes on two cores. Where it is not given, the row decorates that function.
    """

    name: str
    title: str
    test: str
    passes: str
    short: int
    long: int
    minutes: float = 1
    run: Callable[[int, bool], Found] = field(default=_no_run, repr=False)

    def __call__(self, run: Callable[[int, bool], Found]) -> Row:
        return replace(self, run=run)


def shown_all(measured: Mapping[str, Measured]) -> str:
    """Return what a row measured as text."""
    return "; ".join(f"{what}: {shown(value)}" for what, value in measured.items())


def shown(value: Measured) -> str:
    if isinstance(value, float):
        return f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"
    return f"{value:,}" if isinstance(value, int) else value


def note(text: str) -> None:
    """Write a line about something unexpected to stderr, for people who look into a failed row."""
    print(text, file=sys.stderr, flush=True)  # noqa: T201


def percentile(values: Iterable[float], percent: float) -> float:
    """Return the smallest value that at least `percent` of them do not exceed; 0 of none."""
    ordered = sorted(values)
    if not ordered:
        return 0.0
    place = -(-len(ordered) * percent // 100)  # rounded up: p95 of 20 values is the 19th
    return ordered[max(0, min(len(ordered), int(place)) - 1)]
