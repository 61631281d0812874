"""The keys of a server, made at its start, and what it says of itself with them.

No key is ever on a disk, and none outlives the process.

- Statements (`tee_side.attest.statement`): in the certificate of the server's connections, and at
  `GET /v1/attestation?nonce=`, of now. No API key is needed there: a client asks before it sends
  its key. The hardware takes its time for each, and refuses many; nothing is kept from one nonce to
  the next.
- Receipts of answers, in a chain. Of a whole answer a receipt is a header, base64; of a stream a
  comment behind the last event, before `[DONE]`:

    : tsqp-receipt BASE64

Clients of OpenAI's API read every event as a chunk, whatever its name, and fail at one that is
none. The standard of event streams has every client ignore a comment. It begins a line, which no
text of a model does: JSON has no line ends in its strings.

Requests that are sealed to the attested key are opened here, and their answers sealed. A proxy that
ends TLS in front of the server reads neither. It sees a POST to the path, a 200, times and lengths:
method, status and headers are sealed as well. Of the headers outside only the content type is read.

A sealed request is answered once, and a repeated one is refused:

- Its head has the client's time, which may be `WINDOW_S` from the server's. Requests are remembered
  as long, `MAX_REMEMBERED` at most; where there are as many, a new one is told to come later.
- The memory skips reads and requests that are refused before their content matters, so that clients
  without a key cannot fill it. Sending one of those again gets another answer, which only the first
  sender can open.
- The server's clock is the host's to set: it never goes back here. Keys are made at the start, and
  so a server that starts again opens none of the requests before.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
import secrets
import time
from base64 import b64encode
from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from protocol.errors import EvidenceError, ProtocolError
from protocol.messages import NONCE_BYTES
from tee_side.attest.attesters import Attester
from tee_side.attest.statement import (
    EXTENSION,
    NONE,
    RECEIPT_DOMAIN,
    About,
    Claims,
    Receipt,
    Statement,
    key_digest,
    report_data,
)
from tee_side.serve.errors import ApiError
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

if TYPE_CHECKING:
    from tee_side.engine.request import Request as EngineRequest

_LASTS = timedelta(days=365)
_CLOCKS_APART = timedelta(minutes=5)
_NAME = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "tsqp")])


def state(attester: Attester, about: About, time_s: float, **keys: Any) -> Statement:
    """Return a new statement of what an enclave runs and of `keys`: the other fields of its claims.

    Takes as long as the hardware does. Raises EvidenceError.
    """
    claims = Claims(time=round(time_s), **about.model_dump(), **keys).encode()
    return Statement(claims=claims, evidence=attester.attest(report_data(claims)).encode())


class Identity:
    """Keys of a server: of its connections, of bodies sealed to it, of its receipts.

    `certificate`: of `tls_key`, in DER, with a statement in it. `said`: what a person is told, to
    compare with what clients find. `receipts`: signs them. Raises EvidenceError where the hardware
    gives no evidence.
    """

    def __init__(
        self,
        attester: Attester,
        about: About,
        utc: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        self._attester, self._about, self._utc = attester, about, utc
        self.said = f"attested by {attester.kind}: {about}"
        self.tls_key = ec.generate_private_key(ec.SECP256R1())
        self.hpke_key = HpkeKey()
        self.receipt_key = ed25519.Ed25519PrivateKey.generate()
        self.receipts = ReceiptChain(self.receipt_key, about.model, about.policy)
        self.certificate = certify(self.tls_key, self.state(b""), utc(), _LASTS)

    def state(self, nonce: bytes) -> Statement:
        """Return a new statement for a client's nonce, empty for a certificate. As `state`."""
        keys = {
            "tls_key": key_digest(self.tls_key.public_key()),
            "hpke_suite": self.hpke_key.suite,
            "hpke_key": self.hpke_key.public,
            "receipt_key": self.receipt_key.public_key().public_bytes_raw(),
        }
        time_s = self._utc().timestamp()
        return state(self._attester, self._about, time_s, purpose="serve", nonce=nonce, **keys)


def certify(
    key: ec.EllipticCurvePrivateKey, statement: Statement, now: datetime, lasts: timedelta
) -> bytes:
    """Return a certificate (DER) of a key by itself, with a statement in it."""
    stated = x509.UnrecognizedExtension(EXTENSION, statement.encode())
    return (
        x509.CertificateBuilder()
        .subject_name(_NAME)
        .issuer_name(_NAME)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _CLOCKS_APART)
        .not_valid_after(now + lasts)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(stated, critical=False)
        .sign(key, hashes.SHA256())
        .public_bytes(serialization.Encoding.DER)
    )


