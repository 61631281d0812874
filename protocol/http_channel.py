"""The client's end of HTTP: each request is a POST, whose answer is the reply.

A body is a message as a stream carries it (`protocol.stream_wire`). Requests in flight have a
connection each, which are kept open and used again; an event loop on a thread of this channel's own
carries all of them. Neither redirects nor proxies of the environment are followed.
"""

import asyncio
import queue
import secrets
import socket
import ssl
import threading
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import CancelledError, Future
from typing import Any

import httpcore2

from protocol.channel import RECONNECT_S, PendingChannel, Received
from protocol.curve import CHANNEL_HEADER, CONTENT_TYPE, INSTANCE_HEADER, RPC_PATH, HttpAccess
from protocol.encoding import DEFAULT_MAX_MESSAGE_BYTES, MAX_REPLY_FRAMES
from protocol.endpoint import is_exposed, parse_endpoint
from protocol.errors import EndpointError, ProtocolError, SettingsError
from protocol.stream_wire import frames_in, longest_bytes, to_pieces
from protocol.tensors import Buffer

# Connections to one service; more requests in flight than these wait for one.
_MOST_CONNECTIONS = 64
# Proxies close a connection that is idle for longer than this, often after a minute.
_IDLE_S = 30.0
_CONNECT_INTERVAL_S = 0.05
# A peer that the network has lost is noticed after so long, whatever a request's deadline.
_LOST_AFTER_S = 10
_SOCKET_OPTIONS = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _LOST_AFTER_S // 2),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1),
    (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * _LOST_AFTER_S),
)
# What a proxy says for a service that is not there at the moment.
_ABSENT = frozenset({502, 503, 504})
_REFUSES_TOKEN = frozenset({401, 403})
_TIMES_OUT_OR_TOO_LARGE = frozenset({408, 413, 429})
_FAILED = (httpcore2.NetworkError, httpcore2.ProtocolError)


class _LostError(Exception):
    """A request that has no reply to hope for. `connection`: that of the channel it went out on.

    `is_absent`: by a proxy's word, whose service no request has reached.
    """

    def __init__(self, connection: int, status: int = 0, is_absent: bool = False) -> None:
        self.connection, self.status, self.is_absent = connection, status, is_absent


