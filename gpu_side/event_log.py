"""The log of the service: events with fields, and few lines where there would be many.

A flood of requests must not fill the disk: one filter limits all that clients can have the service
log, whichever thread and module logs it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from typing import Any

# A line for each request, message or connection of others: how many lines, in how many seconds.
LIMITS: dict[str, tuple[int, float]] = {
    "queue_full": (1, 1.0),
    "connection_refused": (5, 10.0),
    "no_more_clients": (5, 10.0),
    "dropped": (50, 60.0),
    "refused": (50, 60.0),
    "client_gone": (50, 60.0),
    "failed": (50, 60.0),  # with a traceback each
}

# Keywords that are not fields.
_OF_LOGGING = ("exc_info", "stack_info", "stacklevel")
# Fields that say why, in one of a few words that no client can choose.
REASONS = ("reason", "code", "limit")
# Reasons that are counted apart, of all events together.
MAX_REASONS = 256


class EventLog(logging.LoggerAdapter[logging.Logger]):
    """A logger whose calls take the name of an event, and its fields as keywords."""

    def process(
        self, msg: Any, kwargs: MutableMapping[str, Any]
    ) -> tuple[Any, MutableMapping[str, Any]]:
        """Return the event, and its fields where the formatter finds them."""
        own = {name: kwargs.pop(name) for name in _OF_LOGGING if name in kwargs}
        return msg, {**own, "extra": {"fields": kwargs}}


log = EventLog(logging.getLogger("gpu_service"))


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


class LineFilter(logging.Filter):
    """Limits each event, and each reason for it apart: a flood of one does not hide another.

    The next line of its kind says how many were `left_out`. A reason is what the line's fields say
    under `REASONS`, and the type of its exception.
    """

    def __init__(
        self,
        limits: Mapping[str, tuple[int, float]] = LIMITS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__()
        self._limits = limits
        self._lines: dict[tuple[object, ...], LineLimit] = {}
        self._clock = clock
        self._lock = threading.Lock()

    def filter(self, record: logging.LogRecord) -> bool:
        """Say whether a line is written."""
        limit = self._limits.get(record.msg)
        if limit is None:
            return True
        fields = getattr(record, "fields", {})
        failure = record.exc_info[0] if record.exc_info else None
        kind = (record.msg, failure, *map(fields.get, REASONS))
        with self._lock:
            if kind not in self._lines and len(self._lines) >= MAX_REASONS:
                kind = (record.msg,)
            left_out = self._lines.setdefault(kind, LineLimit(*limit)).due(self._clock())
        if left_out:
            record.fields = {**fields, "left_out": left_out}
        return left_out is not None


@contextmanager
def limited(logger: logging.Logger) -> Iterator[None]:
    """Limit a logger's lines while the block runs."""
    lines = LineFilter()
    logger.addFilter(lines)
    try:
        yield
    finally:
        logger.removeFilter(lines)
