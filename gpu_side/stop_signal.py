"""How a signal reaches a loop that waits for messages."""

from __future__ import annotations

import socket
from contextlib import suppress
from types import FrameType


class StopSignal:
    """Turns SIGTERM and SIGINT into a readable socket, so that a blocked poll wakes at once.

    As `writer` it may be given to `signal.set_wakeup_fd` besides: a signal that comes just before a
    poll blocks then ends it, whose handler would have to wait for the poll's end.

    `list_changed`: whether the list of clients was read again; the loop sets it back.
    """

    def __init__(self) -> None:
        self.reader, self.writer = socket.socketpair()
        self.reader.setblocking(False)
        self.writer.setblocking(False)
        self.requested = self.list_changed = False

    def request(self, _number: int, _frame: FrameType | None) -> None:
        """Handle a signal."""
        self.requested = True
        self._wake()

    def note_list(self) -> None:
        """Have the loop look which of its clients are still let in; from another thread."""
        self.list_changed = True
        self._wake()

    def _wake(self) -> None:
        # Where it is full, its reader has been woken.
        with suppress(BlockingIOError):
            self.writer.send(b"\0")

    def forget_wakeup(self) -> None:
        """Read what has woken the loop: it may be the number of a signal that ends nothing."""
        with suppress(BlockingIOError):
            while self.reader.recv(64):
                pass

    def rearm(self) -> None:
        """Wait for another one."""
        self.requested = False
        self.forget_wakeup()
