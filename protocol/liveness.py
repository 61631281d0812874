"""Signs of life on a stream: whether a service that does not reply still runs.

A service that was stopped, or whose machine was, says nothing; nor does one whose only thread
computes for twenty seconds. So a client opens a second connection beside that for its messages, on
which a thread of the service that does nothing else sends back what comes: a zero byte, with which
no message begins.
"""

from __future__ import annotations

import socket
from contextlib import suppress
from typing import Final

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
            self._look()
            if not self._answered:
                return self._waited_s < _ANSWER_WITHIN_S
            if self._waited_s >= PROBE_AFTER_S:
                self._socket.send(PROBE, socket.MSG_DONTWAIT)
                self._answered = False
                self._waited_s = 0.0
        except OSError:
            return False
        return True

    def _look(self) -> None:
        with suppress(BlockingIOError):
            if not self._socket.recv(PROBES_BYTES, socket.MSG_DONTWAIT):
                raise ConnectionResetError
            self._answered = True

    def close(self) -> None:
        """Close the connection."""
        self._socket.close()
