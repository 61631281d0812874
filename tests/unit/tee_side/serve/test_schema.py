"""What a client may send is done or refused by its name, and never quoted; who may send it."""

import asyncio
import json
import logging
import math
import re
import threading
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from pydantic import TypeAdapter, ValidationError
from starlette.requests import Request

from protocol.errors import (
    EndpointError,
    EvidenceError,
    LimitError,
    PadsExhaustedError,
    PromptError,
    TsqpError,
    VerificationError,
)
from tee_side.attest.statement import Claims
from tee_side.engine.tokenizer import Tokenizer
from tee_side.serve import schema
from tee_side.serve.app import _GUARDED, create_app
from tee_side.serve.errors import ApiError, of_engine, of_validation
from tee_side.serve.identity import Attestation
from tee_side.serve.keys import RateLimitError
from tee_side.serve.schema import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    EmbeddingsRequest,
    TokenizeRequest,
)
from tests.kit.evidence import identity
from tests.kit.rows import each_row
from tests.kit.serve import (
    Clock,
    FakeEngine,
    FakeWatch,
    Reply,
    authorise,
    call,
    chat,
    complete,
    embed,
    in_a_loop,
    model,
    serving,
)
from tsqp.client.attested_tls import read_answer

Ask = Callable[..., Reply]


# Clients' own; none changes an answer.
_NAMES = """user metadata store service_tier prompt_cache_key prompt_cache_retention
safety_identifier priority request_id cache_prompt guided_decoding_backend
spaces_between_special_tokens session_id chat_id id_slot prediction mirostat_tau mirostat_eta
dry_base dry_allowed_length dry_penalty_last_n dry_sequence_breakers xtc_threshold
dynatemp_exponent repeat_last_n penalize_nl min_keep n_keep n_discard"""
UNUSED: dict[str, Any] = dict.fromkeys(_NAMES.split(), "x")
# The value that changes nothing, and one that would change the answer.
NEUTRAL: dict[str, tuple[Any, Any]] = {
    "functions": ([], [{}]),
    "tools": ([], [{"type": "web_search"}]),
    "function_call": ("none", "f"),
    "audio": (None, {"voice": "x"}),
    "modalities": (["text"], ["text", "audio"]),
    "web_search_options": (None, {}),
    "verbosity": ("medium", "low"),
    "use_beam_search": (False, True),
    "length_penalty": (1, 1.5),
    "early_stopping": (False, True),
    "logits_processors": ([], ["x"]),
    "detokenize": (True, False),
    "timings_per_token": (False, True),
    "post_sampling_probs": (False, True),
    "return_progress": (False, True),
    "do_sample": (True, False),
    "include_reasoning": (True, False),
    "grammar": ("", "root"),
    "samplers": ([], ["x"]),
    "n_predict": (-1, 5),
    "watermark": (False, True),
    "n_probs": (0, 3),
    "typical_p": (1.0, 0.5),
    "tfs_z": (1, 0.5),
    "top_n_sigma": (-1, 1),
    "mirostat": (0, 2),
    "dry_multiplier": (0, 0.8),
    "xtc_probability": (0.0, 0.1),
    "dynatemp_range": (0, 1),
    "repeat_penalty": (1, 1.1),
}
# What is done, at its neutral value.
DONE: dict[str, Any] = {
    "best_of": 0,
    "seed": -1,
    "stop": "",
    "min_tokens": 0,
    "bad_words": [],
    "logit_bias": {},
    "skip_special_tokens": True,
    "include_stop_str_in_output": False,
    "return_token_ids": False,
    "return_tokens_as_token_ids": False,
    "stream_options": {"include_usage": True},
    "response_format": {"type": "text"},
}
OF_CHATS: dict[str, Any] = {
    "tools": [],
    "tool_choice": "none",
    "parallel_tool_calls": True,
    "chat_template_kwargs": {},
    "continue_final_message": False,
    "echo": False,
}
IN_CHATS = {"add_special_tokens": (False, True), "chat_template": (None, "{{ 1 }}")}


@each_row("ask", [complete, chat, embed], ids=lambda ask: ask.__name__)
def test_what_is_unused_or_left_at_its_only_value_changes_nothing(ask: Ask) -> None:
    assert UNUSED.keys() == schema._UNUSED.keys()
    assert NEUTRAL.keys() == schema._NEUTRAL.keys()
    only = DONE | {name: values[0] for name, values in NEUTRAL.items()}
    if ask is chat:
        only |= OF_CHATS | {name: values[0] for name, values in IN_CHATS.items()}
    if ask is complete:
        only |= {"suffix": ""}
    if ask is embed:
        only = {"truncate_prompt_tokens": None, "stream": False}
    engine = FakeEngine()
    ask(engine)
    for fields in (UNUSED, only, dict.fromkeys([*UNUSED, *only, "never_heard_of"])):
        assert ask(engine, **fields).status == 200
    first, *others = map(asdict, engine.requests)
    assert others == [first] * 3


