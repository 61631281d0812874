"""How an end waits: awake for a moment, then asleep, and looking for signs of life.

To be woken up costs tens of microseconds, more than a small request itself. Where the previous wait
was short the next one probably is too, and asking again and again is then faster than sleeping. It
keeps a core busy, so it ends after `spin_us` and does not begin after a long wait.

A service that was stopped, or whose machine was, says nothing; nor does one whose only thread
computes for twenty seconds. So a client opens a second connection beside that for its messages, on
which a thread of the service that does nothing else sends back what comes: a zero byte, with which
no message begins.
"""

import os
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Final, TypeVar

R = TypeVar("R")


class AdaptiveSpin:
    """Decides whether to spin. `spin_us`: for how long at most, in microseconds; 0: never."""

    def __init__(self, spin_us: float) -> None:
        self.limit_us = int(spin_us)
        self.is_on = self.limit_us > 0
        # Whether the previous wait was shorter than `spin_us`.
        self.expects_soon = self.is_on

    def wait(self, ask: Callable[[float], R], left_s: float) -> R:
        """Ask with no patience while it is worth it, then once for what is left of `left_s`.

        `ask`: waits for so many seconds at most, and returns what has come, if anything.
        """
        if not self.is_on:
            return ask(left_s)
        started_ns = time.perf_counter_ns()
        found = None
        if self.expects_soon:
            give_up_ns = started_ns + min(1000 * self.limit_us, left_s * 1e9)
            found = ask(0.0)
            while not found and time.perf_counter_ns() < give_up_ns:
                # Where there are fewer cores than who wants one, the other end may need this one.
                os.sched_yield()
                found = ask(0.0)
        if not found:
            found = ask(max(0.0, left_s - (time.perf_counter_ns() - started_ns) / 1e9))
        self.waited(started_ns)
        return found

    def waited(self, started_ns: int) -> None:
        """Take note of a wait that began at `started_ns` (perf_counter_ns) and ends now."""
        self.expects_soon = time.perf_counter_ns() - started_ns < 1000 * self.limit_us


# Of ZeroMQ, with a quarter of it between two heartbeats: a stopped peer is noticed after 1.25 s at
# most.
DEFAULT_HEARTBEAT_TIMEOUT_S = 1.0
PROBE: Final = b"\0"
# After waiting in vain for so long a client probes, and waits for the answer three times as long:
# a peer that stops just after an answer is noticed 1.2 s later.
PROBE_AFTER_S = 0.3
_ANSWER_WITHIN_S = 3 * PROBE_AFTER_S - 0.01
# More than a peer sends at once.
PROBES_BYTES = 4096


class LivenessProbe:
    """The client's end of the second connection, which it takes over.

    Probes only while its client waits in vain, so that replies which come at once cost nothing, and
    the first time at once. Raises OSError where the connection is lost already.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._waited_s = 0.0
        self._answered = False
        connection.send(PROBE, socket.MSG_DONTWAIT)

    def is_alive(self, waited_s: float) -> bool:
        """Say whether the service still gives signs of life.

        `waited_s`: for how many seconds its client has waited in vain since it asked last. Not how
        late it is: a client that was stopped itself must first look what came meanwhile.
        """
        self._waited_s += waited_s
        try:
            with suppress(BlockingIOError):
                if not self._socket.recv(PROBES_BYTES, socket.MSG_DONTWAIT):
                    return False
                self._answered = True
            if not self._answered:
                return self._waited_s < _ANSWER_WITHIN_S
            if self._waited_s >= PROBE_AFTER_S:
                self._socket.send(PROBE, socket.MSG_DONTWAIT)
                self._answered = False
                self._waited_s = 0.0
        except OSError:
            return False
        return True

    def close(self) -> None:
        """Close the connection."""
        self._socket.close()
