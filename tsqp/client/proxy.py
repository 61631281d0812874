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
from tsqp.client.attested_tls import AttestedContext
from tsqp.client.connection import Address, prove

_CONNECT_S = 30.0
_CHUNK_BYTES = 64 * 1024


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
        self._guard, self._over = threading.Lock(), threading.Event()
        self.proved = prove(server, context)
        try:
            self._listening = socket.create_server(listen)
        except OSError as error:
            got = error.strerror or type(error).__name__
            where = f"--listen {listen[0]}:{listen[1]}"
            raise EndpointError(where, got=got, expected="an address that is free") from None
        self.port: int = self._listening.getsockname()[1]
        self._again = threading.Thread(target=self._prove_again, daemon=True)

    def serve_forever(self) -> None:
        """Carry connections until `close`, which any thread may call."""
        self._again.start()
        while not self._over.is_set():
            try:
                near, _ = self._listening.accept()
            except OSError:
                break  # closed
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
            try:
                host, port = self._server
                plain = socket.create_connection((host, port), _CONNECT_S)
                far = self._context.wrap_socket(plain, server_hostname=self._server.host)
            except TsqpError as error:
                self._say(f"refused: {error}")
                return
            except OSError as error:
                self._say(f"refused: {self._server}: {error.strerror or type(error).__name__}")
                return
            both = {near, far}
            with far:
                with self._guard:
                    self._tunnels |= both
                try:
                    _carry_both(near, far)
                finally:
                    with self._guard:
                        self._tunnels -= both

    def _prove_again(self) -> None:
        """Have the server prove itself again and again: connections may last for long."""
        while not self._over.wait(self._context.again_s):
            try:
                self._context.proved = None
                prove(self._server, self._context)
            except TsqpError as error:
                self._say(f"connections are cut: {error}")
                self._cut()

    def _cut(self) -> None:
        with self._guard:
            for one in self._tunnels:
                with suppress(OSError):
                    one.shutdown(socket.SHUT_RDWR)


def _carry_both(near: socket.socket, far: ssl.SSLSocket) -> None:
    """Carry bytes both ways until one side ends.

    By one thread, as OpenSSL asks for. It sends while it does not read: the server reads a request
    to its end before it answers.
    """
    far.settimeout(None)
    near.settimeout(None)
    with suppress(OSError):
        while True:
            ready = [far] if far.pending() else select.select([near, far], [], [])[0]
            for source in ready:
                piece = source.recv(_CHUNK_BYTES)
                if not piece:
                    return
                (near if source is far else far).sendall(piece)
