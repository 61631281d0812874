"""The choice of a tile: by time, once for each shape and bucket, and logged."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest

from gpu_side.cuda.tiles import DIRECT_ROWS, Tile, TileChoices, bucket, tiles_for


@pytest.mark.parametrize(
    ("rows", "expected"),
    [(1, 1), (2, 2), (3, 4), (5, 8), (32, 32), (33, 64), (512, 512), (9999, 512)],
)
def test_rows_are_bucketed(rows: int, expected: int) -> None:
    assert bucket(rows) == expected
    assert tiles_for(rows) == tiles_for(bucket(rows))


def test_few_rows_are_multiplied_directly_and_others_by_digits() -> None:
    assert all(tile.rows == 1 for tile in tiles_for(DIRECT_ROWS))
    # The least that tensor cores take.
    assert all(tile.rows >= 16 for tile in tiles_for(DIRECT_ROWS + 1))


def test_the_fastest_is_chosen_once_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    ran: list[Tile] = []

    def time_us(work: Callable[[], object]) -> float:
        work()
        return 5.0 if ran[-1] == tiles_for(1)[2] else 9.0

    choices = TileChoices(time_us)
    with caplog.at_level(logging.INFO, "gpu_service"):
        assert choices.choose(3, 64, 48, ran.append) == tiles_for(1)[2]
        assert choices.choose(4, 64, 48, ran.append) == tiles_for(1)[2]
    assert ran == list(tiles_for(3))
    (record,) = caplog.records
    assert record.fields == {  # type: ignore[attr-defined]
        "in_features": 64,
        "out_features": 48,
        "rows": 4,
        "tile": "1x4x1024x4x2",
        "us": 5.0,
    }
    choices.choose(5, 64, 48, ran.append)
    assert ran[len(tiles_for(3)) :] == list(tiles_for(5))
