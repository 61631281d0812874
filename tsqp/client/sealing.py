"""Seals what an HTTP client sends to a key that was attested, and opens what it gets.

For servers behind a proxy that ends TLS: it sees neither bodies nor headers, an API key among them.

    transport = SealedTransport(httpx2.HTTPTransport(), claims.hpke_suite, claims.hpke_key)
    http_client = httpx2.Client(transport=transport)
    client = openai.OpenAI(http_client=http_client, base_url=..., api_key=...)

The claims are those of an appraisal that passed. `tee_side.serve.sealed` has the format.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import httpx2

from protocol.errors import ProtocolError
from tee_side.serve.sealed import (
    CONTENT_TYPE,
    SALT_BYTES,
    Direction,
    RequestHead,
    ResponseHead,
    SuiteName,
    joined,
    seal_secret,
    target_of,
)

# Of the connection to the proxy, and not of the request.
_OF_CONNECTION = ("connection", "accept-encoding", "transfer-encoding")


class UnsealedError(httpx2.RemoteProtocolError):
    """An answer that is not sealed: of the proxy, or of a server that could not open the request.

    `status`: what it says, which is anybody's word.
    """

    def __init__(self, status: int) -> None:
        expected = "a sealed one (400: the server has another key now, or the path was changed)"
        super().__init__(f"answer: got status {status} and no seal, expected {expected}")
        self.status = status


class SealedTransport(httpx2.BaseTransport):
    """Sends requests by another transport, sealed to `public_key`; nothing goes out unsealed.

    The URL is as it was: paths and queries are seen by the proxy. Raises ProtocolError for what is
    no key of `suite`. Its requests raise httpx2.RemoteProtocolError where an answer was changed,
    cut or not sealed, and what the other transport raises.
    """

    def __init__(self, inner: httpx2.BaseTransport, suite: SuiteName, public_key: bytes) -> None:
        self._inner, self._suite, self._public_key = inner, suite, public_key
        seal_secret(suite, public_key, b"")

    def handle_request(self, request: httpx2.Request) -> httpx2.Response:
        """Send a request; its answer is opened as it comes."""
        body, secret = self._sealed(request)
        outer = httpx2.Request(
            "POST",
            request.url,
            headers={
                "host": request.headers["host"],
                "accept": CONTENT_TYPE,
                "accept-encoding": "identity",
                "content-type": CONTENT_TYPE,
            },
            content=body,
            extensions=request.extensions,
        )
        answer = self._inner.handle_request(outer)
        try:
            kind = answer.headers.get("content-type", "").partition(";")[0].strip().lower()
            if answer.status_code != 200 or kind != CONTENT_TYPE:
                raise UnsealedError(answer.status_code)
            opened = _OpenedAnswer(answer, secret)
            head = opened.head()
        except BaseException:
            answer.close()
            raise
        return httpx2.Response(head.status, headers=head.raw(), stream=opened)

    def close(self) -> None:
        """Close the other transport."""
        self._inner.close()

    def _sealed(self, request: httpx2.Request) -> tuple[bytes, bytes]:
        """Return what is sent of a request, and its secret."""
        path, _, query = request.url.raw_path.partition(b"?")
        secret, sealed = seal_secret(self._suite, self._public_key, target_of(path, query))
        headers = joined(request.headers.raw)
        headers = {name: headers[name] for name in headers if name not in _OF_CONNECTION}
        head = RequestHead(time=int(time.time()), method=request.method, headers=headers)
        direction = Direction(b"request", sealed, secret)
        chunks = direction.seal(head.encode()) + direction.seal(request.read(), final=True)
        return sealed + chunks, secret


class _OpenedAnswer(httpx2.SyncByteStream):
    """The body of an answer, piece by piece as it comes."""

    def __init__(self, answer: httpx2.Response, secret: bytes) -> None:
        self._answer, self._chunks = answer, _chunks(answer, secret)

    def head(self) -> ResponseHead:
        """Return the head, which comes first."""
        with _as_httpx2():
            return ResponseHead.decode(next(self._chunks))

    def __iter__(self) -> Iterator[bytes]:
        """Yield what comes; one that ends without an error is whole."""
        with _as_httpx2():
            yield from self._chunks

    def close(self) -> None:
        """Close the answer."""
        self._answer.close()


def _chunks(answer: httpx2.Response, secret: bytes) -> Iterator[bytes]:
    pieces, front = answer.iter_raw(), b""
    while len(front) < SALT_BYTES and (piece := next(pieces, None)) is not None:
        front += piece
    direction = Direction(b"response", front[:SALT_BYTES], secret)
    yield from direction.open(front[SALT_BYTES:])
    for piece in pieces:
        yield from direction.open(piece)
    direction.close()


@contextmanager
def _as_httpx2() -> Iterator[None]:
    try:
        yield
    except ProtocolError as error:
        raise httpx2.RemoteProtocolError(str(error)) from None
