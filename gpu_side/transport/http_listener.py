"""The service's end of HTTP, for hosts that let nothing else through: uvicorn on a thread.

It takes one message a request and answers it with the reply (`gpu_side.transport.http_gateway`);
`GET /health` says whether messages are taken, without the loop that answers them. Headers are
bounded by h11; a connection that is silent for too long, or whose client reads nothing, is cut.
"""

from __future__ import annotations

import asyncio
import socket
import threading
import time
import weakref
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from gpu_side.access import HttpKeys
from gpu_side.event_log import log
from gpu_side.transport.http_gateway import Gateway
from gpu_side.transport.listener import (
    Incoming,
    WaitingListener,
    admits_no_client,
    cannot_bind,
    listen_at,
)
from protocol.encoding import DEFAULT_MAX_MESSAGE_BYTES
from protocol.endpoint import parse_endpoint
from protocol.errors import EndpointError, SettingsError
from protocol.tensors import Buffer

if TYPE_CHECKING:
    from uvicorn._types import HTTPScope
    from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle


MAX_CONNECTIONS = 512
# A connection that asks nothing, or does not come to the end of its headers, is cut after so long;
# where they are so many that others are kept out, sooner, as one that does not begin TLS always is.
IDLE_S = 75
SILENT_S = 2.0
_LOOK_S = 0.5


class HttpListener(WaitingListener):
    """An HTTP server that hands out messages and takes replies. `keys`: see `HttpKeys`.

    Raises EndpointError when the address is malformed, in use or not ours to bind, and
    SettingsError where the extra `http` is not installed.
    """

    def __init__(
        self,
        endpoint: str,
        *,
        max_message_bytes: int = DEFAULT_MAX_MESSAGE_BYTES,
        keys: HttpKeys | None = None,
    ) -> None:
        with SettingsError.instead_of(
            ModuleNotFoundError, "--http", "no uvicorn", "it installed: pip install '.[http]'"
        ):
            # Not imported, and need not be installed, where the service listens elsewhere.
            import uvicorn  # noqa: PLC0415
        super().__init__()
        keys = keys or HttpKeys()
        self._socket, self.endpoint = _bound(endpoint, keys)
        self._arrived: deque[Incoming] = deque()
        # Set when there is something new in it, or the listener's thread has failed.
        self._come = threading.Event()
        self._gateway = Gateway(self._take, self._cut, max_message_bytes, keys.tokens)
        self._loop = asyncio.new_event_loop()
        if keys.certificate is not None:
            # uvicorn has no option for it.
            self._loop.create_server = partial(  # type: ignore[method-assign]
                self._loop.create_server, ssl_handshake_timeout=SILENT_S
            )
        self._closed = False
        self._server = uvicorn.Server(
            uvicorn.Config(
                self._gateway,
                http="h11",
                ws="none",
                lifespan="off",
                log_config=None,
                log_level="critical",
                access_log=False,
                server_header=False,
                proxy_headers=False,  # a client is what its socket is
                timeout_keep_alive=IDLE_S,
                timeout_graceful_shutdown=1,
                ssl_certfile=keys.certificate,
                ssl_keyfile=keys.key,
            )
        )
        self._thread = threading.Thread(target=self._run, name="http", daemon=True)
        self._thread.start()

    @property
    def clients_refused(self) -> int:
        """See `Listener.clients_refused`: of requests, as each may be another client's."""
        return self._gateway.refused

    def allow(self, allowed: frozenset[bytes]) -> None:
        """See `Listener.allow`; digests of tokens in place of keys."""
        if self._gateway.tokens is None:
            super().allow(allowed)
        self._gateway.tokens = allowed
        with suppress(RuntimeError):  # closed meanwhile
            self._loop.call_soon_threadsafe(self._gateway.cut_revoked)

    def is_allowed(self, key: bytes) -> bool:
        """See `Listener.is_allowed`."""
        return self._gateway.tokens is None or key in self._gateway.tokens

    def _has_come(self, patience_s: float) -> bool:
        self._gateway.is_ready = True
        if not self._arrived:
            self._come.wait(patience_s)
            self._come.clear()
            if not self._arrived and not self._thread.is_alive():
                raise admits_no_client(self.endpoint)
        return bool(self._arrived)

    def receive(self) -> Incoming | None:
        """See `Listener.receive`. What a client has sent that has gone since is left out."""
        while self._arrived:
            incoming = self._arrived.popleft()
            size = sum(map(len, incoming.frames))
            with suppress(RuntimeError):  # closed meanwhile
                self._loop.call_soon_threadsafe(self._gateway.hold, incoming.client, -size)
            if incoming.route[1] in self._gateway.waiting:
                return incoming
        return None

    def send(self, route: Sequence[bytes], frames: Sequence[Buffer]) -> bool:
        """See `Listener.send`."""
        try:
            return not self._closed and self._gateway.answer(route, frames, self._loop)
        except RuntimeError:  # its thread has failed
            return False

    def close(self) -> None:
        """See `Listener.close`."""
        if self._closed:
            return
        self._closed = self._server.should_exit = True
        with suppress(RuntimeError):  # it has failed
            self._loop.call_soon_threadsafe(self._gateway.end)
        self._thread.join()
        self._socket.close()

    # ------------------------------------------------------------------- on the listener's thread

    def _take(self, incoming: Incoming) -> None:
        self._arrived.append(incoming)
        self._come.set()

    def _run(self) -> None:
        try:
            with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
                # Ends with the loop's runner.
                self._looking = self._loop.create_task(self._cut_silent())
                runner.run(self._server.serve(sockets=[self._socket]))
        except Exception:
            log.exception("http_failed", lets_in="nobody")
        finally:
            self._come.set()

    @property
    def _connections(self) -> set[H11Protocol]:
        return cast("set[H11Protocol]", self._server.server_state.connections)

    def _cut(self, scope: HTTPScope) -> None:
        """Cut the connection of a request, with all that was not sent yet."""
        for one in self._connections:
            if one.scope is scope:
                one.transport.abort()

    async def _cut_silent(self) -> None:
        """Cut connections on which no request is under way, or that are closing, for too long."""
        # Since when each connection has had this request behind it (time.monotonic).
        since: dict[tuple[H11Protocol, RequestResponseCycle | None], float] = {}
        while True:
            await asyncio.sleep(_LOOK_S)
            now = time.monotonic()
            limit_s = SILENT_S if self._socket.is_full else IDLE_S + _LOOK_S
            idle = [
                (one, one.cycle)
                for one in self._connections
                if not one.cycle or one.cycle.response_complete or one.transport.is_closing()
            ]
            since = {key: since.get(key, now) for key in idle}
            for (one, _), began in since.items():
                if now - began > limit_s:
                    one.transport.abort()


