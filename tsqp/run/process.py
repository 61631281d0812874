"""How our programs run: errors in one line, signals, private memory, exit statuses, log lines.

Log lines are for people and machines, for example
`2026-01-31T12:00:00.000+00:00 info ready endpoint=tcp://... start_s=1.2`. Code logs an event name
and `extra={"fields": {...}}`. Fields hold sizes, names and codes, never tensor contents.
"""

from __future__ import annotations

import ctypes
import logging
import os
import resource
import signal
import sys
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, NoReturn

from protocol.errors import TsqpError, UnseededError

if TYPE_CHECKING:
    import click

EXIT_FAILURE = 1
EXIT_REFUSED = 2
EXIT_INTERRUPTED = 128 + signal.SIGINT
_ENDING_SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)
_ROOT = str(Path(__file__).resolve().parents[2])
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


def require_seed() -> None:
    """Raise UnseededError where the operating system's generator has no seed yet."""
    with UnseededError.instead_of(
        BlockingIOError, "the operating system's random generator", "no seed", "one (wait a moment)"
    ):
        os.getrandom(1, os.GRND_NONBLOCK)


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
    logging.basicConfig(handlers=[handler], level=logging.WARNING, force=True)
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


def run(command: click.Command, name: str, *, has_secrets: bool = False) -> NoReturn:
    """Run a program and exit: 0, 1 for a negative verdict, 2 with one line for a TsqpError.

    Which is bad input, and a service that is lost or lies as well. Any other error is 1,
    with its type and place, and not its text, which may be part of a prompt. `TSQP_DEBUG=1`
    shows its traceback. SIGTERM and SIGHUP end the program after its cleaning up, with 128 +
    number. No program writes a core dump; one that has secrets keeps others out of its memory, and
    does not start where they could be guessed.
    """
    import click  # in a program alone: `tsqp.LLM` has none

    # Two torch processes on one machine fight through libgomp's spinning threads; it reads this
    # once, when torch is imported. docs/architecture.md has the measurement.
    os.environ.setdefault("GOMP_SPINCOUNT", "0")
    try:
        keep_memory_private(from_others=has_secrets)
        if has_secrets:
            # Secrets that could be guessed are not drawn, nor those of a VM that was resumed.
            from tee_side.protect.resumption import watch

            require_seed()
            watch()
        with _signals_raise():
            status = command.main(prog_name=name, standalone_mode=False)
            # Here and not at shutdown, where a full disk could no longer be reported.
            sys.stdout.flush()
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        status = EXIT_REFUSED
    except (click.ClickException, TsqpError) as error:
        message = error.format_message() if isinstance(error, click.ClickException) else str(error)
        complain(f"{name}: error: {message}")
        status = EXIT_REFUSED
    except (click.Abort, KeyboardInterrupt):
        complain(f"{name}: interrupted")
        status = EXIT_INTERRUPTED
    except (SystemExit, GeneratorExit) as ended:
        if ended.args == (EXIT_INTERRUPTED,):
            complain(f"{name}: interrupted")
        raise
    except OSError as error:
        # Where the reader has gone (`| head`), nothing is left to say.
        if not isinstance(error, BrokenPipeError):
            where = error.filename or "input or output"
            reason = error.strerror or type(error).__name__
            complain(f"{name}: error: {where}: got the error {reason!r}, expected none")
        # What is still buffered goes nowhere, so that Python has nothing to report at shutdown. A
        # stdout that is no file (in tests) has no descriptor, and no shutdown either.
        with suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = EXIT_FAILURE
    except BaseException as error:
        # Not of Exception alone: a panic of a library in Rust derives from BaseException.
        if os.environ.get("TSQP_DEBUG") == "1":
            complain(
                f"{name}: warning: TSQP_DEBUG=1 shows text that may be part of a prompt or key"
            )
            raise
        # File, line and function, of ours if any is on the way.
        frames = traceback.extract_tb(error.__traceback__)
        at = ([one for one in frames if one.filename.startswith(_ROOT)] or frames)[-1]
        place = f"{at.filename.removeprefix(f'{_ROOT}/')}:{at.lineno} in {at.name}"
        complain(
            f"{name}: internal error: {type(error).__name__} at {place}"
            " (TSQP_DEBUG=1 shows the traceback, with text that may be part of a prompt or key)"
        )
        status = EXIT_FAILURE
    sys.exit(status if isinstance(status, int) else 0)


@contextmanager
def _signals_raise() -> Iterator[None]:
    """Make signals that would end the process raise SystemExit in the main thread.

    So every `finally` runs; the exit status is 128 + number.
    SIGINT too: click prints an empty line when it sees a KeyboardInterrupt. A signal that is
    ignored stays so (`nohup`, and background jobs of a script).
    """
    usual = (signal.SIG_DFL, signal.default_int_handler)
    taken = [n for n in _ENDING_SIGNALS if signal.getsignal(n) in usual]
    if threading.current_thread() is not threading.main_thread():
        taken = []  # Python sets handlers in the main thread alone
    previous = {number: signal.signal(number, _raise_ended) for number in taken}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _raise_ended(number: int, _frame: FrameType | None) -> NoReturn:
    raise SystemExit(128 + number)
