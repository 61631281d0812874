"""Paths, who may use them, and what holds for every request."""

from __future__ import annotations

import asyncio
import logging
import threading
from typing import Any, NoReturn

import pytest
from starlette.requests import Request

from tee_side.engine.tokenizer import Tokenizer
from tee_side.serve.app import create_app
from tee_side.serve.errors import ApiError
from tee_side.serve.limits import RateLimitError
from tests.kit.serve import (
    FakeEngine,
    FakeWatch,
    ask,
    call,
    chat,
    model,
    serving,
    tokenizer,
)

ORIGIN = {"origin": "https://example.org"}


def _authorise(request: Request) -> str:
    if request.headers.get("authorization") != "Bearer right":
        raise ApiError(401, "a key is needed", headers={"www-authenticate": "Bearer"})
    return "alice"


def test_the_served_model_is_listed_and_found_by_its_name() -> None:
    listed = call(serving(), "GET", "/v1/models").json()
    assert listed["object"] == "list"
    [entry] = listed["data"]
    assert (entry["id"], entry["object"], entry["max_model_len"]) == ("demo", "model", 512)
    assert call(serving(), "GET", "/v1/models/demo").json() == entry
    served = serving(model=model(name="org/name"))
    assert call(served, "GET", "/v1/models/org/name").json()["id"] == "org/name"
    missing = call(serving(), "GET", "/v1/models/other")
    error = missing.error()
    assert (missing.status, error["code"], error["param"]) == (404, "model_not_found", None)


def test_health_is_503_before_ready_and_when_the_engine_has_failed() -> None:
    engine = FakeEngine()
    app = create_app(serving(engine))
    for state, status in (("starting", 503), ("ready", 200), ("failed", 503)):
        engine.state = state
        reply = call(app, "GET", "/health")
        assert reply.status == status
        assert status == 200 or reply.error()["type"] == "unavailable_error"


def test_health_is_503_while_a_step_waits_for_a_service_and_requests_wait_with_it() -> None:
    app = create_app(serving(FakeEngine(can_step=False)))
    reply = call(app, "GET", "/health")
    assert (reply.status, reply.error()["code"]) == (503, "waiting")
    asked = {"prompt": "a", "max_tokens": 1}
    assert call(app, "POST", "/v1/completions", asked).status == 200


def test_the_version_is_named() -> None:
    assert call(serving(), "GET", "/version").json() == {"version": "1.2.3"}


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/v1/completions"),
        ("POST", "/v1/chat/completions"),
        ("POST", "/v1/embeddings"),
        ("POST", "/tokenize"),
        ("POST", "/detokenize"),
        ("GET", "/tokenizer_info"),
        ("GET", "/v1/models"),
        ("GET", "/v1/models/demo"),
    ],
)
def test_without_a_key_it_is_401_before_the_body_is_looked_at(method: str, path: str) -> None:
    app = create_app(serving(authorise=_authorise))
    reply = call(app, method, path, b"no JSON", {"content-type": "application/json"})
    assert (reply.status, reply.error()["type"]) == (401, "authentication_error")
    assert reply.headers["www-authenticate"] == "Bearer"
    with_key = call(app, method, path, b"no JSON", {"authorization": "Bearer right"})
    assert with_key.status == (400 if method == "POST" else 200)


@pytest.mark.parametrize("method", ["GET", "HEAD"])
def test_health_is_public(method: str) -> None:
    assert call(serving(authorise=_authorise), method, "/health").status == 200


@pytest.mark.parametrize("chunk", [2**30, 1000])
def test_a_body_beyond_the_bound_is_413_by_its_length_or_by_what_came(chunk: int) -> None:
    most = 32 * serving().model.max_model_len
    app = create_app(serving(), min_body_bytes=1000)
    body = {"prompt": "a" * most}
    cases: list[tuple[dict[str, str], Any]] = [
        ({}, body),
        ({"content-length": str(most + 1)}, None),  # before any of it has come
        ({"content-length": "9" * 5000}, None),
    ]
    for headers, sent in cases:
        reply = call(app, "POST", "/v1/completions", sent, headers, chunk=chunk)
        assert (reply.status, reply.error()["code"]) == (413, "body_too_large")
    assert call(app, "POST", "/v1/completions", {"prompt": "a" * 400}, chunk=100).status == 200
    # More than the least: read, and too long for the model.
    long = {"prompt": "a" * (most - 100)}
    assert call(app, "POST", "/v1/completions", long).error()["type"] == "exceed_context_size_error"


