"""A range of layers: what may be written, and what it is."""

from __future__ import annotations

import pytest

from tee_side.policy.layer_range import LayerRange
from tests.kit.rows import each_row


@pytest.mark.parametrize(
    ("text", "layers"),
    [
        ("3", LayerRange(3, 3)),
        ("0-3", LayerRange(0, 3)),
        ("4-", LayerRange(4, None)),
        ("2-2", LayerRange(2, 2)),
        ("9999-", LayerRange(9999, None)),
    ],
)
def test_what_may_be_written(text: str, layers: LayerRange) -> None:
    assert LayerRange.parse(text) == layers
    assert LayerRange.parse(str(layers)) == layers


@each_row("text", ["", "-", "-3", "a", "1-2-3", "1 - 2", "10000", "1-10000", "1,2"])
def test_what_is_no_range(text: str) -> None:
    with pytest.raises(ValueError, match='layers such as "3", "0-3" or "4-"'):
        LayerRange.parse(text)


@each_row("text", ["5-3", "5-4"])
def test_a_range_does_not_run_backwards(text: str) -> None:
    with pytest.raises(ValueError, match="does not run backwards"):
        LayerRange.parse(text)