class _ListeningSocket(socket.socket):
    """Accepts MAX_CONNECTIONS at a time; those that have not begun TLS count as well."""

    def __init__(self, listening: socket.socket) -> None:
        super().__init__(fileno=listening.detach())
        self._accepted: weakref.WeakSet[socket.socket] = weakref.WeakSet()

    @property
    def is_full(self) -> bool:
        """Whether one more would be closed."""
        return sum(one.fileno() >= 0 for one in self._accepted) >= MAX_CONNECTIONS

    def accept(self) -> tuple[socket.socket, Any]:
        """See `socket.socket.accept`. Raises ConnectionAbortedError, which asyncio passes over."""
        connection, address = super().accept()
        if self.is_full:
            connection.close()
            raise ConnectionAbortedError
        self._accepted.add(connection)
        return connection, address


def _bound(endpoint: str, keys: HttpKeys) -> tuple[_ListeningSocket, str]:
    """Listen at an address, and say as which URL clients know it. Raises EndpointError."""
    parsed = parse_endpoint(endpoint, for_bind=True)
    host, _, port = endpoint.partition("://")[2].rpartition(":")
    EndpointError.unless(
        parsed.is_http and host == parsed.host and (port.isdigit() or port == "*"),
        endpoint,
        "no HOST:PORT alone",
        "http://HOST:PORT",
    )
    scheme = "http" if keys.certificate is None else "https"
    EndpointError.unless(
        parsed.scheme != "https" or scheme != "http",
        endpoint,
        "no certificate",
        "--http-cert and --http-key, or http:// behind what ends TLS",
    )
    try:
        made = _ListeningSocket(listen_at("" if host == "*" else host.strip("[]"), port))
        # For what it accepts; asyncio sets it only where a socket says that it is TCP's.
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    except OSError as error:
        raise cannot_bind(endpoint, error.errno) from None
    return made, f"{scheme}://{host}:{made.getsockname()[1]}"
