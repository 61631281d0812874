"""Threads that let clients in beside the loop: of any stream of ours, and of a stream transport.

They never compute: a client that comes while the loop does must be let in too, and over a stream
transport it must hear signs of life (`protocol.liveness`).
"""

from __future__ import annotations

import errno
import math
import os
import select
import socket
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from contextlib import suppress

from gpu_side.event_log import log
from protocol.liveness import PROBE, PROBES_BYTES

# While no further client is let in, a client that has been silent for this long is dropped.
SILENT_S = 2.0
# How long no client is let in where there are too few file descriptors.
_ACCEPT_AGAIN_S = 1.0
_EXHAUSTED = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS, errno.ENOSPC})


class AcceptingThread(ABC):
    """Accepts connections on a thread of its own, and pauses where descriptors or memory run out.

    A subclass calls this constructor last, as the thread then starts. `failed`: an exception, which
    is in the log, has ended the thread, and no client is let in any more. No more than
    `max_clients` are let in until one of them has left (`client_closed`).
    """

    # The event that says that the thread has failed.
    _failure: str

    def __init__(self, listening: socket.socket, *, max_clients: float = math.inf) -> None:
        self._listening = listening
        self._file = listening.fileno()
        self._clients, self._max_clients = 0, max_clients
        # `client_closed` and `pause_accepting` may be called on another thread.
        self._lock = threading.Lock()
        # Whether there is room for another client.
        self.accepting = True
        self._stopping = self.failed = False
        # When to try again to accept (time.monotonic), where that failed; 0: it did not.
        self._accept_again = 0.0
        self._wakeup = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._epoll = select.epoll()
        self._epoll.register(self._file, select.EPOLLIN)
        self._epoll.register(self._wakeup, select.EPOLLIN)
        self._thread = threading.Thread(target=self._run, name=type(self).__name__, daemon=True)
        self._thread.start()

    def client_closed(self) -> None:
        """Take note that a client has left."""
        with self._lock:
            self._clients -= 1
            if not self.accepting:
                self._accept_more(True)

    def pause_accepting(self) -> None:
        """Let no client in for a while, or until another client leaves.

        For want of memory or file descriptors, which another process may hold.
        """
        with self._lock:
            log.warning("no_more_clients", clients=self._clients)
            self._accept_more(False)
            self._accept_again = time.monotonic() + _ACCEPT_AGAIN_S
        os.eventfd_write(self._wakeup, 1)

    def stop(self) -> None:
        """Let no client in any more."""
        self._stopping = True
        os.eventfd_write(self._wakeup, 1)

    # --------------------------------------------------------------------------- on the own thread

    def _run(self) -> None:
        try:
            self._attend_all()
        except Exception:
            self.failed = True
            log.exception(self._failure, lets_in="nobody")
        finally:
            self._ended()

    @abstractmethod
    def _attend_all(self) -> None:
        """Attend to connections until told to stop."""

    @abstractmethod
    def _ended(self) -> None:
        """Close what the thread has to close when it ends, also where it has failed."""

    def _left_s(self) -> float | None:
        """Return how long no client is let in; None where that is not a matter of time."""
        if not self._accept_again:  # a pause that begins now wakes this thread up
            return None
        now = time.monotonic()
        with self._lock:
            if self._accept_again and self._accept_again <= now:
                self._accept_more(self._clients < self._max_clients)
            return self._accept_again - now if self._accept_again else None

    def _accept_more(self, accepting: bool) -> None:
        """Change what the thread waits for, whichever thread this is. With the lock."""
        self._accept_again = 0.0
        self.accepting = accepting
        if not self._stopping:
            self._epoll.modify(self._file, select.EPOLLIN if accepting else 0)

    def _accept(self) -> None:
        """Let a client in, or pause."""
        try:
            self._let_in()
        except OSError as error:
            # Otherwise the client disconnected before accept(): ignore it.
            if error.errno in _EXHAUSTED:
                self.pause_accepting()

    @abstractmethod
    def _let_in(self) -> None:
        """Accept a client (`_accepted`). Raises OSError where there is none."""

    def _accepted(self) -> socket.socket:
        """Accept a connection and count its client. Raises OSError."""
        connection, _ = self._listening.accept()
        with self._lock:
            self._clients += 1
            if self._clients >= self._max_clients:
                self._accept_more(False)
        return connection


