"""What the service's end of HTTP does with a request: a body becomes a message, a reply the answer.

Everything here runs on the event loop of `gpu_side.transport.http_listener`, but where it is said.
A client is the token that it has shown; without tokens the channel that it says it is, 128 bits
that no other client knows, and else its connection.
"""

from __future__ import annotations

import asyncio
import re
import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import count
from typing import TYPE_CHECKING, TypeAlias

from gpu_side.access import digest_of
from gpu_side.encoding import MAX_FRAMES
from gpu_side.event_log import log
from gpu_side.transport.listener import Incoming
from protocol.curve import CHANNEL_HEADER, CONTENT_TYPE, INSTANCE_HEADER, RPC_PATH
from protocol.errors import ErrorCode, ProtocolError
from protocol.stream_wire import frames_in, longest_bytes, to_pieces
from protocol.tensors import Buffer

if TYPE_CHECKING:
    from uvicorn._types import ASGIReceiveCallable, ASGISendCallable, HTTPScope, Scope


HEALTH_PATH = "/health"
# Requests that are being read, wait or are being answered: of all clients, and of one.
MAX_REQUESTS = 256
MAX_CLIENT_REQUESTS = 64
# So many times the largest message all clients together may have being read, or waiting to be
# handed out, and one client one time; bodies up to a size that any client may always have apart.
RECEIVED_MESSAGES = 2
ALWAYS_BYTES = 1024 * 1024
# How long a client may take to send or to read a body: so long, and at this pace.
BODY_S = 10.0
LEAST_BYTES_PER_S = 64 * 1024
_TURN_BYTES = 1024 * 1024
# Of what is refused. After the last three the rest of the body is not read.
_MORE_HEADERS = {
    401: ((b"www-authenticate", b"Bearer"),),
    **dict.fromkeys((400, 408, 413), ((b"connection", b"close"),)),
}
_CHANNEL = re.compile(b"[0-9a-f]{32}")


class _RefusedError(Exception):
    """A request that gets a status and nothing else."""

    def __init__(self, status: int, detail: str) -> None:
        super().__init__(detail)
        self.status = status

    @classmethod
    def unless(cls, holds: object, status: int, detail: str) -> None:
        """Refuse a request unless `holds`."""
        if not holds:
            raise cls(status, detail)


# A request that waits for its reply; the future's None is that none will come.
_Waiting: TypeAlias = "tuple[Incoming, asyncio.Future[Sequence[Buffer] | None]]"


