"""The fitted exponent is that of the points, and says how far off they are."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tsqp.lab.bench.fit import fit_exponent


@given(
    exponent=st.floats(-3, 3),
    factor=st.floats(1e-3, 1e6),
    sizes=st.sets(st.integers(1, 100_000), min_size=2, max_size=8),
)
def test_a_power_law_is_found_again(exponent: float, factor: float, sizes: set[int]) -> None:
    law = fit_exponent([(size, factor * size**exponent) for size in sizes])
    assert law is not None
    assert law.exponent == pytest.approx(exponent, abs=1e-6)
    assert law.at(max(sizes)) == pytest.approx(factor * max(sizes) ** exponent, rel=1e-6)
    assert law.worst == pytest.approx(1, abs=1e-6)
    assert law.points == len(sizes)


def test_a_point_off_the_line_is_told() -> None:
    # On a logarithmic scale: 1, 2, 4 against 1, 4, 4, so a line of slope 1 that misses by 4^(1/3).
    law = fit_exponent([(1, 1), (2, 4), (4, 4)])
    assert law is not None
    assert law.exponent == pytest.approx(1)
    assert law.worst == pytest.approx(4 ** (1 / 3))
    # Logarithms to base two: -4/3, 2/3, 2/3 around the mean; -1/3, 2/3, -1/3 around the line.
    assert law.r_squared == pytest.approx(1 - (6 / 9) / (24 / 9))


def test_the_farthest_point_may_lie_below_the_line() -> None:
    # As above, upside down.
    law = fit_exponent([(1, 4), (2, 1), (4, 1)])
    assert law is not None
    assert law.exponent == pytest.approx(-1)
    assert law.worst == pytest.approx(4 ** (1 / 3))
    law = fit_exponent([(1, 1), (2, 1), (4, 4)])
    assert law is not None
    assert law.worst == pytest.approx(4 ** (1 / 3))


def test_what_does_not_grow_fits_perfectly() -> None:
    law = fit_exponent([(1, 7), (10, 7), (100, 7)])
    assert law is not None
    assert law.exponent == pytest.approx(0)
    assert law.r_squared == 1


@pytest.mark.parametrize(
    "points",
    [
        [],
        [(1, 1)],
        [(3, 1), (3, 2)],
        [(1, 1), (2, 0)],
        [(0, 1), (2, 3), (4, 5)],
        [(1, 1), (2, math.nan)],
        [(1, 1), (2, math.inf)],
    ],
)
def test_without_a_line_there_is_no_law(points: list[tuple[float, float]]) -> None:
    assert fit_exponent(points) is None
