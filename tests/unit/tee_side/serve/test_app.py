"""Paths, who may use them, and what holds for every request."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NoReturn

import pytest

from tee_side.engine.tokenizer import Tokenizer
from tee_side.serve.app import _GUARDED, create_app
from tee_side.serve.limits import RateLimitError
from tests.kit.rows import each_row
from tests.kit.serve import FakeEngine, FakeWatch, authorise, call, model, serving

ORIGIN = {"origin": "https://example.org"}
PATH = "/v1/completions"


def test_the_served_model_is_listed_and_found_by_its_name() -> None:
    listed = call(serving(), "GET", "/v1/models").json()
    [entry] = listed["data"]
    assert listed["object"] == "list"
    assert (entry["id"], entry["object"], entry["max_model_len"]) == ("demo", "model", 512)
    assert call(serving(), "GET", "/v1/models/demo").json() == entry
    served = serving(model=model(name="org/name"))
    assert call(served, "GET", "/v1/models/org/name").json()["id"] == "org/name"
    assert call(serving(), "GET", "/version").json() == {"version": "1.2.3"}
    # No page that would load scripts of a third party.
    assert {call(serving(), "GET", path).status for path in ("/docs", "/redoc")} == {404}
    missing = call(serving(), "GET", "/v1/models/other")
    error = missing.error()
    assert (missing.status, error["code"], error["param"]) == (404, "model_not_found", None)


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
    preflight = ORIGIN | {
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization,content-type,x-stainless-lang",
    }
    name = "access-control-allow-origin"
    assert call(serving(), "OPTIONS", PATH, None, preflight).status == 405
    assert name not in call(serving(), "GET", "/health", None, ORIGIN).headers
    app = create_app(serving(authorise=authorise), allow_origins=["https://example.org"])
    reply = call(app, "OPTIONS", PATH, None, preflight)
    assert (reply.status, reply.headers[name]) == (200, ORIGIN["origin"])
    assert "x-stainless-lang" in reply.headers["access-control-allow-headers"]
    other = preflight | {"origin": "https://example.com"}
    assert call(app, "OPTIONS", PATH, None, other).status == 400
    # A page has to see what went wrong, too.
    refused = call(app, "POST", PATH, {}, ORIGIN)
    assert (refused.status, refused.headers[name]) == (401, ORIGIN["origin"])


@each_row(
    ("path", "body"),
    [
        (PATH, {"prompt": "a"}),
        (PATH, {"prompt": "a", "guided_regex": "a"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
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
