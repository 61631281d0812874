"""Opens requests that are sealed to the attested key, and seals their answers.

A proxy that ends TLS in front of the server reads neither. It sees a POST to the path, a 200, times
and lengths: method, status and headers are sealed as well. Of the headers outside only the content
type is read.

A request is answered once, and a repeated one is refused:

- Its head has the client's time, which may be `WINDOW_S` from the server's. Requests are remembered
  as long, `MAX_REMEMBERED` at most; where there are as many, a new one is told to come later.
- The memory skips reads and requests that are refused before their content matters, so that clients
  without a key cannot fill it. Sending one of those again gets another answer, which only the first
  sender can open.
- The server's clock is the host's to set: it never goes back here. Keys are made at the start, and
  so a server that starts again opens none of the requests before.
"""

import hashlib
import secrets
import time
from collections.abc import Callable

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from protocol.errors import ProtocolError
from tee_side.serve.schema import ApiError
from tee_side.serve.sealed import (
    CONTENT_TYPE,
    SALT_BYTES,
    Direction,
    HpkeKey,
    RequestHead,
    ResponseHead,
    joined,
    open_secret,
    target_of,
)

WINDOW_S = 120
# In 10 MB. As many in twice the window are 270 a second.
MAX_REMEMBERED = 65536

_READS = ("GET", "HEAD", "OPTIONS")
# No key, no such path or method, too long.
_REFUSED_ALWAYS = (401, 404, 405, 413)
# Proxies are asked to send each piece at once, as it is.
_HEADERS = (
    (b"content-type", CONTENT_TYPE.encode()),
    (b"cache-control", b"no-store, no-transform"),
    (b"x-accel-buffering", b"no"),
)


class Sealing:
    """Serves an app to clients that seal what they send; others it serves as before.

    Bodies reach the app piece by piece as they come: its own bounds hold for them. `clock`: seconds
    since 1970.
    """

    def __init__(self, app: ASGIApp, key: HpkeKey, clock: Callable[[], float] = time.time) -> None:
        self._app, self._key, self._clock, self._now_s = app, key, clock, 0.0
        # Digests of the secrets of requests that were opened, by the second of their heads.
        self._by_second: dict[int, set[bytes]] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        kind = Headers(scope=scope).get("content-type", "") if scope["type"] == "http" else ""
        if kind.partition(";")[0].strip().lower() != CONTENT_TYPE:
            await self._app(scope, receive, send)
            return
        opened = _OpenedRequest(receive)
        try:
            head = await opened.begin(
                self._key, target_of(scope["raw_path"], scope["query_string"])
            )
        except ProtocolError:
            await _unreadable().response()(scope, receive, send)
            return
        if head is None:
            return
        sealed = _Sealed(opened.secret, send)
        inner = {**scope, "method": head.method, "headers": head.raw(), "extensions": {}}
        try:
            self._remember(opened.secret, head)
        except ApiError as refused:
            await refused.response()(inner, opened.receive, sealed.send)
            return
        await self._app(inner, opened.receive, sealed.send)
        if sealed.status in _REFUSED_ALWAYS:
            digest = hashlib.sha256(opened.secret).digest()
            self._by_second.get(head.time, set()).discard(digest)

    def _remember(self, secret: bytes, head: RequestHead) -> None:
        """Remember a request.

        Raises ApiError for one of another time, one that was sent before, and one too many.
        """
        self._now_s = max(self._now_s, self._clock())
        oldest_s = self._now_s - WINDOW_S
        ApiError.unless(
            oldest_s <= head.time <= self._now_s + WINDOW_S,
            400,
            f"the client's clock: expected within {WINDOW_S} s of the server's",
            code="sealed_time",
        )
        if head.method in _READS:
            return
        for second in [second for second in self._by_second if second < oldest_s]:
            del self._by_second[second]
        digest, seen = hashlib.sha256(secret).digest(), self._by_second.get(head.time, set())
        ApiError.unless(
            digest not in seen, 400, "this sealed request was sent before", code="sealed_replay"
        )
        ApiError.unless(
            sum(map(len, self._by_second.values())) < MAX_REMEMBERED,
            503,
            "too many sealed requests",
            code="overloaded",
            headers={"retry-after": "1"},
        )
        self._by_second.setdefault(head.time, seen).add(digest)


class _OpenedRequest:
    """What is received of a request, opened. `secret`: known when it has begun."""

    def __init__(self, receive: Receive) -> None:
        self._receive, self.secret = receive, b""
        self._first: Message | None = None

    async def begin(self, key: HpkeKey, target: bytes) -> RequestHead | None:
        """Receive the head; None: the client left before. Raises ProtocolError."""
        data = b""
        while len(data) < key.sealed_bytes:
            message = await self._receive()
            if message["type"] != "http.request":
                return None
            data += message.get("body", b"")
            if not message.get("more_body", False):
                break
        sealed, rest = data[: key.sealed_bytes], data[key.sealed_bytes :]
        self.secret = open_secret(key, sealed, target)
        self._direction = Direction(b"request", sealed, self.secret)
        chunks = self._chunks({**message, "body": rest})
        while not chunks:
            message = await self._receive()
            if message["type"] != "http.request":
                return None
            chunks = self._chunks(message)
        self._first = {**message, "body": b"".join(chunks[1:])}
        return RequestHead.decode(chunks[0])

    async def receive(self) -> Message:
        """Receive as an app does. Raises ApiError."""
        first, self._first = self._first, None
        if first is not None:
            return first
        message = await self._receive()
        if message["type"] != "http.request":
            return message
        try:
            return {**message, "body": b"".join(self._chunks(message))}
        except ProtocolError:
            raise _unreadable() from None

    def _chunks(self, message: Message) -> list[bytes]:
        chunks = self._direction.open(message.get("body", b""))
        if not message.get("more_body", False):
            self._direction.close()
        return chunks


class _Sealed:
    """Seals what an app sends. `status`: of its answer, 0 before it."""

    def __init__(self, secret: bytes, send: Send) -> None:
        self._salt, self._send, self.status = secrets.token_bytes(SALT_BYTES), send, 0
        self._direction = Direction(b"response", self._salt, secret)

    async def send(self, message: Message) -> None:
        """Send as an app does: each piece at once."""
        if message["type"] == "http.response.start":
            self.status = message["status"]
            head = ResponseHead(status=self.status, headers=joined(message.get("headers", ())))
            body, more = self._salt + self._direction.seal(head.encode()), True
            await self._send({**message, "status": 200, "headers": _HEADERS})
        else:
            more = message.get("more_body", False)
            body = self._direction.seal(message.get("body", b""), final=not more)
        await self._send({"type": "http.response.body", "body": body, "more_body": more})


def _unreadable() -> ApiError:
    return ApiError(
        400,
        "the sealed body could not be opened: another key or path, or other bytes",
        code="sealed_body",
    )
