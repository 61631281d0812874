"""Signs of life on a stream: whether a service that does not reply still runs.

A service that was stopped, or whose machine was, says nothing; nor does one whose only thread
computes for twenty seconds. So a client opens a second connection beside that for its messages, on
which a thread of the service that does nothing else sends back what comes: a zero byte, with which
no message begins. `Pulse` is the client's end: it asks only while it waits in vain, so that replies
which come at once cost nothing. `Door` is the service's: the same thread lets the connections in,
since whoever comes while the other one computes must hear of life too.
"""

from __future__ import annotations

import errno
import logging
import os
import select
import socket
import threading
import time
from collections import deque
from contextlib import suppress
from typing import Final

log = logging.getLogger("gpu_service")

QUESTION: Final = b"\0"
# After waiting in vain for so long a client asks, and waits for the answer three times as long:
# whoever stops just after an answer is noticed 1.6 s later.
ASK_AFTER_S = 0.4
_ANSWER_WITHIN_S = 3 * ASK_AFTER_S - 0.01
# More than anybody asks at once.
_QUESTIONS_BYTES = 4096

# Where nobody more is let in, who has said nothing for so long makes room.
SILENT_S = 2.0
# How long nobody is let in where there are too few file descriptors.
_ACCEPT_AGAIN_S = 1.0
_EXHAUSTED = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS, errno.ENOSPC})


