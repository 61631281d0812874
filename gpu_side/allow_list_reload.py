"""SIGHUP: read the list of allowed clients again, while the service goes on."""

from __future__ import annotations

import logging
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TypeAlias

from gpu_side.access import read_allow_list
from protocol.errors import KeyFileError

Allow: TypeAlias = Callable[[frozenset[bytes]], None]
Reader: TypeAlias = Callable[[Path], frozenset[bytes]]

log = logging.getLogger("gpu_service")

# How long the end waits for a list that is just being read, perhaps over a network that hangs.
_ENDING_S = 1.0


@contextmanager
def rereads_list(
    allow: Allow,
    path: Path | None,
    read: Reader | None = None,
) -> Iterator[None]:
    """Give `allow` the allow-list at `path` anew whenever SIGHUP comes; None: there is none.

    `allow`: called on a thread; `read`: reads a list of another kind.

    To be entered from the main thread. While the block runs, signals are written to a socket of
    this module's (`signal.set_wakeup_fd`), and handlers of others must do without: the listeners
    that have a list look up a few times a second. A list that is empty or cannot be read
    changes nothing, and the log says so. Without a list the signal is ignored.
    """
    if path is None:
        with _ignores_the_signal():
            yield
        return
    reader, writer = socket.socketpair()
    writer.setblocking(False)
    # Full is the socket only where the thread has enough to read.
    previous_fd = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
    previous = signal.signal(signal.SIGHUP, _ignore)
    # On a thread: the loop that answers requests must not be woken by a signal, which finds it in
    # the middle of anything.
    thread = threading.Thread(
        target=_read_signals, args=(reader, allow, path, read), name="allow-list", daemon=True
    )
    thread.start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(previous_fd)
        signal.signal(signal.SIGHUP, previous)
        writer.close()
        thread.join(_ENDING_S)


@contextmanager
def _ignores_the_signal() -> Iterator[None]:
    """Ignore the signal: by default it ends the process, and what waits is lost."""
    previous = signal.signal(signal.SIGHUP, _log_ignored)
    try:
        yield
    finally:
        signal.signal(signal.SIGHUP, previous)


def _log_ignored(_number: int, _frame: FrameType | None) -> None:
    log.info("sighup_ignored", extra={"fields": {"detail": "there is no list to read again"}})


def _ignore(_number: int, _frame: FrameType | None) -> None:
    """Do nothing: the number of the signal has been written to the socket by now."""


def _read_signals(
    reader: socket.socket,
    allow: Allow,
    path: Path,
    read: Reader | None,
) -> None:
    with reader:
        while numbers := reader.recv(64):
            if signal.SIGHUP in numbers:
                _reread(allow, path, read)


def _reread(allow: Allow, path: Path, read: Reader | None) -> None:
    try:
        allowed = (read or read_allow_list)(path)
        allow(allowed)
    except KeyFileError as error:
        log.error("allow_list_unchanged", extra={"fields": {"detail": str(error)}})
        return
    except Exception:
        # Exhausted memory, or a mistake of ours: the next SIGHUP finds this thread as it was.
        log.exception("allow_list_unchanged", extra={"fields": {"detail": "a failure of ours"}})
        return
    log.info("allow_list", extra={"fields": {"keys": len(allowed)}})
