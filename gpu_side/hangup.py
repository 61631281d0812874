"""SIGHUP: read the list of allowed clients again, while the service goes on."""

from __future__ import annotations

import logging
import os
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

from protocol.channel import Listener
from protocol.curve import read_allow_list
from protocol.errors import KeyFileError
from protocol.zmq_listener import ZmqListener

log = logging.getLogger("gpu_service")


@contextmanager
def rereads_list(listener: Listener, path: Path | None) -> Iterator[None]:
    """Give the listener the allow-list at `path` anew whenever SIGHUP comes; None: there is none.

    To be entered where all other signals write to a socket already (`signal.set_wakeup_fd`), from
    the main thread: they still do. A list that cannot be read changes nothing, and the log says so.
    """
    if path is None or not isinstance(listener, ZmqListener):
        yield
        return
    reader, writer = socket.socketpair()
    writer.setblocking(False)
    previous_fd = signal.set_wakeup_fd(writer.fileno())
    previous = signal.signal(signal.SIGHUP, _ignore)
    # On a thread, because whoever answers requests must not be woken by it, and because a signal
    # finds that one in the middle of anything.
    thread = threading.Thread(
        target=_read_signals, args=(reader, previous_fd, listener, path), name="hangup", daemon=True
    )
    thread.start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(previous_fd)
        signal.signal(signal.SIGHUP, previous)
        writer.close()
        thread.join()
        reader.close()


def _ignore(_number: int, _frame: FrameType | None) -> None:
    """Do nothing: the number of the signal has been written to the socket by now."""


def _read_signals(reader: socket.socket, others: int, listener: ZmqListener, path: Path) -> None:
    while numbers := reader.recv(64):
        if rest := bytes(number for number in numbers if number != signal.SIGHUP):
            # Where the socket is full its reader has been woken, and has enough to read.
            with suppress(BlockingIOError):
                os.write(others, rest)
        if len(rest) < len(numbers):
            _reread(listener, path)


def _reread(listener: ZmqListener, path: Path) -> None:
    try:
        allowed = read_allow_list(path)
    except KeyFileError as error:
        log.error("allow_list_unchanged", extra={"fields": {"detail": str(error)}})
        return
    listener.allow(allowed)
    log.info("allow_list", extra={"fields": {"keys": len(allowed)}})
