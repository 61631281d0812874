"""A figure that misses its target does not read as the target."""

from __future__ import annotations

from benchmarks.targets import Check, at_least, at_most, divided, hundredths


def test_ratios_at_their_targets() -> None:
    assert at_least("", 4.0, 4.0) == Check("", ">= 4", "4.00", True)
    assert at_least("", 3.9999, 4.0) == Check("", ">= 4", "3.99", False)
    assert at_most("", 1.3, 1.3) == Check("", "<= 1.3", "1.30", True)
    assert at_most("", 1.3001, 1.3) == Check("", "<= 1.3", "1.31", False)
    assert not at_least("", None, 4.0).ok
    assert not at_most("", None, 4.0).ok


def test_what_took_no_time_has_no_ratio() -> None:
    assert divided(3.0, 2.0) == 1.5
    assert [divided(*pair) for pair in ((0.0, 2.0), (3.0, 0.0), (None, 2.0), (3.0, None))] == [
        None
    ] * 4
    assert hundredths(None) == "not measurable"
    # Two decimals, the nearest, unless a target is compared with.
    assert hundredths(1.2951) == "1.30"
    assert hundredths(1.2949) == "1.29"
