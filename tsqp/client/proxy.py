"""A proxy on this machine, so that any program reaches a server that proves what it is.

It takes connections in the clear and carries their bytes over attested TLS, each over one of its
own. It never falls back: where the server does not prove itself, a connection is closed unread.
"""

from __future__ import annotations

import select
import socket
import ssl
import threading
from collections.abc import Callable
from contextlib import suppress

from protocol.errors import EndpointError, TsqpError
from tsqp.client.attested_tls import Address, AttestedContext, cut, prove

_CONNECT_S = 30.0
_CHUNK_BYTES = 64 * 1024
# Of connections, each with a thread; and how long to wait when none can be accepted.
_MOST, _PAUSE_S = 256, 0.2


class Proxy:
    """Listens at `listen`, and serves until `close`; port 0: one that is free.

    `say`: told what a person should know. Raises EndpointError, and NotAttestedError for a server
    that does not prove itself at the start.
    """

    def __init__(
        self,
        listen: tuple[str, int],
        server: Address,
        context: AttestedContext,
        say: Callable[[str], None],
    ) -> None:
        self._server, self._context, self._say = server, context, say
        self._tunnels: set[socket.socket] = set()
        self._cuts = 0
        self._guard, self._over = threading.Lock(), threading.Event()
        self._places = threading.Semaphore(_MOST)
        self.proved = prove(server, context)
        try:
            family = socket.AF_INET6 if ":" in listen[0] else socket.AF_INET
            self._listening = socket.create_server(listen, family=family)
        except OSError as error:
            raise EndpointError(
                f"--listen {listen[0]}:{listen[1]}",
                got=error.strerror or type(error).__name__,
                expected="an address that is free",
            ) from None
        self.port: int = self._listening.getsockname()[1]
        self._again = threading.Thread(target=self._prove_again, daemon=True)

    def serve_forever(self) -> None:
        """Carry connections until `close`, which any thread may call."""
        self._again.start()
        while not self._over.is_set():
            try:
                near, _ = self._listening.accept()
            except OSError as error:
                # Closed, or no descriptor is left for now.
                if not self._over.wait(_PAUSE_S):
                    self._say(f"not accepted: {error.strerror or type(error).__name__}")
                continue
            if not self._places.acquire(blocking=False):
                near.close()
                continue
            threading.Thread(target=self._carry, args=(near,), daemon=True).start()

    def close(self) -> None:
        """End, with all connections."""
        self._over.set()
        # To close it alone would leave `accept` waiting.
        with suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()
        self._cut()

    def _carry(self, near: socket.socket) -> None:
        with near:
            cuts = self._cuts
            try:
                host, port = self._server
                plain = socket.create_connection((host, port), _CONNECT_S)
                with self._context.wrap_socket(plain, server_hostname=host) as far:
                    self._carry_both(near, far, cuts)
            except Exception as error:  # noqa: BLE001 - whatever it is, nothing is carried
                self._say(f"refused: {_words(error)}")
            finally:
                self._places.release()

    def _carry_both(self, near: socket.socket, far: ssl.SSLSocket, cuts: int) -> None:
        both = {near, far}
        with self._guard:
            # All others were cut while this one was being set up.
            if self._cuts != cuts:
                return
            self._tunnels |= both
        try:
            with suppress(OSError):
                _carry_bytes(near, far)
        finally:
            with self._guard:
                self._tunnels -= both

    def _prove_again(self) -> None:
        """Have the server prove itself again and again: connections may last for long."""
        while not self._over.wait(self._context.again_s):
            try:
                self._context.proved = None
                prove(self._server, self._context)
            except Exception as error:  # noqa: BLE001 - without a proof, nothing goes on
                self._say(f"connections are cut: {_words(error)}")
                self._cut()

    def _cut(self) -> None:
        with self._guard:
            self._cuts += 1
            for one in self._tunnels:
                cut(one)


def _words(error: Exception) -> str:
    return str(error) if isinstance(error, TsqpError) else type(error).__name__


def _carry_bytes(near: socket.socket, far: ssl.SSLSocket) -> None:
    """Carry bytes both ways until the server's side ends; the other may have sent all it has.

    By one thread, as OpenSSL asks for. It sends while it does not read: the server reads a request
    to its end before it answers. TLS has records of its own, so there may be nothing to read.
    """
    near.settimeout(None)
    open_ones: list[socket.socket] = [near, far]
    while True:
        ready = [far] if far.pending() else select.select(open_ones, [], [])[0]
        if near in ready:
            if piece := near.recv(_CHUNK_BYTES):
                far.settimeout(None)
                far.sendall(piece)
            else:
                open_ones.remove(near)
        if far in ready:
            far.settimeout(0.0)
            try:
                piece = far.recv(_CHUNK_BYTES)
            except ssl.SSLWantReadError:
                continue
            if not piece:
                return
            near.sendall(piece)