class Acceptor(AcceptingThread):
    """Lets clients in and answers probes until `stop`.

    A connection on which a message begins goes to `arrivals`; `ready_fd` is a file that is readable
    while there are some. Clients beyond `max_clients` wait to be accepted, and a client that was
    silent for two seconds is dropped then. Of connections for probes there are twice as many, and a
    new one takes the place of the one that was idle longest. `listening` must not block, and stays
    the caller's.

    Should the thread fail, it closes what it holds, and `ready_fd` is readable, so that the
    service, which can let in no client any more, ends. Its clients go on with another.
    """

    _failure = "acceptor_failed"

    def __init__(self, listening: socket.socket, *, max_clients: int) -> None:
        # Those that have not said yet what they are, since when (time.monotonic), the first one
        # first; and those that probe, the one that has not for longest first.
        self._unclassified: dict[int, tuple[socket.socket, float]] = {}
        self._probes: dict[int, socket.socket] = {}
        self._arrived: deque[socket.socket] = deque()
        self.ready_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        super().__init__(listening, max_clients=max_clients)

    def arrivals(self) -> list[socket.socket]:
        """Return the clients that have come since it was last asked; they are the caller's."""
        with suppress(BlockingIOError):
            os.eventfd_read(self.ready_fd)
        return [self._arrived.popleft() for _ in range(len(self._arrived))]

    def stop(self) -> None:
        """Let no client in any more. What is open stays open, and is not answered."""
        if not self._stopping:
            super().stop()
            self._thread.join()

    def close(self) -> None:
        """Close all connections but those that were handed out. After `stop`, and once only."""
        if self._epoll.closed:
            return
        self._close_connections()
        for connection in self._arrived:
            connection.close()
        self._epoll.close()
        os.close(self.ready_fd)
        os.close(self._wakeup)

    def _close_connections(self) -> None:
        unclassified = [connection for connection, _ in self._unclassified.values()]
        for connection in (*unclassified, *self._probes.values()):
            connection.close()

    def _attend_all(self) -> None:
        while not self._stopping:
            for file, _ in self._epoll.poll(self._left_s()):
                try:
                    self._attend(file)
                except MemoryError:
                    self.pause_accepting()
            # After those that have spoken by now were listened to.
            self._make_room()

    def _ended(self) -> None:
        if self.failed:
            self._close_connections()
            # A client that connects from now on is refused, and does not wait to be accepted.
            with suppress(OSError):
                self._listening.shutdown(socket.SHUT_RDWR)
            os.eventfd_write(self.ready_fd, 1)

    def _left_s(self) -> float | None:
        left_s = super()._left_s()
        if self.accepting or not self._unclassified:
            return left_s
        _, since = next(iter(self._unclassified.values()))
        silent_s = max(0.0, since + SILENT_S - time.monotonic())
        return silent_s if left_s is None else min(left_s, silent_s)

    def _make_room(self) -> None:
        """Drop those that have been silent for too long, if that is what keeps others out."""
        if self.accepting:
            return
        until = time.monotonic() - SILENT_S
        silent = [file for file, (_, since) in self._unclassified.items() if since <= until]
        if silent:
            log.warning(
                "dropped",
                clients=len(silent),
                reason="silent",
                detail=f"silent for {SILENT_S:g} s",
            )
        for file in silent:
            connection, _ = self._unclassified.pop(file)
            self.client_closed()
            # Closing takes it out of the epoll set too.
            connection.close()

    def _attend(self, file: int) -> None:
        if file == self._file:
            self._accept()
        elif file == self._wakeup:
            os.eventfd_read(self._wakeup)
        elif file in self._probes:
            self._answer(file)
        elif file in self._unclassified:
            self._classify(file)

    def _let_in(self) -> None:
        connection = self._accepted()
        try:
            self._unclassified[connection.fileno()] = connection, time.monotonic()
            self._epoll.register(connection, select.EPOLLIN)
        except (OSError, MemoryError):
            self._unclassified.pop(connection.fileno(), None)
            connection.close()
            self.client_closed()
            self.pause_accepting()

    def _classify(self, file: int) -> None:
        """Find out what a connection is for, by its first byte."""
        connection, _ = self._unclassified[file]
        try:
            first = connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return
        except OSError:
            first = b""
        del self._unclassified[file]
        if first and first != PROBE:
            self._epoll.unregister(file)
            if not self.accepting:
                log.warning("no_more_clients", clients=self._clients)
            self._arrived.append(connection)
            os.eventfd_write(self.ready_fd, 1)
            return
        self.client_closed()
        if not first:
            connection.close()
            return
        # Each client has one, and may be in the middle of coming back.
        most = int(2 * self._max_clients)
        if len(self._probes) >= most:
            idle = next(iter(self._probes))
            self._probes.pop(idle).close()
            log.warning(
                "dropped", reason="idle_probe", detail=f"signs of life: idle longest of {most}"
            )
        self._probes[file] = connection
        self._answer(file)

    def _answer(self, file: int) -> None:
        """Send a probe back. A client that sends more before that, or anything else, is dropped."""
        connection = self._probes.pop(file)
        probes = b""
        with suppress(OSError):
            probes = connection.recv(PROBES_BYTES, socket.MSG_DONTWAIT)
            if probes == PROBE and connection.send(probes, socket.MSG_DONTWAIT):
                # Behind those that have not probed since.
                self._probes[file] = connection
                return
        if probes not in (b"", PROBE):
            log.warning(
                "dropped",
                reason="no_probe",
                detail=f"signs of life: got {len(probes)} bytes, expected one zero at a time",
            )
        connection.close()
