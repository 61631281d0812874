"""How the output columns of a weight are parted among several holders: evenly, in order.

Every holder computes whole products of its own columns, so integers are those of one holder, bit
for bit, and nothing has to be added up.
"""

from __future__ import annotations

from typing import TypeAlias

# A part, from 0, and of how many.
Columns: TypeAlias = tuple[int, int]
# The only part of one.
WHOLE: Columns = (0, 1)
MAX_PARTS = 64


def part_of(size: int, part: int, parts: int) -> slice:
    """Return which of `size` columns part `part` of `parts` has; sizes differ by one at most."""
    return slice(size * part // parts, size * (part + 1) // parts)


def columns_in_words(columns: Columns) -> str:
    """Say which part of the columns it is, as options count them, from 0."""
    return "all columns" if columns == WHOLE else "columns {}/{}".format(*columns)
