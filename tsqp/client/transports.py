"""Transports of httpx2 that send requests to one server that proves what it is, and to no other.

Of a server behind a proxy that ends TLS, the proxy sees neither bodies nor headers, an API key
among them:

    transport = SealedTransport(httpx2.HTTPTransport(), claims.hpke_suite, claims.hpke_key)
    http_client = httpx2.Client(transport=transport)
    client = openai.OpenAI(http_client=http_client, base_url=..., api_key=...)

The claims are those of an appraisal that passed. `tee_side.serve.sealed` has the format.
"""

import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from threading import Lock, RLock

import httpx2

from protocol.errors import EvidenceError, ProtocolError
from protocol.messages import NONCE_BYTES
from tee_side.attest.appraisal import Appraisal, AppraisalPolicy, Expected, appraise
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
from tsqp.client.attested_tls import (
    MAX_ANSWER_BYTES,
    Address,
    AttestedContext,
    NotAttestedError,
    passed,
    prove,
    read_answer,
)

# Of the connection to the proxy, and not of the request.
_OF_CONNECTION = ("connection", "accept-encoding", "transfer-encoding")


class UnsealedError(httpx2.RemoteProtocolError):
    """An answer that is not sealed: of the proxy, or of a server that could not open the request.

    `status`: what it says, which the proxy may have made up.
    """

    def __init__(self, status: int) -> None:
        expected = "a sealed one (400: the server has another key now, or the path was changed)"
        super().__init__(f"answer: got status {status} and no seal, expected {expected}")
        self.status = status


class _Over(httpx2.BaseTransport):
    """Sends requests by another transport, and closes that one with itself."""

    _inner: httpx2.BaseTransport

    def close(self) -> None:
        """Close the other transport."""
        self._inner.close()


class SealedTransport(_Over):
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
            with _as_httpx2():
                answered = ResponseHead.decode(next(opened.chunks))
        except BaseException:
            answer.close()
            raise
        return httpx2.Response(answered.status, headers=answered.raw(), stream=opened)

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
    """The body of an answer, piece by piece as it comes; of `chunks`, the first is the head."""

    def __init__(self, answer: httpx2.Response, secret: bytes) -> None:
        self._answer, self.chunks = answer, _chunks(answer, secret)

    def __iter__(self) -> Iterator[bytes]:
        """Yield what comes; one that ends without an error is whole."""
        with _as_httpx2():
            yield from self.chunks

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


class AttestedTransport(_Over):
    """Sends requests over attested TLS; what would go elsewhere raises NotAttestedError.

    The server proves itself again where `again_s` of the context have passed, also to connections
    that are still open.
    """

    def __init__(self, address: Address, context: AttestedContext) -> None:
        self._address, self._context, self._guard = address, context, Lock()
        # A proxy of the environment would be spoken to in the clear.
        self._inner = httpx2.HTTPTransport(verify=context, trust_env=False)

    def handle_request(self, request: httpx2.Request) -> httpx2.Response:
        """Send a request. Raises NotAttestedError, EndpointError, and what httpx2 raises."""
        url = request.url
        NotAttestedError.unless(
            (url.scheme, url.host, url.port or 443) == ("https", *self._address),
            "URL",
            "another scheme, host or port",
            f"https://{self._address}",
            appraisal=None,
        )
        with self._guard:
            if self._context.stale:
                prove(self._address, self._context)
        return self._inner.handle_request(request)


class ProvedTransport(_Over):
    """Seals requests to the key that a server proved to have, behind a proxy that ends TLS.

    New evidence, of a new nonce, is asked for after `again_s`, and after an answer that was not
    sealed: the server may have been started again, with another key. `url`: where it is asked,
    without a path; `inner`: what carries requests to the proxy. Where the server does not prove
    itself, a request raises NotAttestedError, and nothing of it is sent.
    """

    def __init__(
        self,
        url: str,
        policy: AppraisalPolicy,
        inner: httpx2.BaseTransport,
        again_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._url, self._policy, self._inner = f"{url}/v1/attestation", policy, inner
        self._again_s, self._clock = again_s, clock
        self._guard, self._since_s = RLock(), 0.0
        self._sealed: SealedTransport | None = None

    def handle_request(self, request: httpx2.Request) -> httpx2.Response:
        """Send a request, sealed."""
        with self._guard:
            sealed = self._sealed
            if sealed is None or self._clock() - self._since_s >= self._again_s:
                _, sealed = self.prove()
        try:
            return sealed.handle_request(request)
        except UnsealedError:
            with self._guard:
                self._sealed = None
            raise

    def prove(self) -> tuple[Appraisal, SealedTransport]:
        """Have the server prove itself. Raises NotAttestedError, httpx2.TransportError."""
        with self._guard:
            self._sealed = None
            nonce = secrets.token_bytes(NONCE_BYTES)
            asked = httpx2.Request("GET", self._url, params={"nonce": nonce.hex()})
            answer = self._inner.handle_request(asked)
            try:
                stated = read_answer(_body(answer))
                found = appraise(
                    stated, self._policy, Expected(nonce, None, datetime.now(UTC), "serve")
                )
            except EvidenceError as error:
                raise NotAttestedError(error.where, error.got, error.expected, None) from None
            finally:
                answer.close()
            claims = passed("new evidence", found)
            self._sealed = made = SealedTransport(self._inner, claims.hpke_suite, claims.hpke_key)
            self._since_s = self._clock()
            return found, made


def _body(answer: httpx2.Response) -> bytes:
    EvidenceError.unless(
        answer.status_code == 200,
        "new evidence",
        f"status {answer.status_code}",
        "an answer with evidence",
    )
    found = b""
    for piece in answer.iter_bytes():
        found += piece
        EvidenceError.unless(
            len(found) <= MAX_ANSWER_BYTES, "new evidence", "a long answer", "evidence"
        )
    return found
