"""Numbers are short and keep their magnitude."""

from __future__ import annotations

import pytest

from tsqp.lab.bench.units import duration, figures, percent, size, whole


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (0, ""),
        (0.0004, "<0.001"),
        (0.05, "0.050"),
        (0.0996, "0.10"),
        (1.234, "1.23"),
        (9.996, "10.0"),
        (12.34, "12.3"),
        (99.96, "100"),
        (1234.5, "1,234"),
        (-5.02, "-5.02"),
    ],
)
def test_figures(number: float, text: str) -> None:
    assert figures(number) == text


@pytest.mark.parametrize(
    ("number", "text"),
    [(0, ""), (16, "16"), (2.5, "2.50"), (9344, "9,344")],
)
def test_counts(number: float, text: str) -> None:
    assert whole(number) == text


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [
        (0, ""),
        (8, "8 B"),
        (999.7, "1.00 kB"),
        (4096, "4.10 kB"),
        (999_600, "1.00 MB"),
        (1.5e9, "1.50 GB"),
        (2.5e12, "2,500 GB"),
    ],
)
def test_sizes(size_bytes: float, text: str) -> None:
    assert size(size_bytes) == text


@pytest.mark.parametrize(
    ("duration_us", "text"),
    [(0, "0 us"), (12.3, "12.3 us"), (999.6, "1.00 ms"), (4560, "4.56 ms"), (7.9e6, "7.90 s")],
)
def test_durations(duration_us: float, text: str) -> None:
    assert duration(duration_us) == text


@pytest.mark.parametrize(
    ("share", "text"), [(0, "0%"), (0.0004, "<0.1%"), (0.004, "0.4%"), (0.41, "41%"), (1, "100%")]
)
def test_shares(share: float, text: str) -> None:
    assert percent(share) == text
