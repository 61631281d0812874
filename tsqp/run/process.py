"""What a process of ours has: private memory, secrets of its own, exit statuses, lines on stderr.

Log lines are for people and machines, for example
`2026-01-31T12:00:00.000+00:00 info ready endpoint=tcp://... start_s=1.2`. Code logs an event name
and `extra={"fields": {...}}`. Fields hold sizes, names and codes, never tensor contents.
"""

from __future__ import annotations

import ctypes
import logging
import os
import resource
import sys
from contextlib import suppress
from datetime import UTC, datetime

from protocol.errors import UnseededError

EXIT_FAILURE = 1
EXIT_REFUSED = 2
_PR_SET_DUMPABLE = 4  # of prctl(2)


def keep_memory_private(*, from_others: bool) -> None:
    """Write no core dump from now on; `from_others`: nor let a process of this user look inside.

    That is ptrace and /proc/PID/mem. It does not bind the kernel, nor a process with
    CAP_SYS_PTRACE. Raises OSError.
    """
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if from_others and sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0):
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number), "prctl PR_SET_DUMPABLE")


def require_own_secrets() -> None:
    """Refuse to draw secrets that could be guessed, and begin to watch for a VM that is resumed.

    Raises UnseededError.
    """
    from tee_side.protect.resumption import watch

    require_seed()
    watch()


def require_seed() -> None:
    """Raise UnseededError where the operating system's generator has no seed yet."""
    try:
        os.getrandom(1, os.GRND_NONBLOCK)
    except BlockingIOError:
        raise UnseededError(
            "the operating system's random generator", got="no seed", expected="one (wait a moment)"
        ) from None


def _quoted(value: object) -> str:
    text = str(value)
    if text and not any(c.isspace() or c in '"=' or not c.isprintable() for c in text):
        return text
    escaped = text.encode("unicode_escape").decode("ascii").replace('"', '\\"')
    return f'"{escaped}"'


class LogfmtFormatter(logging.Formatter):
    """One line an event; a traceback follows on lines of its own."""

    def format(self, record: logging.LogRecord) -> str:
        """Render a record."""
        stamp = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        fields: dict[str, object] = getattr(record, "fields", {})
        pairs = "".join(f" {name}={_quoted(value)}" for name, value in fields.items())
        line = f"{stamp} {record.levelname.lower()} {record.getMessage()}{pairs}"
        if record.exc_info:
            line += "\n" + self.formatException(record.exc_info)
        return line


# What the programs log under; torch and others have loggers of their own.
OWN_LOGGERS = ("gpu_service", "tee_side", "protocol")


def configure(level: str) -> None:
    """Install the formatter on the root logger, writing to stderr.

    The level is that of our own events: what a library tells at info is not about this service.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(LogfmtFormatter())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    for name in OWN_LOGGERS:
        logging.getLogger(name).setLevel(level.upper())


def tell(text: str) -> None:
    """Write a text and a newline to stderr."""
    sys.stderr.write(f"{text}\n")


def complain(message: str) -> None:
    """Write one line to stderr, if stderr still has a reader."""
    with suppress(OSError):
        tell(" ".join(message.split()))
        sys.stderr.flush()


def bytes_for_people(size: int) -> str:
    """Render a number of bytes: `12.3 kB`, `4.5 MB`."""
    return f"{size / 1e6:.1f} MB" if size >= 1e5 else f"{size / 1e3:.1f} kB"