class Pulse:
    """The client's end of the second connection, which it takes over.

    Asks the first time at once. Raises OSError where the connection is lost already.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._waited_s = 0.0
        self._answered = False
        connection.send(QUESTION, socket.MSG_DONTWAIT)

    def beats(self, waited_s: float) -> bool:
        """Say whether the service still gives signs of life.

        `waited_s`: for how many seconds its client has waited in vain since it asked last. Not how
        late it is: a client that was stopped itself must first look what came meanwhile.
        """
        self._waited_s += waited_s
        try:
            self._look()
            if not self._answered:
                return self._waited_s < _ANSWER_WITHIN_S
            if self._waited_s >= ASK_AFTER_S:
                self._socket.send(QUESTION, socket.MSG_DONTWAIT)
                self._answered = False
                self._waited_s = 0.0
        except OSError:
            return False
        return True

    def _look(self) -> None:
        with suppress(BlockingIOError):
            if not self._socket.recv(_QUESTIONS_BYTES, socket.MSG_DONTWAIT):
                raise ConnectionResetError
            self._answered = True

    def close(self) -> None:
        """Close the connection."""
        self._socket.close()


class Door:
    """Lets clients in and shows signs of life, on a thread of its own, until `stop`.

    A connection on which a message begins goes to `arrivals`; `bell` is a file that is readable
    while there are some. No more than `max_clients` are let in, until one of them has `left`: the
    others wait to be accepted, and who has not said anything for two seconds is dropped then.
    `listening` must not block, and stays the caller's.
    """

    def __init__(self, listening: socket.socket, *, max_clients: int) -> None:
        self._listening = listening
        self._file = listening.fileno()
        self._max_clients = max_clients
        # Those that have not said yet what they are, since when (time.monotonic), the first one
        # first; and those that ask for signs of life.
        self._silent: dict[int, tuple[socket.socket, float]] = {}
        self._asking: dict[int, socket.socket] = {}
        self._arrived: deque[socket.socket] = deque()
        # What both threads change: `left` and `rest` belong to the other one.
        self._lock = threading.Lock()
        self._clients = 0
        self._accepting = True
        self._stopping = False
        # When to try again to accept (time.monotonic), where that failed; 0: it did not.
        self._accept_again = 0.0
        self.bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._wakeup = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._epoll = select.epoll()
        self._epoll.register(self._file, select.EPOLLIN)
        self._epoll.register(self._wakeup, select.EPOLLIN)
        self._thread = threading.Thread(target=self._run, name="stream-door", daemon=True)
        self._thread.start()

    def arrivals(self) -> list[socket.socket]:
        """Return the clients that have come since it was last asked; they are the caller's."""
        with suppress(BlockingIOError):
            os.eventfd_read(self.bell)
        return [self._arrived.popleft() for _ in range(len(self._arrived))]

    def left(self) -> None:
        """Take note that a client has left."""
        with self._lock:
            self._clients -= 1
            if not self._accepting:
                self._accept_more(True)

    def rest(self) -> None:
        """Let nobody in for a while, or until another client leaves.

        For want of memory or file descriptors; it may be somebody else who has them all.
        """
        with self._lock:
            log.warning("no_more_clients", extra={"fields": {"clients": self._clients}})
            self._accept_more(False)
            self._accept_again = time.monotonic() + _ACCEPT_AGAIN_S
        os.eventfd_write(self._wakeup, 1)

    def stop(self) -> None:
        """Let nobody in any more. What is open stays open, and is not answered."""
        if self._stopping:
            return
        self._stopping = True
        os.eventfd_write(self._wakeup, 1)
        self._thread.join()

    def close(self) -> None:
        """Close all connections but those that were handed out. After `stop`, and once only."""
        if self._epoll.closed:
            return
        silent = [connection for connection, _ in self._silent.values()]
        for connection in (*silent, *self._asking.values(), *self._arrived):
            connection.close()
        self._epoll.close()
        os.close(self.bell)
        os.close(self._wakeup)

    def _run(self) -> None:
        while not self._stopping:
            for file, _ in self._epoll.poll(self._left_s()):
                try:
                    self._attend(file)
                except MemoryError:
                    self.rest()
            # After those that have spoken by now were listened to.
            self._make_room()

    def _left_s(self) -> float | None:
        """Return how long nobody is let in; None where that is not a matter of time."""
        now = time.monotonic()
        left_s = []
        with self._lock:
            if self._accept_again and self._accept_again <= now:
                self._accept_more(self._clients < self._max_clients)
            if self._accept_again:
                left_s.append(self._accept_again - now)
            accepting = self._accepting
        if self._silent and not accepting:
            _, since = next(iter(self._silent.values()))
            left_s.append(max(0.0, since + SILENT_S - now))
        return min(left_s, default=None)

    def _make_room(self) -> None:
        """Drop those that have been silent for too long, if that is what keeps others out."""
        if self._accepting:
            return
        until = time.monotonic() - SILENT_S
        silent = [file for file, (_, since) in self._silent.items() if since <= until]
        if silent:
            fields = {"clients": len(silent), "detail": f"silent for {SILENT_S:g} s"}
            log.warning("dropped", extra={"fields": fields})
        for file in silent:
            connection, _ = self._silent.pop(file)
            self.left()
            # Closing takes it out of the epoll set too.
            connection.close()

    def _accept_more(self, accepting: bool) -> None:
        """Change what the thread waits for, whichever thread this is. With the lock."""
        self._accept_again = 0.0
        self._accepting = accepting
        if not self._stopping:
            self._epoll.modify(self._file, select.EPOLLIN if accepting else 0)

    def _attend(self, file: int) -> None:
        if file == self._file:
            self._accept()
        elif file == self._wakeup:
            os.eventfd_read(self._wakeup)
        elif file in self._asking:
            self._answer(file)
        elif file in self._silent:
            self._listen(file)

    def _accept(self) -> None:
        try:
            connection, _ = self._listening.accept()
        except OSError as error:
            # A client that has gone again is nothing.
            if error.errno in _EXHAUSTED:
                self.rest()
            return
        with self._lock:
            self._clients += 1
            if self._clients >= self._max_clients:
                self._accept_more(False)
        try:
            self._silent[connection.fileno()] = connection, time.monotonic()
            self._epoll.register(connection, select.EPOLLIN)
        except (OSError, MemoryError):
            self._silent.pop(connection.fileno(), None)
            connection.close()
            self.left()
            self.rest()

    def _listen(self, file: int) -> None:
        """Find out what a connection is for, by its first byte."""
        connection, _ = self._silent[file]
        try:
            first = connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return
        except OSError:
            first = b""
        if first and first != QUESTION:
            self._epoll.unregister(file)
            del self._silent[file]
            self._arrived.append(connection)
            os.eventfd_write(self.bell, 1)
            if not self._accepting:
                log.warning("no_more_clients", extra={"fields": {"clients": self._clients}})
            return
        del self._silent[file]
        self.left()
        # Each client has one, and may be in the middle of coming back.
        if first and len(self._asking) < 2 * self._max_clients:
            self._asking[file] = connection
            self._answer(file)
        else:
            connection.close()

    def _answer(self, file: int) -> None:
        """Send a question back. Who asks again before that, or anything else, is dropped."""
        connection = self._asking[file]
        questions = b""
        try:
            questions = connection.recv(_QUESTIONS_BYTES, socket.MSG_DONTWAIT)
            if questions == QUESTION and connection.send(questions, socket.MSG_DONTWAIT):
                return
        except OSError:
            pass
        if questions not in (b"", QUESTION):
            detail = f"signs of life: got {len(questions)} bytes, expected one zero at a time"
            log.warning("dropped", extra={"fields": {"detail": detail}})
        del self._asking[file]
        connection.close()
