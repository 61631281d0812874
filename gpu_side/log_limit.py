"""Few lines of a log where there would be many: who floods a service must not fill its disk."""

from __future__ import annotations


class LineLimit:
    """Lets through the first `lines` of every interval, and counts those that it leaves out.

    `interval_s`: seconds; one begins with the first line after the last has ended.
    """

    def __init__(self, lines: int, interval_s: float) -> None:
        self._lines = lines
        self._interval_s = interval_s
        self._ends = float("-inf")
        self._let_through = 0
        self._left_out = 0

    def due(self, now: float) -> int | None:
        """Say how many were left out since the last line; None where this one is, too.

        `now`: seconds, on a clock that does not go back.
        """
        if now >= self._ends:
            self._ends, self._let_through = now + self._interval_s, 0
        if self._let_through >= self._lines:
            self._left_out += 1
            return None
        self._let_through += 1
        left_out, self._left_out = self._left_out, 0
        return left_out