@each_row("ask", [complete, chat], ids=lambda ask: ask.__name__)
def test_what_would_change_the_answer_is_refused_by_name(ask: Ask) -> None:
    engine, told = FakeEngine(), {}
    for name, (_, other) in (NEUTRAL | (IN_CHATS if ask is chat else {})).items():
        told[name] = ask(engine, **{name: other}).error()
    assert [name for name in told if told[name]["param"].split(".")[:2] != ["body", name]] == []
    assert told["functions"]["message"].endswith("nothing: this is not supported")
    assert not engine.requests


def test_an_image_is_refused_in_words() -> None:
    said = chat(messages=[{"role": "user", "content": [IMAGE]}]).error()
    assert said["param"] == "body.messages.0.content.0"
    assert said["message"].endswith("text: images, sound and files are not read")


USER = {"role": "user", "content": "Hello"}
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
HIDDEN, LONG = model().config.hidden_size, "a " * model().max_model_len


@each_row(
    ("ask", "field", "taken", "refused"),
    [
        (complete, "n", [1, 128], [0, 129, 1.5, "2", True]),
        (complete, "max_tokens", [1, -1], [0, -2, 2**31, "5"]),
        (chat, "max_completion_tokens", [1, -1], [0, -2]),
        (complete, "best_of", [0, 1], [2]),
        (complete, "truncate_prompt_tokens", [1, -1], [0, -2]),
        (complete, "allowed_token_ids", [[0, 1023]], [[], [1024]]),
        (complete, "prompt_logprobs", [-1, 0, 20], [-2, 21]),
        (complete, "stop", ["a", ["a"] * 16, [""]], ["a" * 101, ["a"] * 17, 5]),
        (complete, "stop_token_ids", [[0, 1023]], [[1024], [-1], ["5"]]),
        (complete, "seed", [0, -5, 2**64 - 1], [2**64, -(2**63) - 1, 0.5]),
        (complete, "temperature", [0, 100], [-0.1, 100.1, "0.5", math.nan, math.inf, -math.inf]),
        (complete, "top_p", [0.1, 1], [0, 1.1]),
        (complete, "top_k", [-1, 0], [-2]),
        (complete, "min_p", [0, 1], [-0.1, 1.1]),
        (complete, "frequency_penalty", [-2, 2], [-2.1, 2.1]),
        (complete, "presence_penalty", [-2, 2], [-2.1, 2.1]),
        (complete, "repetition_penalty", [0.01, 100], [0, 101]),
        (complete, "logit_bias", [{"1023": -100}], [{"5": 101}, {"1024": 1}, {"-1": 1}, {"²": 1}]),
        (complete, "logprobs", [0, 20], [-1, 21, True]),
        (chat, "top_logprobs", [0], [1, 21, -1]),
        (complete, "cache_salt", ["s" * 256], ["s" * 257]),
        (embed, "dimensions", [HIDDEN], [HIDDEN - 1]),
        (embed, "pooling", ["last", "mean"], ["max"]),
        (
            complete,
            "prompt",
            ["", "a", ["a", "b"], [5], [[5], [6]]],
            [[], [[]], [[5], []], [1024], [[5], [9, 1024]], [-1], "\ud800", ["a"] * 2049, LONG],
        ),
        (embed, "input", ["a", [5] * 512], [[], [[]], [1024], [5] * 513]),
        (
            chat,
            "messages",
            [[USER], [{"role": "assistant"}, USER]],
            [None, "Hello", [], [{}], [USER, {"role": "narrator", "content": "a"}]]
            + [[{"role": "user", "content": one}] for one in (None, 5, "\ud800", LONG, [IMAGE])]
            + [[{"role": "user"}], [USER | {"weight": 1}], [USER | {"tool_calls": [{}]}]],
        ),
    ],
    ids=lambda row: f"{row[0].__name__} {row[1]}",
)
def test_a_value_is_within_its_bounds(
    ask: Ask, field: str, taken: Sequence[Any], refused: Sequence[Any]
) -> None:
    engine = FakeEngine()
    assert [value for value in taken if ask(**{field: value}).status != 200] == []

    def named(value: Any) -> list[str]:
        return str(ask(engine, **{field: value}).error()["param"]).split(".")[:2]

    assert [value for value in refused if named(value) != ["body", field]] == []
    assert not engine.requests


@each_row(
    ("ask", "body", "param"),
    [
        # Where a value fitted furthest.
        (complete, {"prompt": [[1], [2, 3.5]]}, "body.prompt.1.1"),
        (chat, {"messages": [USER, {"content": "a"}]}, "body.messages.1.role"),
        # All samples are counted.
        (complete, {"prompt": [[5]] * 1025, "n": 2}, "body.prompt"),
        (chat, {"top_logprobs": 3, "logprobs": False}, "body.top_logprobs"),
        (complete, {"prompt": "", "add_special_tokens": False}, "body.prompt"),
        # An unknown field is named where it looks like one.
        (complete, {"nosuch": 1}, "body.nosuch"),
        (complete, {"no such": 1}, "body"),
    ],
)
def test_the_place_of_a_fault_is_named(ask: Ask, body: dict[str, Any], param: str) -> None:
    reply = ask(**body)
    assert (reply.status, reply.error()["param"]) == (400, param)


