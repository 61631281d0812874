"""Transports of httpx2 that send requests to one server that proves what it is, and to no other."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from datetime import UTC, datetime
from threading import Lock

import httpx2

from protocol.errors import EvidenceError
from protocol.messages import NONCE_BYTES
from tee_side.attest.appraisal import Appraisal, Expected, appraise
from tee_side.attest.appraisal_policy import AppraisalPolicy
from tsqp.client.attested_tls import (
    MAX_ANSWER_BYTES,
    Address,
    AttestedContext,
    NotAttestedError,
    prove,
    read_answer,
)
from tsqp.client.sealing import SealedTransport, UnsealedError


class AttestedTransport(httpx2.BaseTransport):
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
        if (url.scheme, url.host, url.port or 443) != ("https", *self._address):
            raise NotAttestedError(
                "URL", "another scheme, host or port", f"https://{self._address}", None
            )
        with self._guard:
            if self._context.stale:
                prove(self._address, self._context)
        return self._inner.handle_request(request)

    def close(self) -> None:
        """Close the connections."""
        self._inner.close()


class ProvedTransport(httpx2.BaseTransport):
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
        self._guard, self._since_s = Lock(), 0.0
        self._sealed: SealedTransport | None = None

    def handle_request(self, request: httpx2.Request) -> httpx2.Response:
        """Send a request, sealed."""
        with self._guard:
            if self._sealed is None or self._clock() - self._since_s >= self._again_s:
                self._prove()
            sealed = self._sealed
        if sealed is None:
            raise NotAttestedError("server", "no proof", "one", None)
        try:
            return sealed.handle_request(request)
        except UnsealedError:
            with self._guard:
                self._sealed = None
            raise

    def prove(self) -> Appraisal:
        """Have the server prove itself. Raises NotAttestedError, httpx2.TransportError."""
        with self._guard:
            return self._prove()

    def close(self) -> None:
        """Close what carries requests."""
        self._inner.close()

    def _prove(self) -> Appraisal:
        self._sealed = None
        nonce = secrets.token_bytes(NONCE_BYTES)
        asked = httpx2.Request("GET", self._url, params={"nonce": nonce.hex()})
        answer = self._inner.handle_request(asked)
        try:
            stated = read_answer(_body(answer))
            expected = Expected(nonce, None, datetime.now(UTC), "serve")
            found = appraise(stated, self._policy, expected)
        except EvidenceError as error:
            raise NotAttestedError(error.where, error.got, error.expected, None) from None
        finally:
            answer.close()
        if not found.passed or found.claims is None:
            raise NotAttestedError.of("new evidence", found)
        claims = found.claims
        self._sealed = SealedTransport(self._inner, claims.hpke_suite, claims.hpke_key)
        self._since_s = self._clock()
        return found


def _body(answer: httpx2.Response) -> bytes:
    if answer.status_code != 200:
        raise EvidenceError(
            "new evidence", got=f"status {answer.status_code}", expected="an answer with evidence"
        )
    found = b""
    for piece in answer.iter_bytes():
        found += piece
        if len(found) > MAX_ANSWER_BYTES:
            raise EvidenceError("new evidence", got="a long answer", expected="evidence")
    return found