class HttpChannel(PendingChannel):
    """Our client over HTTP/1.1. A request that fails counts as a lost connection, for all others.

    `access`: our token, and by which CAs an https:// service is known. Raises SettingsError for a
    token that http:// would send over a network, and for a file of CAs that cannot be read.
    """

    def __init__(
        self,
        endpoint: str,
        *,
        timeout_s: float = 30.0,
        max_message_bytes: int = DEFAULT_MAX_MESSAGE_BYTES,
        access: HttpAccess | None = None,
    ) -> None:
        is_http = parse_endpoint(endpoint).is_http
        EndpointError.unless(is_http, endpoint, "no URL", "http(s)://HOST:PORT")
        super().__init__(endpoint, timeout_s=timeout_s, max_message_bytes=max_message_bytes)
        access = access or HttpAccess()
        safe = access.token is None or not is_exposed(endpoint)
        SettingsError.unless(
            safe, "--http-token", f"{endpoint}, in the clear", "https://: the token is a secret"
        )
        self._url = endpoint.rstrip("/") + RPC_PATH
        self._headers: dict[bytes | str, bytes | str] = {
            CHANNEL_HEADER: secrets.token_hex(16),
            "accept-encoding": "identity",
            "content-type": CONTENT_TYPE,
        }
        if access.token is not None:
            self._headers["authorization"] = f"Bearer {access.token}"
        # Of the process that has answered first.
        self._instance: bytes | None = None
        self._requests: dict[int, Future[Received]] = {}
        self._done: queue.SimpleQueue[Future[Received]] = queue.SimpleQueue()
        context = _context(access) if endpoint.startswith("https:") else None
        self._pool = httpcore2.AsyncConnectionPool(
            ssl_context=context,
            network_backend=Backend(context),
            max_connections=_MOST_CONNECTIONS,
            keepalive_expiry=_IDLE_S,
            socket_options=_SOCKET_OPTIONS,
        )
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="http", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """See `Channel.close`."""
        if self._loop.is_closed():
            return
        asyncio.run_coroutine_threadsafe(self._end(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def abandon(self, request_id: int) -> None:
        """See `Channel.abandon`."""
        super().abandon(request_id)
        if (request := self._requests.pop(request_id, None)) is not None:
            request.cancel()

    def _send(self, method: str, frames: Sequence[Buffer], size: int, timeout_s: float) -> int:
        self._refuse_second_connection(method)
        body = b"".join(to_pieces(frames)[0])
        sent_ns = time.perf_counter_ns()
        exchange = self._exchange(body, self._connection, self._max_reply_bytes)
        request = asyncio.run_coroutine_threadsafe(exchange, self._loop)
        self._requests[self._last_id] = request
        request.add_done_callback(self._done.put)
        return sent_ns

    def _receive(self, deadline: float) -> Received | None:
        while True:
            left_s = deadline - time.monotonic() if deadline else 0.0
            try:
                return self._done.get(left_s > 0, max(0.0, left_s)).result()
            except queue.Empty:
                return None
            except CancelledError:
                pass  # given up meanwhile
            except _LostError as lost:
                # What failed with others that were in flight beside it is no second loss.
                if lost.connection == self._connection:
                    self._connection += 1
                    for request in self._requests.values():
                        request.cancel()
                    self._why = f", HTTP status {lost.status}" if lost.status else ""
                    return None

    # ------------------------------------------------------------------- on the channel's thread

    async def _end(self) -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._pool.aclose()
        await asyncio.sleep(0)  # what is closed takes its leave

    async def _exchange(self, body: bytes, connection: int, most_bytes: int) -> Received:
        """Post a request until it is answered. Waits for a service that is not there (yet).

        Raises _LostError, EndpointError for what no repetition mends, and ProtocolError.
        """
        give_up = time.monotonic() + RECONNECT_S
        while True:
            try:
                return await self._post(body, connection, most_bytes)
            except httpcore2.ConnectError as error:
                if (reason := _tls_reason(error)) is not None:
                    raise EndpointError(
                        self.endpoint,
                        reason,
                        "a certificate of a trusted CA for this host (--http-ca)",
                    ) from None
                status = 0
            except _LostError as lost:
                if not lost.is_absent or self._instance is not None:
                    raise
                status = lost.status
            except _FAILED:
                raise _LostError(connection) from None
            if self._instance is not None and time.monotonic() >= give_up:
                raise _LostError(connection, status)
            await asyncio.sleep(_CONNECT_INTERVAL_S)

    async def _post(self, body: bytes, connection: int, most_bytes: int) -> Received:
        posted = self._pool.stream("POST", self._url, headers=self._headers, content=body)
        async with posted as response:
            self._check(response, connection)
            received = bytearray()
            async for piece in response.aiter_stream():
                received += piece
                limit = longest_bytes(MAX_REPLY_FRAMES, most_bytes)
                ProtocolError.at_most(limit, f"reply from {self.endpoint}", len(received))
        received_ns = time.perf_counter_ns()
        limits = {"max_frames": MAX_REPLY_FRAMES, "max_message_bytes": most_bytes}
        return frames_in(memoryview(received), self.endpoint, **limits), received_ns

    def _check(self, response: httpcore2.Response, connection: int) -> None:
        """Refuse what is no reply of the service that has answered before. Raises as `_exchange`.

        A host may have several processes behind one URL; ours has passed a handshake.
        """
        status = response.status
        headers = {name.lower(): value for name, value in response.headers}
        instance = headers.get(INSTANCE_HEADER.encode())
        if status >= 500 or status in _TIMES_OUT_OR_TOO_LARGE:
            raise _LostError(connection, status, instance is None and status in _ABSENT)
        if status != 200 or instance is None:
            got = f"HTTP status {status}" + (" of another server" if status == 200 else "")
            refused = "a token that the service lists (--http-token)"
            raise EndpointError(
                self.endpoint,
                got,
                refused if status in _REFUSES_TOKEN else "gpu-service --http at this URL",
            )
        if self._one_connection and self._instance not in (None, instance):
            raise _LostError(connection)
        self._instance = instance


def _context(access: HttpAccess) -> ssl.SSLContext:
    """Return what certificates are verified by. Raises SettingsError."""
    with SettingsError.instead_of(
        (ssl.SSLError, ValueError), "--http-ca", "something else", "certificates of CAs, as PEM"
    ):
        return ssl.create_default_context(cadata=access.ca)


def _tls_reason(error: BaseException | None) -> str | None:
    """Say what was wrong with TLS where that is why a connection failed."""
    while error is not None:
        if isinstance(error, ssl.SSLError):
            return f"TLS that fails: {getattr(error, 'verify_message', error.reason)}"
        error = error.__cause__ or error.__context__
    return None


class Stream(httpcore2.AsyncNetworkStream):
    """One connection of the HTTP library, made by asyncio alone: given up, it leaves nothing.

    Over TLS where its backend makes such.
    """

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    async def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        """Receive some bytes, none at the end. Raises httpcore2.ReadError."""
        try:
            return await self._reader.read(max_bytes)
        except OSError as error:
            raise httpcore2.ReadError from error

    async def write(self, buffer: bytes, timeout: float | None = None) -> None:
        """Send. Raises httpcore2.WriteError."""
        try:
            self._writer.write(buffer)
            await self._writer.drain()
        except OSError as error:
            raise httpcore2.WriteError from error

    async def aclose(self) -> None:
        """Close at once."""
        self._writer.transport.abort()

    async def start_tls(
        self,
        ssl_context: ssl.SSLContext,
        server_hostname: str | None = None,
        timeout: float | None = None,
    ) -> httpcore2.AsyncNetworkStream:
        """Do nothing: TLS was begun with the connection."""
        return self

    def get_extra_info(self, info: str) -> Any:
        """Say whether an idle connection has ended (`is_readable`); of nothing else."""
        ended = self._reader.at_eof() or self._writer.is_closing()
        return ended if info == "is_readable" else None


class Backend(httpcore2.AsyncNetworkBackend):
    """Connects. `context`: what verifies the peer, None: without TLS."""

    def __init__(self, context: ssl.SSLContext | None) -> None:
        self._context = context

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore2.AsyncNetworkStream:
        """Connect. Raises httpcore2.ConnectError, whose cause says why."""
        try:
            reader, writer = await asyncio.open_connection(host, port, ssl=self._context)
            for option in socket_options or ():
                writer.get_extra_info("socket").setsockopt(*option)
        except (OSError, UnicodeError) as error:  # the second: a name that is no host's
            raise httpcore2.ConnectError from error
        return Stream(reader, writer)