def test_a_body_of_many_faults_is_not_read_to_its_end() -> None:
    for body in (
        {f"field{at}": 1 for at in range(2000)},
        {"logit_bias": {str(at): 1000 for at in range(2000)}},
    ):
        assert complete(**body).error()["message"].endswith("fewer fields")
    for prompt in ([1] * 9 + ["a"] * 9**4, [{}] * 9**4):
        with pytest.raises(ValidationError) as caught:
            TypeAdapter(schema.CompletionRequest).validate_python({"prompt": prompt})
        assert caught.value.error_count() < 10


CANARY = "Seekrit-\ud83d\x1b[31m 4711"
ENDPOINTS = {
    "/v1/completions": (CompletionRequest, {"prompt": "a"}),
    "/v1/chat/completions": (ChatRequest, {"messages": [{"role": "user", "content": "a"}]}),
    "/v1/embeddings": (EmbeddingsRequest, {"input": "a"}),
    "/tokenize": (TokenizeRequest, {"prompt": "a"}),
    "/detokenize": (DetokenizeRequest, {"tokens": [5]}),
}
IS_JSON = {"content-type": "application/json"}


def test_no_error_quotes_the_input_or_a_lone_surrogate(caplog: pytest.LogCaptureFixture) -> None:
    """Of every field of every endpoint with the canary in it, in some forms."""
    caplog.set_level(logging.DEBUG)
    forms: list[Any] = [CANARY, {CANARY: CANARY}, [CANARY, [CANARY], {CANARY: [CANARY]}]]
    app, refused = create_app(serving()), {}
    for path, (schema_of, body) in ENDPOINTS.items():
        for name in [*schema_of.model_fields, CANARY]:
            for number, form in enumerate(forms):
                reply = call(app, "POST", path, body | {name: form})
                if reply.status != 200:
                    refused[path, name, number] = reply
    assert len(refused) > 150
    assert {reply.status for reply in refused.values()} == {400}
    assert all(reply.error()["message"] and reply.text.isascii() for reply in refused.values())
    words = ("Seekrit", "4711", "ud83d")
    texts = {place: reply.text for place, reply in refused.items()}
    assert [place for place, text in texts.items() if any(word in text for word in words)] == []
    assert "4711" not in caplog.text


BODY = "a JSON object (a body is sent as application/json)"


@each_row(
    ("loc", "kind", "message", "param", "said"),
    [
        ([], "model_attributes_type", "", "body", BODY),
        (["messages", 0], "model_attributes_type", "", "body.messages.0", "a JSON object"),
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


def test_what_is_no_json_object_or_of_another_content_type_is_400() -> None:
    for body, headers in (
        *((text, IS_JSON) for text in (b"{", b"[1]", b"\xff\xfe{", b"[" * 100_000)),
        (b'{"prompt": ' + b"9" * 5000 + b"}", IS_JSON),
        (b'{"prompt": "a"}', {"content-type": "application/x-www-form-urlencoded"}),
    ):
        reply = call(serving(), "POST", "/v1/completions", body, headers)
        assert (reply.status, reply.error()["type"]) == (400, "invalid_request_error"), body[:9]


def test_another_path_method_or_model_is_refused_in_the_same_form() -> None:
    reply = call(serving(), "PUT", "/v1/completions")
    assert (reply.status, reply.headers["allow"]) == (405, "POST")
    assert reply.error()["type"] == "invalid_request_error"
    # A page that describes the API would load scripts of a third party.
    for path in ("/v1/Seekrit", "/docs", "/redoc"):
        reply = call(serving(), "GET", path)
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
    full = RateLimitError("API key alice", got="1", expected="0", after_s=2.5, headers={"x-a": "b"})
    watch = FakeWatch(full=full)
    served = serving(watch=watch, authorise=authorise)
    with patch.object(Tokenizer, "encode", side_effect=AssertionError):
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
    # Why the hardware gives none is for us alone.
    made, why = identity(), EvidenceError("tdx", got="Seekrit", expected="a quote")
    with patch.object(made, "state", side_effect=why):
        status, error = _refusal(Attestation(made, clock))
    assert (status, "Seekrit" in str(error.body)) == (503, False)


@in_a_loop
async def test_while_16_wait_for_the_hardware_none_more_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made, release = identity(), threading.Event()
    state = made.state
    monkeypatch.setattr(made, "state", lambda nonce: release.wait(60) and state(nonce))
    attestation = Attestation(made, Clock())
    waiting = [asyncio.create_task(_asked(attestation)) for _ in range(16)]
    await asyncio.sleep(0)  # the turn in which they begin
    with pytest.raises(ApiError) as refused:
        await _asked(attestation)
    assert refused.value.status_code == 429
    release.set()
    await asyncio.gather(*waiting)
    assert await _asked(attestation)


def test_every_field_is_in_the_docs() -> None:
    said = (Path(__file__).parents[4] / "docs/operate/api.md").read_text(encoding="utf-8")
    assert {"best_of", "call_id"} < schema.field_names()
    assert [name for name in schema.field_names() if not re.search(rf"\b{name}\b", said)] == []