def test_pages_of_other_origins_are_let_in_only_where_it_is_asked_for() -> None:
    preflight = ORIGIN | {
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization,content-type,x-stainless-lang",
    }
    closed, path = create_app(serving()), "/v1/completions"
    assert call(closed, "OPTIONS", path, None, preflight).status == 405
    assert "access-control-allow-origin" not in call(closed, "GET", "/health", None, ORIGIN).headers
    app = create_app(serving(authorise=_authorise), allow_origins=["https://example.org"])
    reply = call(app, "OPTIONS", path, None, preflight)
    assert (reply.status, reply.headers["access-control-allow-origin"]) == (200, ORIGIN["origin"])
    assert "x-stainless-lang" in reply.headers["access-control-allow-headers"]
    other = call(app, "OPTIONS", path, None, preflight | {"origin": "https://example.com"})
    assert other.status == 400
    # A page has to see what went wrong, too.
    refused = call(app, "POST", path, {}, ORIGIN)
    assert (refused.status, refused.headers["access-control-allow-origin"]) == (
        401,
        ORIGIN["origin"],
    )


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "a"}),
        ("/v1/completions", {"prompt": "a", "guided_regex": "a"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
        ("/v1/embeddings", {"input": "a"}),
    ],
)
def test_a_caller_beyond_its_limits_is_429_before_its_prompt_is_tokenized(
    monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any]
) -> None:
    def never(*_: object, **__: object) -> NoReturn:
        raise AssertionError

    full = RateLimitError("API key alice", got="1", expected="0", after_s=2.5, headers={"x-a": "b"})
    watch = FakeWatch(full=full)
    served = serving(watch=watch, authorise=_authorise)
    monkeypatch.setattr(Tokenizer, "encode", never)
    reply = call(served, "POST", path, body, {"authorization": "Bearer right"})
    assert (reply.status, reply.error()["code"]) == (429, "rate_limit_exceeded")
    assert (reply.headers["retry-after"], reply.headers["x-a"]) == ("3", "b")
    assert (watch.prechecked, watch.begun, watch.ended) == (["alice"], [], [])


def test_what_fails_unforeseen_is_500_and_its_words_are_in_no_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.DEBUG)
    engine = FakeEngine(refuse=RuntimeError("Seekrit"))
    reply = chat(engine)
    assert (reply.status, reply.error()["type"]) == (500, "server_error")
    assert "Seekrit" not in reply.text + caplog.text
    [record] = [record for record in caplog.records if record.name == "tee_side"]
    assert (record.message, record.fields["error"]) == ("request_failed", "RuntimeError")
    assert all(record.exc_info is None for record in caplog.records)


def test_the_loop_goes_on_while_a_prompt_is_tokenized(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, may_end, threads = threading.Event(), threading.Event(), []
    app, encode = create_app(serving()), type(tokenizer()).encode

    def slow(self: Any, *arguments: Any, **more: Any) -> list[int]:
        threads.append(threading.current_thread())
        begun.set()
        assert may_end.wait(60)
        return encode(self, *arguments, **more)

    monkeypatch.setattr(type(tokenizer()), "encode", slow)

    async def run() -> None:
        task = asyncio.create_task(ask(app, "POST", "/v1/completions", {"prompt": "Hello"}))
        await asyncio.to_thread(begun.wait)
        assert (await ask(app, "GET", "/health")).status == 200
        assert not task.done()
        may_end.set()
        assert (await task).status == 200

    asyncio.run(run())
    assert threading.main_thread() not in threads


def test_openapi_names_every_path_and_the_form_of_errors() -> None:
    document = call(serving(), "GET", "/openapi.json").json()
    assert set(document["paths"]) == {
        "/v1/completions",
        "/v1/chat/completions",
        "/v1/embeddings",
        "/v1/models",
        "/v1/models/{name}",
        "/tokenize",
        "/detokenize",
        "/tokenizer_info",
        "/health",
        "/version",
    }
    for operations in document["paths"].values():
        for operation in operations.values():
            assert "422" not in operation["responses"]
    responses = document["paths"]["/v1/completions"]["post"]["responses"]
    assert set(responses["200"]["content"]) == {"application/json", "text/event-stream"}
    assert "ErrorBody" in str(responses["default"])


def test_no_page_loads_scripts_of_a_third_party() -> None:
    for path in ("/docs", "/redoc"):
        assert call(serving(), "GET", path).status == 404
