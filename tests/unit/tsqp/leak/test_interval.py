"""Intervals are Wilson's."""

from __future__ import annotations

import pytest

from tsqp.lab.leak.interval import LUCK, by_luck, needed, wilson


@pytest.mark.parametrize(
    ("hits", "n", "low", "high"),
    [
        # R. G. Newcombe (1998), Statistics in Medicine 17, table I, method 3.
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0, 0.1611),
        (1, 29, 0.0061, 0.1718),
    ],
)
def test_known_values(hits: int, n: int, low: float, high: float) -> None:
    assert wilson(hits, n) == pytest.approx((low, high), abs=5e-5)


def test_of_none_nothing_is_known() -> None:
    assert wilson(0, 0) == (0.0, 1.0)


@pytest.mark.parametrize("n", [1, 2, 7, 1000, 10**6])
def test_ends_are_exact_where_all_or_none_were_hit(n: int) -> None:
    assert wilson(0, n)[0] == 0.0
    assert wilson(n, n)[1] == 1.0
    assert 0 < wilson(0, n)[1] < 1
    assert 0 < wilson(n, n)[0] < 1


@pytest.mark.parametrize(("hits", "n"), [(0, 9), (3, 9), (9, 9), (50, 1000)])
def test_an_interval_holds_the_share_and_mirrors(hits: int, n: int) -> None:
    low, high = wilson(hits, n)
    assert low <= hits / n <= high
    assert wilson(n - hits, n) == pytest.approx((1 - high, 1 - low))
    assert wilson(hits * 4, n * 4)[1] - wilson(hits * 4, n * 4)[0] < high - low


def test_more_confidence_is_a_wider_interval() -> None:
    assert wilson(5, 10, 0.99)[0] < wilson(5, 10)[0] < wilson(5, 10, 0.5)[0]
    assert wilson(5, 10, 0.90) == pytest.approx((0.26927, 0.73073), abs=2e-5)


@pytest.mark.parametrize("margin", [0.5, 0.1, 0.02, 0.005, 0.001])
def test_where_nothing_is_ever_right_not_one_token_less_is_needed(margin: float) -> None:
    assert wilson(0, needed(margin))[1] <= margin
    assert wilson(0, needed(margin) - 1)[1] > margin


def test_half_a_percentage_point_takes_765_tokens() -> None:
    assert needed(0.005) == 765


@pytest.mark.parametrize("chance", [0.03, 1 / 1024, 1 / 128_256])
@pytest.mark.parametrize("margin", [0.1, 0.01, 0.005])
def test_luck_alone_does_not_end_above_the_margin(margin: float, chance: float) -> None:
    """Of so many tokens, and of twice as many, no likely number of hits ends too high."""
    n = needed(margin, chance)
    assert n > needed(margin)
    for tokens in (n, 2 * n):
        hits = 0
        while wilson(hits, tokens)[1] - chance <= margin:
            hits += 1
        assert by_luck(hits, tokens, chance) <= LUCK / 100
    # Nor is it many more than it takes: with a tenth fewer, luck would be enough.
    fewer = int(0.9 * n)
    hits = 0
    while wilson(hits, fewer)[1] - chance <= margin:
        hits += 1
    assert by_luck(hits, fewer, chance) > LUCK / 1000


@pytest.mark.parametrize(
    ("hits", "n", "chance", "expected"),
    [
        (0, 10, 0.1, 1.0),
        (1, 30, 0.001, 1 - 0.999**30),
        (2, 2, 0.5, 0.25),
        (3, 4, 0.5, 5 / 16),
        (1, 5, 0.0, 0.0),
        (5, 5, 1.0, 1.0),
    ],
)
def test_luck_is_the_binomial_tail(hits: int, n: int, chance: float, expected: float) -> None:
    assert by_luck(hits, n, chance) == pytest.approx(expected)


def test_luck_of_thousands_is_finite() -> None:
    assert by_luck(4440, 4440, 0.03) == 0.0
    assert 0.4 < by_luck(133, 4440, 0.03) < 0.6


@pytest.mark.parametrize("margin", [1e-3, 1e-4, 1e-6])
def test_the_tokens_of_a_tiny_margin_are_found_at_once(margin: float) -> None:
    """Of millions of lucky hits not each number is tried."""
    n = needed(margin, 1 / 1024)
    assert n > 1 / margin
    assert needed(margin / 2, 1 / 1024) > 3 * n
