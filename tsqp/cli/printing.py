"""Showing tokens while they are generated, in a thread that the generation does not wait for.

An observer of the requests sees when each token's begin. Were a token decoded and written between
two requests, one that shows nothing (half of a character, a special token) would come sooner.
"""

from __future__ import annotations

import queue
import re
import sys
import threading
from contextlib import suppress
from typing import TYPE_CHECKING

from tsqp.cli.status import StatusLine

if TYPE_CHECKING:
    from tee_side.engine.text_stream import TextStream

# What has come is shown so often, by the clock and not by tokens.
TICK_S = 0.05
# More than are generated in any tick: with so many unwritten, standard output has stalled.
QUEUED_TOKENS = 1024
# How long the end of a run that has failed waits for such an output.
_STALLED_S = 2.0

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def for_terminal(text: str) -> str:
    """Escape control characters but newline and tab, so that no terminal obeys them."""
    return _CONTROL.sub(lambda found: f"\\x{ord(found[0]):02x}", text)


class Printer:
    """Writes tokens to standard output as text, twenty times a second, in a thread of its own.

    `text`: what decodes them; None writes nothing. `status`: redrawn as often. To a terminal
    control characters are written as `for_terminal` shows them; elsewhere the text is unchanged.
    """

    def __init__(self, text: TextStream | None, status: StatusLine) -> None:
        self._text, self._status = text, status
        self._queue: queue.Queue[int] = queue.Queue(QUEUED_TOKENS)
        self._closing = threading.Event()
        self._failure: BaseException | None = None
        self._open_line = False
        self._thread = threading.Thread(target=self._run, name="printer", daemon=True)

    def __enter__(self) -> Printer:
        self._status.__enter__()
        self._thread.start()
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self._closing.set()
        try:
            self._thread.join(None if kind is None else _STALLED_S)
        finally:
            self._status.__exit__()
        if kind is None and self._failure is not None:
            raise self._failure
        if kind is not None and self._open_line:  # what is said next begins a line
            with suppress(OSError):
                _write("\n")

    def put(self, token_id: int) -> None:
        """Hand over a token, with the same work for each. Raises what writing has raised."""
        if self._failure is not None:
            raise self._failure
        self._queue.put(token_id)

    def _run(self) -> None:
        while not self._closing.wait(TICK_S):
            self._show()
        self._show(last=True)

    def _show(self, *, last: bool = False) -> None:
        """Write what has come; after a failure take it only, so that `put` never blocks."""
        try:
            ids = [self._queue.get_nowait() for _ in range(self._queue.qsize())]
            if self._text is not None and self._failure is None:
                text = "".join(map(self._text.feed, ids)) + (self._text.flush() if last else "")
                if text:
                    _write(for_terminal(text) if sys.stdout.isatty() else text)
                    self._open_line = True
            self._status.draw()
        except BaseException as error:  # noqa: BLE001 - raised in the thread that generates
            self._failure = error


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
