"""A case that goes through a table: all rows run, and each is named."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tests.kit.rows import each_row


class _Subtests:
    """Notes rows and which of them failed, as pytest's own does."""

    def __init__(self) -> None:
        self.rows: list[str] = []
        self.failed: list[str] = []

    @contextmanager
    def test(self, name: str) -> Iterator[None]:
        self.rows.append(name)
        try:
            yield
        except AssertionError:
            self.failed.append(name)


def _called(decorate: Any, **fixtures: Any) -> tuple[_Subtests, list[dict[str, Any]]]:
    seen: list[dict[str, Any]] = []

    def test(a: int, b: str = "", extra: object = None) -> None:
        seen.append({"a": a, "b": b, "extra": extra})
        assert a != 2

    subtests = _Subtests()
    decorate(test)(subtests=subtests, **fixtures)
    return subtests, seen


def test_rows_after_one_that_failed_run_and_the_one_is_named() -> None:
    subtests, seen = _called(each_row(("a", "b"), [(1, "x"), (2, "y"), (3, "z")]), extra=0)
    assert seen == [
        {"a": n, "b": text, "extra": 0} for n, text in zip((1, 2, 3), "xyz", strict=True)
    ]
    assert subtests.rows == ["1, 'x'", "2, 'y'", "3, 'z'"]
    assert subtests.failed == ["2, 'y'"]


def test_rows_are_named_as_parametrize_would() -> None:
    assert _called(each_row("a", [1, 3], ids=["one", "three"]))[0].rows == ["one", "three"]
    assert _called(each_row("a", iter([1, 3]), ids=lambda n: f"<{n}>"))[0].rows == ["<1>", "<3>"]
    subtests, seen = _called(each_row("a, b", [pytest.param(1, "x", id="first")]))
    assert subtests.rows == ["first"]
    assert seen == [{"a": 1, "b": "x", "extra": None}]


def test_pytest_is_asked_for_the_fixtures_and_not_for_the_columns() -> None:
    @each_row("a", [1])
    def test(a: int, saved_model: object) -> None: ...

    assert list(inspect.signature(test).parameters) == ["saved_model", "subtests"]
    assert test.__name__ == "test"
