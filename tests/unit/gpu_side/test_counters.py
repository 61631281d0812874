"""Counting, and durations in their buckets."""

from __future__ import annotations

import pytest

from gpu_side.counters import BOUNDS_NS, OUTCOMES, UNKNOWN_METHOD, Counters, Histogram
from protocol.errors import ErrorCode
from protocol.messages import REQUEST_TYPES


def test_bounds_are_three_a_decade_from_20_us_to_100_s() -> None:
    assert BOUNDS_NS[:4] == (20_000, 50_000, 100_000, 200_000)
    assert BOUNDS_NS[-1] == 100 * 10**9
    assert len(BOUNDS_NS) == 21
    assert list(BOUNDS_NS) == sorted(BOUNDS_NS)


@pytest.mark.parametrize(
    ("ns", "bucket"), [(0, 0), (20_000, 0), (20_001, 1), (10**11, 20), (10**11 + 1, 21)]
)
def test_a_bound_belongs_to_its_bucket(ns: int, bucket: int) -> None:
    histogram = Histogram()
    histogram.add(ns)
    assert [n for n, count in enumerate(histogram.buckets) if count] == [bucket]
    assert histogram.sum_ns == ns
    assert histogram.cumulative() == [0] * bucket + [1] * (len(BOUNDS_NS) + 1 - bucket)


def test_what_is_no_method_of_ours_is_counted_together() -> None:
    counters = Counters()
    assert set(counters.methods) == {*REQUEST_TYPES, UNKNOWN_METHOD}
    assert set(OUTCOMES) == {"OK", *(code.value for code in ErrorCode)}
    assert counters.unknown is counters.methods[UNKNOWN_METHOD]
    assert counters.methods["Linear"] is not counters.methods["RingLinear"]