class Gateway:
    """An ASGI application. `deliver`: takes a message that has come.

    `cut`: cuts the connection of a request, because its client does not read the answer.
    `tokens`: digests of those that are let in; None: every client is.
    """

    def __init__(
        self,
        deliver: Callable[[Incoming], None],
        cut: Callable[[HTTPScope], None],
        max_message_bytes: int,
        tokens: frozenset[bytes] | None,
    ) -> None:
        self.tokens = tokens
        self.refused = 0
        # Whether messages are taken; before that the model is loaded.
        self.is_ready = False
        self._deliver, self._cut = deliver, cut
        self._max_message_bytes = max_message_bytes
        self._longest = longest_bytes(MAX_FRAMES, max_message_bytes)
        self._instance = secrets.token_hex(16).encode()
        self._numbers = count(1)
        # By client.
        self._underway: Counter[bytes] = Counter()
        self._ending = False
        # By the number in the route: the thread that computes takes from it.
        self.waiting: dict[bytes, _Waiting] = {}
        # Of bodies that were not handed out, by client, and in all.
        self._held: Counter[bytes] = Counter()
        self._freed = asyncio.Event()
        # Of replies that were not read, by client; two threads change it.
        self._unread: Counter[bytes] = Counter()
        self._lock = threading.Lock()

    # ------------------------------------------------------------- for the thread that computes

    def answer(
        self, route: Sequence[bytes], frames: Sequence[Buffer], loop: asyncio.AbstractEventLoop
    ) -> bool:
        """Send a reply; False if its client has gone, or has more than a message not read."""
        found = self.waiting.pop(route[-1], None)
        if found is None:
            return False
        client = found[0].client
        with self._lock:
            takes_it = self._unread[client] <= self._max_message_bytes
        if takes_it:
            self._count_unread(client, sum(map(len, frames)))
        loop.call_soon_threadsafe(self._settle, found, frames if takes_it else None)
        return takes_it

    def _count_unread(self, client: bytes, size: int) -> None:
        with self._lock:
            self._unread += Counter({client: size})  # keeps what is above zero

    # ------------------------------------------------------------------------- on the event loop

    def cut_revoked(self) -> None:
        """End the requests of clients that are not let in any more; of all, while we end."""
        tokens = self.tokens
        for number, waiting in list(self.waiting.items()):
            if self._ending or (tokens is not None and waiting[0].key not in tokens):
                self.waiting.pop(number, None)
                self._settle(waiting, None)

    def end(self) -> None:
        """Take no requests any more; those that wait get no reply."""
        self._ending = True
        self.cut_revoked()

    def _settle(self, waiting: _Waiting, frames: Sequence[Buffer] | None) -> None:
        """Let a request go on; what its client cannot get any more is forgotten."""
        incoming, reply = waiting
        if not reply.done():
            reply.set_result(frames)
        elif frames is not None:
            self._count_unread(incoming.client, -sum(map(len, frames)))

    async def __call__(
        self, scope: Scope, receive: ASGIReceiveCallable, send: ASGISendCallable
    ) -> None:
        """Answer one request. Nothing that a client does ends more than its connection."""
        if scope["type"] != "http":
            return
        try:
            try:
                await self._route(scope, receive, send)
            except _RefusedError as refused:
                self.refused += 1
                log.warning("dropped", reason="http", status=refused.status, detail=str(refused))
                await self._say(send, refused.status, str(refused))
        except TimeoutError:
            self._cut(scope)  # closing it would wait for the client to read
        except OSError:
            return  # an answer that is not complete: its connection is closed
        except Exception:
            log.exception("http_failed", path="rpc")

    async def _route(
        self, scope: HTTPScope, receive: ASGIReceiveCallable, send: ASGISendCallable
    ) -> None:
        path, method = scope["path"], scope["method"]
        if path == HEALTH_PATH and method in ("GET", "HEAD"):
            ready = self.is_ready and not self._ending
            await self._say(send, 200 if ready else 503, "ready" if ready else "not ready")
            return
        _RefusedError.unless(
            path == RPC_PATH, 404, f"{RPC_PATH} and {HEALTH_PATH} are all there is"
        )
        _RefusedError.unless(method == "POST", 405, "POST only")
        headers = dict(scope["headers"])
        key = b""
        if self.tokens is not None:
            key = digest_of(headers.get(b"authorization", b""), self.tokens) or b""
            _RefusedError.unless(key, 401, "no token that is let in")
        # A client that need not show a token.
        name = ":".join(map(str, scope["client"] or ())).encode()
        channel = headers.get(CHANNEL_HEADER.encode(), b"")
        if _CHANNEL.fullmatch(channel):
            name = bytes.fromhex(channel.decode())
        own = self._underway[key or name]
        full = self._underway.total() >= MAX_REQUESTS or own >= MAX_CLIENT_REQUESTS
        _RefusedError.unless(not (full or self._ending), 503, "too many requests, or an end")
        self._underway[key or name] += 1
        try:
            await self._rpc(name, key, headers, receive, send)
        finally:
            self._underway -= Counter([key or name])  # keeps what is above zero

    async def _rpc(
        self,
        name: bytes,
        key: bytes,
        headers: dict[bytes, bytes],
        receive: ASGIReceiveCallable,
        send: ASGISendCallable,
    ) -> None:
        number = next(self._numbers).to_bytes(8)
        body = await self._read(key or name, headers, receive)
        try:
            frames = frames_in(
                memoryview(body),
                f"client {name.hex()}",
                max_frames=MAX_FRAMES,
                max_message_bytes=self._max_message_bytes,
            )
        except ProtocolError as error:
            too_large = error.code is ErrorCode.LIMIT_EXCEEDED
            raise _RefusedError(413 if too_large else 400, str(error)) from None
        incoming = Incoming((name, number), frames, time.perf_counter_ns(), key)
        reply: asyncio.Future[Sequence[Buffer] | None] = asyncio.get_running_loop().create_future()
        self.hold(incoming.client, sum(map(len, frames)))
        self.waiting[number] = incoming, reply
        self._deliver(incoming)
        # The memory is the loop's from now on.
        del body, frames, incoming
        # Behind a whole body comes nothing but the end of its connection.
        gone = asyncio.ensure_future(receive())
        try:
            await asyncio.wait((reply, gone), return_when=asyncio.FIRST_COMPLETED)
            if not reply.done():
                raise ConnectionAbortedError
        finally:
            gone.cancel()
            reply.cancel()
            self.waiting.pop(number, None)
        if (said := reply.result()) is None:
            raise _RefusedError(503, "a request that gets no reply")
        try:
            await self._send(
                send,
                200,
                [(b"content-type", CONTENT_TYPE.encode()), (b"cache-control", b"no-store")],
                *to_pieces(said),
            )
        finally:
            self._count_unread(key or name, -sum(map(len, said)))

    async def _read(
        self, client: bytes, headers: dict[bytes, bytes], receive: ASGIReceiveCallable
    ) -> bytearray:
        """Read a body. Raises _RefusedError, or ConnectionAbortedError (it has gone)."""
        said = headers.get(b"content-length", b"")
        # h11 reads all chunks, whatever length is said.
        chunked = b"transfer-encoding" in headers
        _RefusedError.unless(not (said and chunked), 400, "a length, and chunks as well")
        # What is said decides when it is read, and nothing more.
        size = int(said) if said.isdigit() else self._longest
        _RefusedError.unless(
            size <= self._longest, 413, f"a body of {size} bytes, of {self._longest}"
        )
        body = bytearray()
        try:
            async with asyncio.timeout(BODY_S) as limit:
                await self._room(client, size)
                began = asyncio.get_running_loop().time()
                try:
                    while True:
                        limit.reschedule(began + BODY_S + len(body) / LEAST_BYTES_PER_S)
                        message = await receive()
                        if message["type"] != "http.request":
                            raise ConnectionAbortedError
                        body += message.get("body", b"")
                        _RefusedError.unless(
                            len(body) <= size, 413, f"a body of more than {size} bytes"
                        )
                        if not message.get("more_body"):
                            return body
                finally:
                    self.hold(client, -size)
        except TimeoutError:
            raise _RefusedError(408, f"{len(body)} bytes of a body, and no more in time") from None

    async def _room(self, client: bytes, size: int) -> None:
        """Wait until so many bytes may be held."""
        while size > ALWAYS_BYTES and (
            self._held[client] + size > self._longest
            or self._held.total() + size > RECEIVED_MESSAGES * self._longest
        ):
            await self._freed.wait()
        self.hold(client, size)

    def hold(self, client: bytes, size: int) -> None:
        """Count so many bytes more of a client, or less: of one that was handed out."""
        if abs(size) > ALWAYS_BYTES:
            self._held += Counter({client: size})  # keeps what is above zero
            if size < 0:
                self._freed.set()
                self._freed = asyncio.Event()

    async def _say(self, send: ASGISendCallable, status: int, text: str) -> None:
        headers = [(b"content-type", b"text/plain"), *_MORE_HEADERS.get(status, ())]
        body = f"{text}\n".encode()
        await self._send(send, status, headers, [body], len(body))

    async def _send(
        self,
        send: ASGISendCallable,
        status: int,
        headers: list[tuple[bytes, bytes]],
        pieces: Sequence[Buffer],
        total: int,
    ) -> None:
        """Send an answer whose body is `pieces`, `total` bytes. Raises TimeoutError."""
        async with asyncio.timeout(BODY_S + total / LEAST_BYTES_PER_S):
            headers.append((b"content-length", str(total).encode()))
            headers.append((INSTANCE_HEADER.encode(), self._instance))
            await send(
                {
                    "type": "http.response.start",
                    "status": status,
                    "headers": headers,
                    "trailers": False,
                }
            )
            for piece in pieces:
                for start in range(0, len(piece), _TURN_BYTES):
                    part = bytes(memoryview(piece)[start : start + _TURN_BYTES])
                    await send({"type": "http.response.body", "body": part, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
