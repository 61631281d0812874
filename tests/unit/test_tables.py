"""A case that goes through a table: all rows run, and each that fails is named."""

from collections.abc import Iterator
from contextlib import contextmanager

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


def test_rows_after_one_that_failed_run_and_the_one_is_named() -> None:
    seen: list[tuple[int, str, int]] = []

    @each_row(("a", "b"), [(1, "x"), (2, "y"), (3, "z")])
    def test(a: int, b: str, fixture: int) -> None:
        seen.append((a, b, fixture))
        assert a != 2

    subtests = _Subtests()
    test(subtests=subtests, fixture=0)
    assert seen == [(1, "x", 0), (2, "y", 0), (3, "z", 0)]
    assert (subtests.rows, subtests.failed) == (["1, 'x'", "2, 'y'", "3, 'z'"], ["2, 'y'"])

    # The slow ones are a case of their own.
    @each_row("a", [1], slow=[1, 2])
    def other(a: int) -> None:
        raise NotImplementedError

    fast, slow = other.pytestmark[0].args[1]  # type: ignore[attr-defined]
    assert (fast.values, slow.values) == (([1],), ([1, 2],))
    assert (fast.marks, slow.marks) == ((), (pytest.mark.slow,))
