"""Paths, who may use them, what holds for every request, and `GET /v1/attestation`."""

from __future__ import annotations

import asyncio
import json
import threading
from dataclasses import replace
from typing import Any, NoReturn

import pytest
from starlette.requests import Request

from tee_side.attest.claims import Claims
from tee_side.engine.tokenizer import Tokenizer
from tee_side.serve.app import _GUARDED, create_app
from tee_side.serve.attestation import Attestation
from tee_side.serve.errors import ApiError
from tee_side.serve.limits import RateLimitError
from tests.kit.evidence import identity
from tests.kit.rows import each_row
from tests.kit.serve import Clock, FakeEngine, FakeWatch, authorise, call, in_a_loop, serving
from tsqp.client.attested_tls import read_answer

PATH = "/v1/completions"


def test_health_says_whether_a_token_could_be_made() -> None:
    states = (("starting", True, 503), ("ready", True, 200), ("failed", True, 503))
    for state, can_step, status in (*states, ("ready", False, 503)):
        served = serving(FakeEngine(state=state, can_step=can_step))  # type: ignore[arg-type]
        reply = call(served, "GET", "/health")
        assert reply.status == status
        assert status == 200 or reply.error()["type"] == "unavailable_error"
        # It needs no key.
        for method in ("GET", "HEAD"):
            assert call(replace(served, authorise=authorise), method, "/health").status == status
    # While a step waits for a service, requests wait with it.
    assert call(served, "POST", PATH, {"prompt": "a", "max_tokens": 1}).status == 200


@each_row(("method", "path"), [(method, path) for method, path, *_ in _GUARDED])
def test_without_a_key_it_is_401_before_the_body_is_looked_at(method: str, path: str) -> None:
    served, path = serving(authorise=authorise), path.replace("{name:path}", "demo")
    reply = call(served, method, path, b"no JSON", {"content-type": "application/json"})
    assert (reply.status, reply.error()["type"]) == (401, "authentication_error")
    assert reply.headers["www-authenticate"] == "Bearer"
    with_key = call(served, method, path, b"no JSON", {"authorization": "Bearer right"})
    assert with_key.status == (400 if method == "POST" else 200)


@each_row("chunk", [2**30, 1000])
def test_a_body_beyond_the_bound_is_413_by_its_length_or_by_what_came(chunk: int) -> None:
    most = 32 * serving().model.max_model_len
    app = create_app(serving(), min_body_bytes=1000)
    cases: list[tuple[dict[str, str], Any]] = [
        ({}, {"prompt": "a" * most}),
        ({"content-length": str(most + 1)}, None),  # before any of it has come
        ({"content-length": "9" * 5000}, None),
    ]
    for headers, sent in cases:
        reply = call(app, "POST", PATH, sent, headers, chunk=chunk)
        assert (reply.status, reply.error()["code"]) == (413, "body_too_large")
    assert call(app, "POST", PATH, {"prompt": "a" * 400}, chunk=100).status == 200
    # More than the least: read, and too long for the model.
    long = call(app, "POST", PATH, {"prompt": "a" * (most - 100)})
    assert long.error()["type"] == "exceed_context_size_error"


def test_pages_of_other_origins_are_let_in_only_where_it_is_asked_for() -> None:
    asked = {"origin": "https://example.org", "access-control-request-method": "POST"}
    assert call(serving(), "OPTIONS", PATH, None, asked).status == 405
    app = create_app(serving(authorise=authorise), allow_origins=["https://example.org"])
    assert call(app, "OPTIONS", PATH, None, asked).status == 200
    other = asked | {"origin": "https://example.com"}
    assert call(app, "OPTIONS", PATH, None, other).status == 400


@each_row(
    ("path", "body"),
    [
        (PATH, {"prompt": "a", "guided_regex": "a"}),
        ("/v1/embeddings", {"input": "a"}),
        ("/tokenize", {"prompt": "a"}),
    ],
)
def test_a_caller_beyond_its_limits_is_429_before_its_prompt_is_tokenized(
    path: str, body: dict[str, Any]
) -> None:
    def never(*_: object, **__: object) -> NoReturn:
        raise AssertionError

    full = RateLimitError("API key alice", got="1", expected="0", after_s=2.5, headers={"x-a": "b"})
    watch = FakeWatch(full=full)
    served = serving(watch=watch, authorise=authorise)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Tokenizer, "encode", never)
        reply = call(served, "POST", path, body, {"authorization": "Bearer right"})
    assert (reply.status, reply.error()["code"]) == (429, "rate_limit_exceeded")
    assert (reply.headers["retry-after"], reply.headers["x-a"]) == ("3", "b")
    assert (watch.prechecked, watch.begun, watch.ended) == (["alice"], [], [])


NONCE = bytes(range(32))


async def _asked(attestation: Attestation, nonce: str = NONCE.hex()) -> Any:
    request = Request({"type": "http", "query_string": f"nonce={nonce}".encode(), "headers": []})
    return await attestation.answer(request)


def _refusal(attestation: Attestation, nonce: str = NONCE.hex()) -> tuple[int, ApiError]:
    with pytest.raises(ApiError) as refused:
        asyncio.run(_asked(attestation, nonce))
    return refused.value.status_code, refused.value


def test_evidence_is_of_the_nonce_and_not_asked_for_too_often() -> None:
    clock = Clock()
    attestation = Attestation(identity(), clock)
    for nonce in (NONCE, NONCE[::-1]):
        reply = asyncio.run(_asked(attestation, nonce.hex().upper()))
        assert reply.headers["cache-control"] == "no-store"
        assert Claims.decode(read_answer(reply.body).claims).nonce == nonce
    for other in ("", NONCE.hex()[:-1], NONCE.hex() + "0", "g" * 64, NONCE.hex() + "%0a"):
        status, error = _refusal(attestation, other)
        assert (status, json.loads(error.body)["error"]["param"]) == (400, "query.nonce")
    for wait_s, more in ((0.0, 30), (0.5, 4), (60.0, 32)):
        clock.wait(wait_s)
        for _ in range(more):
            asyncio.run(_asked(attestation))
        status, error = _refusal(attestation)
        assert (status, error.headers) == (429, {"retry-after": "1"})


@in_a_loop
async def test_while_16_wait_for_the_hardware_none_more_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made, release = identity(), threading.Event()
    state = made.state

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
