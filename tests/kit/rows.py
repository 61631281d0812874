"""One case for all rows of a table, where each takes less time than a case of its own."""

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch


def each_row(
    names: str | tuple[str, ...],
    rows: Iterable[Any],
    ids: Callable[[Any], str] | Iterable[str] | None = None,
    *,
    slow: Iterable[Any] = (),
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Call a test for every row, as `pytest.mark.parametrize` does, in one case.

    Arguments are those of `parametrize`. Every row is a subtest: those that follow one that failed
    run, and a failure names its row. Fixtures are made once, for all rows together. `slow`: rows of
    a case of their own, with the mark.
    """
    rows, more = list(rows), list(slow)
    several = isinstance(names, tuple) or "," in names
    keys = [name.strip() for name in names.split(",")] if isinstance(names, str) else list(names)
    labels = ids if ids is None or callable(ids) else list(ids)

    def values(row: Any) -> tuple[Any, ...]:
        if isinstance(row, type(pytest.param())):
            return tuple(row.values)
        return tuple(row) if several else (row,)

    def label(position: int, row: Any) -> str:
        if isinstance(row, type(pytest.param())) and row.id is not None:
            return str(row.id)
        if labels is None:
            return ", ".join(map(repr, values(row)))[:80]
        return labels(row) if callable(labels) else labels[position]

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(test)
        def run(subtests: pytest.Subtests, **fixtures: Any) -> None:
            chosen = fixtures.pop("_rows") if more else rows
            for position, row in enumerate(chosen):
                torch.manual_seed(0)
                with subtests.test(label(position, row)):
                    test(**fixtures, **dict(zip(keys, values(row), strict=True)))

        signature = inspect.signature(test)
        kept = [value for name, value in signature.parameters.items() if name not in keys]
        added = inspect.Parameter("subtests", inspect.Parameter.KEYWORD_ONLY)
        chosen = [inspect.Parameter("_rows", inspect.Parameter.KEYWORD_ONLY)] if more else []
        run.__signature__ = signature.replace(  # type: ignore[attr-defined]
            parameters=[*(value.replace(kind=added.kind) for value in kept), added, *chosen]
        )
        if not more:
            return run
        cases = [
            pytest.param(rows, id="fast"),
            pytest.param(more, id="slow", marks=pytest.mark.slow),
        ]
        return pytest.mark.parametrize("_rows", cases)(run)

    return decorate
