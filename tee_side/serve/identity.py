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
"""

from __future__ import annotations

import asyncio
import hashlib
import re
import time
from base64 import b64encode
from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from protocol.errors import EvidenceError
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
from tee_side.serve.schema import ApiError
from tee_side.serve.sealed import HpkeKey

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

    `certificate`: of `tls_key`, in DER, with a statement in it. Raises EvidenceError where the
    hardware gives no evidence.
    """

    def __init__(
        self,
        attester: Attester,
        about: About,
        utc: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        self._attester, self._about, self._utc = attester, about, utc
        self.tls_key = ec.generate_private_key(ec.SECP256R1())
        self.hpke_key = HpkeKey()
        self.receipt_key = ed25519.Ed25519PrivateKey.generate()
        self.certificate = certify(self.tls_key, self.state(b""), utc(), _LASTS)

    @property
    def said(self) -> str:
        """What a person is told, to compare with what clients find."""
        return f"attested by {self._attester.kind}: {self._about}"

    def receipts(self) -> ReceiptChain:
        """Return what signs receipts, with a new chain."""
        return ReceiptChain(self.receipt_key, self._about.model, self._about.policy)

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
        self._turn, self._waiting = asyncio.Lock(), 0

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
            self._left >= 1 and self._waiting < _MOST_WAITING,
            429,
            "too many ask for evidence",
            code="rate_limited",
            headers={"retry-after": "1"},
        )
        self._left -= 1
        self._waiting += 1
        try:
            async with self._turn:
                stated = await asyncio.to_thread(self._identity.state, bytes.fromhex(nonce))
        except EvidenceError:
            raise ApiError(503, "the hardware gives no evidence", code="no_evidence") from None
        finally:
            self._waiting -= 1
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
    """Takes an answer's bytes as they are sent. `digest`: SHA-256 of the receipt, once signed."""

    def __init__(self, chain: ReceiptChain, body: bytes) -> None:
        self._chain = chain
        self._request, self._response = hashlib.sha256(body), hashlib.sha256()
        self.digest: bytes | None = None

    def add(self, content: bytes) -> None:
        """Take the next bytes."""
        self._response.update(content)

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
            response=self._response.digest(),
            sampling=sampling,
            seed=first.sampling.seed,
            prompt_tokens=prompt_tokens,
            completion_tokens=completion_tokens,
        )
        self.digest = hashlib.sha256(signed).digest()
        return b64encode(signed).decode()
