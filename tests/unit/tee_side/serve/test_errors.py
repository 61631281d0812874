"""Every error has one form and a status of its own, and never says what the client wrote."""

from __future__ import annotations

import json
import logging
from typing import Any

import pytest

from protocol.errors import (
    EndpointError,
    LimitError,
    PadsExhaustedError,
    PromptError,
    TsqpError,
    VerificationError,
)
from tee_side.serve.app import create_app
from tee_side.serve.errors import of_engine, of_validation
from tee_side.serve.limits import RateLimitError
from tee_side.serve.schema import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    EmbeddingRequest,
    TokenizeRequest,
)
from tests.kit.rows import each_row
from tests.kit.serve import FakeEngine, call, chat, serving

CANARY = "Seekrit-\ud83d\x1b[31m 4711"
ENDPOINTS = {
    "/v1/completions": (CompletionRequest, {"prompt": "a"}),
    "/v1/chat/completions": (ChatRequest, {"messages": [{"role": "user", "content": "a"}]}),
    "/v1/embeddings": (EmbeddingRequest, {"input": "a"}),
    "/tokenize": (TokenizeRequest, {"prompt": "a"}),
    "/detokenize": (DetokenizeRequest, {"tokens": [5]}),
}
IS_JSON = {"content-type": "application/json"}


def test_no_error_quotes_the_input_or_a_lone_surrogate(caplog: pytest.LogCaptureFixture) -> None:
    """Of every field of every endpoint with the canary in it, in some forms."""
    caplog.set_level(logging.DEBUG)
    forms: list[Any] = [CANARY, [CANARY], {CANARY: CANARY}, [[CANARY]], [{CANARY: [CANARY]}]]
    app, refused = create_app(serving()), {}
    for path, (model, body) in ENDPOINTS.items():
        for name in [*model.model_fields, CANARY]:
            for number, form in enumerate(forms):
                reply = call(app, "POST", path, body | {name: form})
                if reply.status != 200:
                    refused[path, name, number] = reply
    assert len(refused) > 300
    assert {reply.status for reply in refused.values()} == {400}
    assert all(reply.error()["message"] and reply.text.isascii() for reply in refused.values())
    words = ("Seekrit", "4711", "ud83d")
    texts = {place: reply.text for place, reply in refused.items()}
    assert [place for place, text in texts.items() if len(text) > 600] == []
    assert [place for place, text in texts.items() if any(word in text for word in words)] == []
    assert "4711" not in caplog.text


@each_row(
    ("loc", "kind", "message", "param", "said"),
    [
        (["prompt", 3], "new", CANARY, "body.prompt.3", "another value"),
        ([CANARY, "n", CANARY, -1], f"{CANARY}_type", CANARY, "body.n.-1", "another value"),
        (["n"], "less_than", "Input should be less than 5", "body.n", "less than 5"),
        (["n", CANARY], "extra_forbidden", CANARY, "body.n", "no such field"),
    ],
)
def test_a_fault_that_is_new_to_us_is_said_in_our_words_alone(
    loc: list[str | int], kind: str, message: str, param: str, said: str
) -> None:
    fault = {"loc": ["body", *loc], "type": kind, "msg": message}
    error = json.loads(of_validation([fault]).body)["error"]
    assert (error["param"], error["message"]) == (param, f"{param}: expected {said}")


@each_row(
    ("body", "headers"),
    [
        (b"", {}),
        *((text, IS_JSON) for text in (b"{", b"[1]", b'"a"', b"\xff\xfe{", b"[" * 100_000)),
        (b'{"prompt": ' + b"9" * 5000 + b"}", IS_JSON),
        (b'{"prompt": "a", "temperature": 1e999}', IS_JSON),
        (b'{"prompt": "a"}', {"content-type": "text/plain"}),
        (b'{"prompt": "a"}', {"content-type": "application/x-www-form-urlencoded"}),
        (b'{"prompt": "a"}', {}),
    ],
)
def test_what_is_no_json_object_or_of_another_content_type_is_400(
    body: bytes, headers: dict[str, str]
) -> None:
    reply = call(serving(), "POST", "/v1/completions", body, headers)
    assert (reply.status, reply.error()["type"]) == (400, "invalid_request_error")


def test_another_path_method_or_model_is_refused_in_the_same_form() -> None:
    for method in ("GET", "PUT", "DELETE"):
        reply = call(serving(), method, "/v1/completions")
        assert (reply.status, reply.headers["allow"]) == (405, "POST")
        assert reply.error()["type"] == "invalid_request_error"
    reply = call(serving(), "GET", "/v1/Seekrit")
    assert (reply.status, reply.error()["type"]) == (404, "not_found_error")
    assert "Seekrit" not in reply.text
    for path, (_, body) in ENDPOINTS.items():
        reply = call(serving(), "POST", path, body | {"model": "Seekrit"})
        assert (reply.status, reply.error()["code"]) == (404, "model_not_found")
        assert "Seekrit" not in reply.text


def _limit(*, retryable: bool) -> LimitError:
    error = LimitError("queue", got="65 requests", expected="at most 64")
    error.retryable = retryable
    return error


def _of_key(after_s: float | None) -> RateLimitError:
    headers = {"x-ratelimit-limit-requests": "60"}
    return RateLimitError("API key", got="61", expected="60", after_s=after_s, headers=headers)


_FIELDS = {"got": "a", "expected": "b"}


@each_row(
    ("error", "status", "code", "retry"),
    [
        (PromptError("ids", **_FIELDS), 400, "invalid_prompt", None),
        (_limit(retryable=True), 503, "overloaded", "1"),
        (_limit(retryable=False), 400, "limit_exceeded", None),
        (_of_key(16.5), 429, "rate_limit_exceeded", "17"),
        (_of_key(None), 400, "limit_exceeded", None),
        (PadsExhaustedError("pads", **_FIELDS), 503, "engine_error", "1"),
        (EndpointError("ipc:///tmp/gpu", **_FIELDS), 503, "engine_error", "1"),
        (VerificationError("layer 3 q_proj", **_FIELDS), 500, "engine_error", None),
    ],
)
def test_an_error_of_the_engine_says_by_its_status_whether_a_retry_helps(
    error: TsqpError, status: int, code: str, retry: str | None
) -> None:
    found = of_engine(error)
    assert (found.status_code, json.loads(found.body)["error"]["code"]) == (status, code)
    assert (found.headers or {}).get("retry-after") == retry
    assert error.where not in found.body


def test_what_fails_unforeseen_is_500_and_its_words_are_in_no_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.DEBUG)
    reply = chat(FakeEngine(refuse=RuntimeError("Seekrit")))
    assert (reply.status, reply.error()["type"]) == (500, "server_error")
    [record] = [record for record in caplog.records if record.name == "tee_side"]
    assert record.message == "request_failed"
    assert record.fields["error"] == "RuntimeError"  # type: ignore[attr-defined]
    assert "Seekrit" not in reply.text + str([one.__dict__ for one in caplog.records])
    assert all(one.exc_info is None for one in caplog.records)
