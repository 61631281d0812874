"""The log of the service: events with fields, and few lines where there would be many.

A flood of requests must not fill the disk: one filter limits all that clients can have the service
log, whichever thread and module logs it.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass
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
        # These keywords are not fields.
        own = {
            name: kwargs.pop(name)
            for name in ("exc_info", "stack_info", "stacklevel")
            if name in kwargs
        }
        return msg, {**own, "extra": {"fields": kwargs}}


log = EventLog(logging.getLogger("gpu_service"))


@dataclass(slots=True)
class _Lines:
    """Lines of one kind: when their interval ends, how many were written in it, or left out since.

    `ends`: seconds, on a clock that does not go back. An interval begins with the first line after
    the last has ended.
    """

    ends: float = float("-inf")
    written: int = 0
    left_out: int = 0


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
        self._lines: dict[tuple[object, ...], _Lines] = {}
        self._clock = clock
        self._lock = threading.Lock()

    def filter(self, record: logging.LogRecord) -> bool:
        """Say whether a line is written."""
        if (limit := self._limits.get(record.msg)) is None:
            return True
        most, interval_s = limit
        fields = getattr(record, "fields", {})
        failure = record.exc_info[0] if record.exc_info else None
        kind = (record.msg, failure, *map(fields.get, REASONS))
        with self._lock:
            if kind not in self._lines and len(self._lines) >= MAX_REASONS:
                kind = (record.msg,)
            lines, now = self._lines.setdefault(kind, _Lines()), self._clock()
            if now >= lines.ends:
                lines.ends, lines.written = now + interval_s, 0
            if lines.written >= most:
                lines.left_out += 1
                return False
            lines.written += 1
            left_out, lines.left_out = lines.left_out, 0
        if left_out:
            record.fields = {**fields, "left_out": left_out}
        return True


@contextmanager
def limited(logger: logging.Logger) -> Iterator[None]:
    """Limit a logger's lines while the block runs."""
    lines = LineFilter()
    logger.addFilter(lines)
    try:
        yield
    finally:
        logger.removeFilter(lines)
