"""`GET /v1/attestation`: a nonce in, a new statement out, and not too often."""

from __future__ import annotations

import asyncio
import json
import threading
from typing import Any

import pytest
from starlette.requests import Request

from protocol.errors import EvidenceError
from tee_side.attest.claims import Claims
from tee_side.serve.attestation import Attestation
from tee_side.serve.errors import ApiError
from tee_side.serve.identity import Identity
from tests.kit.evidence import identity
from tests.kit.serve import Clock, in_a_loop
from tsqp.client.attested_tls import read_answer

NONCE = bytes(range(32))


async def _asked(attestation: Attestation, nonce: str = NONCE.hex()) -> Any:
    request = Request({"type": "http", "query_string": f"nonce={nonce}".encode(), "headers": []})
    return await attestation.answer(request)


def _refusal(attestation: Attestation, nonce: str = NONCE.hex()) -> tuple[int, ApiError]:
    with pytest.raises(ApiError) as refused:
        asyncio.run(_asked(attestation, nonce))
    return refused.value.status_code, refused.value


@pytest.fixture
def made() -> Identity:
    return identity()


def test_the_answer_is_of_the_nonce(made: Identity) -> None:
    attestation = Attestation(made, Clock())
    for nonce in (NONCE, NONCE[::-1]):
        reply = asyncio.run(_asked(attestation, nonce.hex().upper()))
        assert reply.headers["cache-control"] == "no-store"
        assert Claims.decode(read_answer(reply.body).claims).nonce == nonce
    for other in ("", "00", NONCE.hex()[:-1], NONCE.hex() + "0", "g" * 64, NONCE.hex() + "%0a"):
        status, error = _refusal(attestation, other)
        assert (status, json.loads(error.body)["error"]["param"]) == (400, "query.nonce")


def test_it_is_not_asked_too_often(made: Identity) -> None:
    clock = Clock()
    attestation = Attestation(made, clock)
    for wait_s, more in ((0.0, 32), (0.5, 4), (60.0, 32)):
        clock.wait(wait_s)
        for _ in range(more):
            asyncio.run(_asked(attestation))
        status, error = _refusal(attestation)
        assert (status, error.headers) == (429, {"retry-after": "1"})


@in_a_loop
async def test_while_16_wait_for_the_hardware_none_more_does(
    made: Identity, monkeypatch: pytest.MonkeyPatch
) -> None:
    release, state = threading.Event(), made.state

    def slow(nonce: bytes) -> Any:
        assert release.wait(60)
        return state(nonce)

    monkeypatch.setattr(made, "state", slow)

    attestation = Attestation(made, Clock())
    waiting = [asyncio.create_task(_asked(attestation)) for _ in range(16)]
    await asyncio.sleep(0)  # the turn in which they begin
    with pytest.raises(ApiError) as refused:
        await _asked(attestation)
    assert refused.value.status_code == 429
    release.set()
    await asyncio.gather(*waiting)
    assert await _asked(attestation)


def test_hardware_that_gives_none_is_told_without_a_word_of_why(
    made: Identity, monkeypatch: pytest.MonkeyPatch
) -> None:
    def state(_: bytes) -> None:
        raise EvidenceError("snp", got="secret words", expected="a report")

    monkeypatch.setattr(made, "state", state)
    status, error = _refusal(Attestation(made, Clock()))
    assert (status, "secret" in error.body) == (503, False)
