"""Every error has one form, names a field, and never says what the client wrote."""

from __future__ import annotations

import json
import logging
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

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
from tee_side.serve.schema import (
    FIELD_NAMES,
    ChatRequest,
    CompletionRequest,
    EmbeddingRequest,
    TokenizeRequest,
)
from tests.kit.serve import FakeEngine, FakeWatch, call, complete, serving

CANARY = "Seekrit-\ud83d\x1b[31m 4711"
ENDPOINTS = {
    "/v1/completions": (CompletionRequest, {"prompt": "a"}),
    "/v1/chat/completions": (ChatRequest, {"messages": [{"role": "user", "content": "a"}]}),
    "/v1/embeddings": (EmbeddingRequest, {"input": "a"}),
    "/tokenize": (TokenizeRequest, {"prompt": "a"}),
}


def _wrong() -> list[tuple[str, dict[str, Any]]]:
    """Every field of every endpoint with the canary in it, in some forms."""
    forms: list[Any] = [CANARY, [CANARY], {CANARY: CANARY}, [[CANARY]], [{CANARY: [CANARY]}]]
    return [
        (path, body | {name: form})
        for path, (model, body) in ENDPOINTS.items()
        for name in [*model.model_fields, CANARY]
        for form in forms
    ]


def test_no_error_quotes_the_input_or_a_lone_surrogate(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    app, refused = create_app(serving()), 0
    for path, body in _wrong():
        reply = call(app, "POST", path, body)
        assert reply.status in (200, 400, 404), (path, body)
        if reply.status != 200:
            refused += 1
            error = reply.error()
            assert error["message"]
            assert len(reply.text) < 600
            assert reply.text.isascii()
            for part in ("Seekrit", "4711", "ud83d"):
                assert part not in reply.text, (path, body)
    assert refused > 300
    assert "4711" not in caplog.text


@pytest.mark.parametrize(
    ("body", "headers"),
    [
        (b"", {}),
        (b"{", {"content-type": "application/json"}),
        (b"[1]", {"content-type": "application/json"}),
        (b'"a"', {"content-type": "application/json"}),
        (b"\xff\xfe{", {"content-type": "application/json"}),
        (b"[" * 100_000, {"content-type": "application/json"}),
        (b'{"prompt": ' + b"9" * 5000 + b"}", {"content-type": "application/json"}),
        (b'{"prompt": "a"}', {"content-type": "text/plain"}),
        (b'{"prompt": "a"}', {"content-type": "application/x-www-form-urlencoded"}),
        (b'{"prompt": "a"}', {}),
    ],
)
def test_what_is_no_json_object_or_of_another_content_type_is_4xx(
    body: bytes, headers: dict[str, str]
) -> None:
    reply = call(serving(), "POST", "/v1/completions", body, headers)
    assert reply.status == 400
    assert reply.error()["type"] == "invalid_request_error"


def test_null_infinity_and_not_a_number_are_400() -> None:
    for text in ("NaN", "Infinity", "-Infinity", "1e999"):
        body = f'{{"prompt": "a", "temperature": {text}}}'.encode()
        reply = call(
            serving(), "POST", "/v1/completions", body, {"content-type": "application/json"}
        )
        assert (reply.status, reply.error()["param"]) == (400, "body.temperature")


@pytest.mark.parametrize(
    ("field", "param"),
    [("nosuch", "body.nosuch"), ("no such", "body"), ("a" * 41, "body"), ("été", "body")],
)
def test_an_unknown_field_is_400_and_named_if_it_looks_like_one(field: str, param: str) -> None:
    reply = complete(**{field: 1})
    assert (reply.status, reply.error()["param"]) == (400, param)


@pytest.mark.parametrize(
    "body",
    [
        {f"field{at}": 1 for at in range(2000)},
        {"logit_bias": {str(at): 1000 for at in range(2000)}},
    ],
)
def test_a_body_of_many_faults_is_not_read_to_its_end(body: dict[str, Any]) -> None:
    reply = complete(**body)
    assert reply.error()["message"].endswith("fewer fields")


@pytest.mark.parametrize("content", [{"prompt": [1] * 9 + ["a"] * 9**5}, {"prompt": [{}] * 9**5}])
def test_a_list_of_many_faults_has_a_few(content: dict[str, Any]) -> None:
    with pytest.raises(ValidationError) as caught:
        TypeAdapter(CompletionRequest).validate_python(content)
    assert caught.value.error_count() < 10


def test_the_place_that_the_value_fitted_furthest_is_named() -> None:
    assert complete(prompt=[1, 2, "a"]).error()["param"] == "body.prompt.2"
    assert complete(prompt=["a", 2]).error()["param"] == "body.prompt.1"
    assert complete(prompt=[[1], [2, 3.5]]).error()["param"] == "body.prompt.1.1"


@given(st.lists(st.text() | st.integers(), max_size=3), st.text(), st.text())
def test_a_fault_that_is_new_to_us_is_said_in_our_words_alone(
    loc: list[str | int], kind: str, message: str
) -> None:
    fault = {"loc": ["body", *loc], "type": f"new {kind}", "msg": message}
    error = json.loads(of_validation([fault]).body)["error"]
    _, *parts = error["param"].split(".")
    assert all(part in FIELD_NAMES or part.lstrip("-").isdigit() for part in parts)
    assert error["message"] == f"{error['param']}: expected another value"


@pytest.mark.parametrize("method", ["GET", "PUT", "DELETE"])
def test_a_wrong_method_is_405_in_the_same_form(method: str) -> None:
    reply = call(serving(), method, "/v1/completions")
    assert (reply.status, reply.headers["allow"]) == (405, "POST")
    assert reply.error()["type"] == "invalid_request_error"


def test_an_unknown_path_is_404_in_the_same_form() -> None:
    reply = call(serving(), "GET", "/v1/Seekrit")
    assert (reply.status, reply.error()["type"]) == (404, "not_found_error")
    assert "Seekrit" not in reply.text


@pytest.mark.parametrize("path", list(ENDPOINTS))
def test_an_unknown_model_is_404_model_not_found(path: str) -> None:
    reply = call(serving(), "POST", path, ENDPOINTS[path][1] | {"model": "Seekrit"})
    assert (reply.status, reply.error()["code"]) == (404, "model_not_found")
    assert "Seekrit" not in reply.text


class _RateLimitError(LimitError):
    def __init__(self, *, retryable: bool) -> None:
        super().__init__("API key: requests", got="61 requests", expected="at most 60")
        self.retryable = retryable
        self.headers = {"x-ratelimit-limit-requests": "60"} | (
            {"retry-after": "17"} if retryable else {}
        )


def _limit(*, retryable: bool) -> LimitError:
    error = LimitError("queue", got="65 requests", expected="at most 64")
    error.retryable = retryable
    return error


_FIELDS = {"got": "a", "expected": "b"}


@pytest.mark.parametrize(
    ("error", "status", "code", "retry"),
    [
        (PromptError("ids", **_FIELDS), 400, "invalid_prompt", None),
        (_limit(retryable=True), 503, "overloaded", "1"),
        (_limit(retryable=False), 400, "limit_exceeded", None),
        (_RateLimitError(retryable=True), 429, "rate_limit_exceeded", "17"),
        (_RateLimitError(retryable=False), 400, "limit_exceeded", None),
        (PadsExhaustedError("pads", **_FIELDS), 503, "engine_error", "1"),
        (EndpointError("ipc:///tmp/gpu", **_FIELDS), 503, "engine_error", "1"),
        (VerificationError("layer 3 q_proj", **_FIELDS), 500, "engine_error", None),
    ],
)
def test_an_error_of_the_engine_says_by_its_status_whether_a_retry_helps(
    error: TsqpError, status: int, code: str, retry: str | None
) -> None:
    found = of_engine(error)
    assert found.status_code == status
    assert json.loads(found.body)["error"]["code"] == code
    assert (found.headers or {}).get("retry-after") == retry
    assert error.where not in found.body


def test_a_refusal_before_the_first_byte_is_an_http_error() -> None:
    for stream in (False, True):
        watch = FakeWatch(refusal=_RateLimitError(retryable=True))
        app = create_app(serving(watch=watch))
        reply = call(app, "POST", "/v1/completions", {"prompt": "a", "stream": stream})
        assert (reply.status, reply.error()["type"]) == (429, "rate_limit_error")
        assert reply.headers["x-ratelimit-limit-requests"] == "60"
        assert reply.headers["retry-after"] == "17"
        engine = FakeEngine(refuse=_limit(retryable=True))
        reply = complete(engine, stream=stream)
        assert (reply.status, reply.headers["retry-after"]) == (503, "1")