_NONCE = re.compile(f"[0-9a-fA-F]{{{2 * NONCE_BYTES}}}")
_AT_ONCE, _A_SECOND, _MOST_WAITING = 32, 8, 16


class Attestation:
    """Answers with statements, one at a time; `clock`: monotonic seconds.

    32 may be asked for at once, and then 8 a second; while 16 wait, none. Others get a 429.
    """

    def __init__(self, identity: Identity, clock: Callable[[], float] = time.monotonic) -> None:
        self._identity, self._clock = identity, clock
        self._left, self._since_s = float(_AT_ONCE), clock()
        self._turn, self._places = asyncio.Lock(), asyncio.Semaphore(_MOST_WAITING)

    async def answer(self, request: Request) -> Response:
        """Answer a request. Raises ApiError."""
        nonce = request.query_params.get("nonce", "")
        ApiError.unless(
            _NONCE.fullmatch(nonce),
            400,
            f"nonce: {NONCE_BYTES} random bytes, as hexadecimal digits",
            param="query.nonce",
            code="invalid_nonce",
        )
        now_s = self._clock()
        self._left = min(_AT_ONCE, self._left + (now_s - self._since_s) * _A_SECOND)
        self._since_s = now_s
        ApiError.unless(
            self._left >= 1 and not self._places.locked(),
            429,
            "too many ask for evidence",
            code="rate_limited",
            headers={"retry-after": "1"},
        )
        self._left -= 1
        try:
            async with self._places, self._turn:
                stated = await asyncio.to_thread(self._identity.state, bytes.fromhex(nonce))
        except EvidenceError:
            raise ApiError(503, "the hardware gives no evidence", code="no_evidence") from None
        fields = {name: b64encode(value).decode() for name, value in stated.model_dump().items()}
        return JSONResponse(fields, headers={"cache-control": "no-store"})


class ReceiptChain:
    """Signs the receipts of one server, of one thread. `clock`: seconds since 1970.

    The first receipt of a key has `NONE` in the place of the one before it.
    """

    def __init__(
        self,
        key: ed25519.Ed25519PrivateKey,
        model: bytes,
        policy: bytes,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._key, self._model, self._policy, self._clock = key, model, policy, clock
        self._sequence, self._previous = 0, NONE

    def sign(self, **said: object) -> bytes:
        """Return the next receipt, signed. `said`: the fields that this chain does not know."""
        known = {
            "sequence": self._sequence,
            "previous": self._previous,
            "time": int(self._clock()),
            "model": self._model,
            "policy": self._policy,
        }
        packed = Receipt.model_validate(known | said).encode()
        signed = packed + self._key.sign(RECEIPT_DOMAIN + packed)
        self._sequence, self._previous = self._sequence + 1, hashlib.sha256(signed).digest()
        return signed


HEADER = "tsqp-receipt"


class AnswerReceipt:
    """The receipt of an answer. `response`: takes its bytes as they are sent.

    `digest`: SHA-256 of the receipt, once signed.
    """

    def __init__(self, chain: ReceiptChain, body: bytes) -> None:
        self._chain = chain
        self._request, self.response = hashlib.sha256(body), hashlib.sha256()
        self.digest: bytes | None = None

    def sign(
        self, requests: Sequence[EngineRequest], prompt_tokens: int, completion_tokens: int
    ) -> str:
        """Return the receipt in base64, behind the last bytes; `requests` differ by prompt only.

        Of a `logit_bias`, the sampling parameters have the number of its tokens. They are empty
        where nothing is sampled.
        """
        first, sampling = requests[0], dict[str, int | float]()
        if most := max(request.max_new_tokens for request in requests):
            sampling = first.sampling.model_dump(exclude={"seed", "logit_bias"})
            biased = len(first.sampling.logit_bias)
            sampling |= {"n": first.samples, "max_tokens": most, "logit_bias": biased}
        signed = self._chain.sign(
            request=self._request.digest(),
            response=self.response.digest(),
            sampling=sampling,
            seed=first.sampling.seed,
            prompt_tokens=prompt_tokens,
            completion_tokens=completion_tokens,
        )
        self.digest = hashlib.sha256(signed).digest()
        return b64encode(signed).decode()


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
