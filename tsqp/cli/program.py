"""How the three programs run: errors in one line, signals, private memory, exit statuses."""

from __future__ import annotations

import os
import signal
import sys
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import NoReturn

import click

from protocol.errors import TsqpError
from tsqp.run.process import (
    EXIT_FAILURE,
    EXIT_REFUSED,
    complain,
    keep_memory_private,
    require_own_secrets,
)

EXIT_INTERRUPTED = 128 + signal.SIGINT
_ENDING_SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)

_ROOT = str(Path(__file__).resolve().parents[2])


class _EndedBySignal(SystemExit):
    """Raised by the signal handlers, so that every `finally` runs; exit status 128 + number."""


def run(command: click.Command, name: str, *, has_secrets: bool = False) -> NoReturn:
    """Run a program and exit: 0, 1 for a negative verdict, 2 with one line for a TsqpError.

    Which is bad input, and a service that is lost or lies as well. Any other error is 1,
    with its type and place, and not its text, which may be part of a prompt. `TSQP_DEBUG=1`
    shows its traceback. SIGTERM and SIGHUP end the program after its cleaning up, with 128 +
    number. No program writes a core dump; one that has secrets keeps others out of its memory, and
    does not start where they could be guessed.
    """
    # Two torch processes on one machine fight through libgomp's spinning threads; it reads this
    # once, when torch is imported. docs/architecture.md has the measurement.
    os.environ.setdefault("GOMP_SPINCOUNT", "0")
    try:
        keep_memory_private(from_others=has_secrets)
        if has_secrets:
            require_own_secrets()
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
    except _EndedBySignal as ended:
        if ended.code == EXIT_INTERRUPTED:
            complain(f"{name}: interrupted")
        raise
    except BrokenPipeError:
        # The reader has gone (`| head`): nothing is left to say.
        _discard_stdout()
        status = EXIT_FAILURE
    except OSError as error:
        where = error.filename or "input or output"
        reason = error.strerror or type(error).__name__
        complain(f"{name}: error: {where}: got the error {reason!r}, expected none")
        _discard_stdout()
        status = EXIT_FAILURE
    except (SystemExit, GeneratorExit):
        raise
    except BaseException as error:
        # Not of Exception alone: a panic of a library in Rust derives from BaseException.
        if os.environ.get("TSQP_DEBUG") == "1":
            complain(
                f"{name}: warning: TSQP_DEBUG=1 shows text that may be part of a prompt or key"
            )
            raise
        complain(
            f"{name}: internal error: {type(error).__name__} at {_place(error)}"
            " (TSQP_DEBUG=1 shows the traceback, with text that may be part of a prompt or key)"
        )
        status = EXIT_FAILURE
    sys.exit(status if isinstance(status, int) else 0)


def _place(error: BaseException) -> str:
    """Say where an error was raised: file, line and function, of ours if any is on the way."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = [frame for frame in frames if frame.filename.startswith(_ROOT)]
    frame = (ours or frames)[-1]
    return f"{frame.filename.removeprefix(f'{_ROOT}/')}:{frame.lineno} in {frame.name}"


@contextmanager
def _signals_raise() -> Iterator[None]:
    """Make signals that would end the process raise `_EndedBySignal` in the main thread.

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
    raise _EndedBySignal(128 + number)


def _discard_stdout() -> None:
    """Send what is still buffered nowhere, so that Python has nothing to report at shutdown."""
    # A stdout that is no file (in tests) has no descriptor, and no shutdown either.
    with suppress(OSError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
