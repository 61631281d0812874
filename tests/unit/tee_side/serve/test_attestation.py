"""Tests of `GET /v1/attestation`: a nonce in, a new statement out, and not too often."""

from __future__ import annotations

import asyncio
import base64
import json
from typing import Any

import pytest
from starlette.requests import Request

from protocol.errors import EvidenceError
from tee_side.attest.claims import Claims
from tee_side.serve.attestation import Attestation
from tee_side.serve.errors import ApiError
from tee_side.serve.identity import Identity
from tests.kit.evidence import identity
from tests.kit.rows import each_row
from tsqp.client.attested_tls import read_answer

NONCE = bytes(range(32))


class Clock:
    """One that stands until it is moved."""

    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def _ask(attestation: Attestation, nonce: str) -> Any:
    request = Request({"type": "http", "query_string": f"nonce={nonce}".encode(), "headers": []})
    return asyncio.run(attestation.answer(request))


@pytest.fixture(scope="module")
def made() -> Identity:
    """Any."""
    return identity()


def test_the_answer_is_of_the_nonce(made: Identity) -> None:
    attestation = Attestation(made, Clock())
    for nonce in (NONCE, NONCE[::-1]):
        reply = _ask(attestation, nonce.hex().upper())
        assert reply.headers["cache-control"] == "no-store"
        assert Claims.decode(read_answer(reply.body).claims).nonce == nonce
    fields = json.loads(reply.body)
    assert set(fields) == {"claims", "evidence"}
    assert base64.b64decode(fields["claims"])


@each_row("nonce", ["", "00", NONCE.hex()[:-1], NONCE.hex() + "0", "g" * 64, NONCE.hex() + "%0a"])
def test_another_nonce_is_refused(made: Identity, nonce: str) -> None:
    with pytest.raises(ApiError) as refused:
        _ask(Attestation(made, Clock()), nonce)
    assert refused.value.status_code == 400
    assert json.loads(refused.value.body)["error"]["param"] == "query.nonce"


def test_it_is_not_asked_too_often(made: Identity) -> None:
    clock = Clock()
    attestation = Attestation(made, clock)
    for _ in range(32):
        _ask(attestation, NONCE.hex())
    for now_s, more in ((0.0, 0), (0.5, 4), (60.0, 32)):
        clock.now_s = now_s
        for _ in range(more):
            _ask(attestation, NONCE.hex())
        with pytest.raises(ApiError) as refused:
            _ask(attestation, NONCE.hex())
        assert refused.value.status_code == 429
        assert refused.value.headers == {"retry-after": "1"}


def test_hardware_that_gives_none_is_told_without_a_word_of_why() -> None:
    made = identity()

    def state(_: bytes) -> None:
        raise EvidenceError("snp", got="secret words", expected="a report")

    made.state = state  # type: ignore[method-assign,assignment]
    with pytest.raises(ApiError) as refused:
        _ask(Attestation(made, Clock()), NONCE.hex())
    assert refused.value.status_code == 503
    assert "secret" not in refused.value.body
