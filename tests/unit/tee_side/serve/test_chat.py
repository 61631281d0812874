"""`/v1/chat/completions`, as clients and test suites of OpenAI's API expect it."""

from __future__ import annotations

import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from tee_side.engine.tokenizer import TOKENIZER_FILE, Tokenizer
from tests.kit.serve import (
    SAID,
    FakeEngine,
    call,
    chat,
    model,
    serving,
    tokenizer,
)
from tsqp.cli.program import model_directory

USER = {"role": "user", "content": "Hello"}


def _ids(text: str) -> list[int]:
    return tokenizer().encode(text)[1:]


def test_an_answer_has_all_that_openai_s_has() -> None:
    body = chat().json()
    assert (body["object"], body["model"]) == ("chat.completion", "demo")
    assert body["id"].startswith("chatcmpl-")
    message = {"role": "assistant", "content": SAID, "refusal": None}
    choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": "stop"}
    assert body["choices"] == [choice]
    assert body["usage"]["completion_tokens"] == len(_ids(SAID))


def test_the_first_chunk_of_each_index_has_the_role_only() -> None:
    reply = chat(stream=True, n=2)
    assert reply.headers["content-type"].startswith("text/event-stream")
    *chunks, done = reply.events()
    assert done == "[DONE]"
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    role = {"role": "assistant", "content": ""}
    assert [chunk["choices"][0]["delta"] for chunk in chunks[:2]] == [role, role]
    assert [chunk["choices"][0]["index"] for chunk in chunks[:2]] == [0, 1]
    for index in range(2):
        mine = [c["choices"][0] for c in chunks[2:] if c["choices"][0]["index"] == index]
        assert "".join(choice["delta"]["content"] for choice in mine) == SAID
        assert all("role" not in choice["delta"] for choice in mine)
        reasons = [choice["finish_reason"] for choice in mine]
        assert [*filter(None, reasons)] == ["stop"] == reasons[-1:]


def test_include_usage_ends_with_a_chunk_of_empty_choices() -> None:
    *chunks, last, done = chat(stream=True, stream_options={"include_usage": True}).events()
    assert done == "[DONE]"
    assert all(chunk["usage"] is None for chunk in chunks)
    assert (last["choices"], last["usage"]["completion_tokens"]) == ([], len(_ids(SAID)))


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        (None, "body.messages"),
        ("Hello", "body.messages"),
        ([], "body.messages"),
        ({}, "body.messages"),
        ([{}], "body.messages.0.role"),
        (["Hello"], "body.messages.0"),
        ([USER, {"role": 123, "content": "a"}], "body.messages.1.role"),
        ([{"role": "tool", "content": "a"}], "body.messages.0.role"),
        ([{"role": "user"}], "body.messages.0.content"),
        ([{"role": "user", "content": None}], "body.messages.0.content"),
        ([{"role": "user", "content": 5}], "body.messages.0.content"),
        ([USER | {"weight": 1}], "body.messages.0.weight"),
        ([{"role": "user", "content": "\ud800"}], "body.messages"),
    ],
)
def test_messages_null_a_string_an_empty_object_or_of_a_wrong_role_are_400(
    messages: Any, param: str
) -> None:
    reply = chat(messages=messages)
    assert (reply.status, reply.error()["param"]) == (400, param)


def test_an_image_is_400_that_names_the_part() -> None:
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    content = [{"type": "text", "text": "What is it?"}, image]
    reply = chat(messages=[{"role": "user", "content": content}])
    assert (reply.status, reply.error()["param"]) == (400, "body.messages.0.content.1.type")


def test_roles_parts_and_names_reach_the_template() -> None:
    engine = FakeEngine()
    messages = [
        {"role": "developer", "content": "Be short."},
        {"role": "user", "content": [{"type": "text", "text": t} for t in "ab"], "name": "Eve"},
        {"role": "assistant", "content": None, "refusal": None, "annotations": []},
        USER,
    ]
    chat(engine, messages=messages)
    plain = [
        {"role": "system", "content": "Be short."},
        {"role": "user", "content": "a\nb"},
        {"role": "assistant", "content": ""},
        USER,
    ]
    assert list(engine.requests[0].prompt_ids) == tokenizer().apply_chat_template(plain)


def test_a_template_may_be_rendered_without_the_assistant_s_turn() -> None:
    engine = FakeEngine()
    chat(engine)
    chat(engine, add_generation_prompt=False)
    first, second = (request.prompt_ids for request in engine.requests)
    assert first == (*second, *_ids("<|assistant|>"))


def test_a_model_without_a_chat_template_is_400_for_chats_alone(tmp_path: Path) -> None:
    shutil.copy(model_directory("demo") / TOKENIZER_FILE, tmp_path)
    served = serving(model=model(tokenizer=Tokenizer(tmp_path)))
    reply = call(served, "POST", "/v1/chat/completions", {"messages": [USER]})
    assert (reply.status, reply.error()["code"]) == (400, "no_chat_template")
    assert call(served, "POST", "/v1/completions", {"prompt": "Hello"}).status == 200


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({}, 64),
        ({"max_tokens": 5}, 5),
        ({"max_completion_tokens": 6}, 6),
        ({"max_tokens": 5, "max_completion_tokens": 6}, 6),
        ({"max_tokens": 5000}, 505),
    ],
)
def test_max_tokens_by_either_name(body: dict[str, Any], expected: int) -> None:
    engine = FakeEngine()
    chat(engine, **body)
    assert engine.requests[0].max_new_tokens == expected


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_no_tokens_are_400(name: str) -> None:
    reply = chat(**{name: 0})
    assert (reply.status, reply.error()["param"]) == (400, f"body.{name}")


def test_a_conversation_beyond_the_context_is_400_before_any_byte_of_a_stream() -> None:
    messages = [{"role": "user", "content": "a " * model().max_model_len}]
    error = chat(messages=messages, stream=True).error()
    assert error["type"] == "exceed_context_size_error"
    assert error["param"] == "body.messages"
    assert error["n_prompt_tokens"] > error["n_ctx"] == model().max_model_len


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs_have_bytes_and_the_same_float_in_the_list_of_the_likeliest(stream: bool) -> None:
    says = [302, *_ids("é")]
    reply = chat(FakeEngine(says=says), logprobs=True, top_logprobs=3, stream=stream)
    if stream:
        parts = [chunk["choices"][0]["logprobs"] for chunk in reply.events()[:-1]]
        found = [entry for part in parts if part is not None for entry in part["content"]]
    else:
        found = reply.json()["choices"][0]["logprobs"]["content"]
    assert [len(entry["top_logprobs"]) for entry in found] == [3, 3, 3]
    own = [top for top in found[0]["top_logprobs"] if top["token"] == found[0]["token"]]
    assert own == [{key: found[0][key] for key in ("token", "logprob", "bytes")}]
    assert bytes(found[0]["bytes"]).decode() == found[0]["token"]
    assert bytes(found[1]["bytes"] + found[2]["bytes"]).decode() == "é"
    assert [entry["token"] for entry in found[1:]] == ["bytes:\\xc3", "bytes:\\xa9"]


def test_logprobs_without_top_logprobs_list_none() -> None:
    found = chat(logprobs=True).json()["choices"][0]["logprobs"]["content"]
    assert len(found) == len(_ids(SAID))
    assert all(entry["top_logprobs"] == [] for entry in found)


def test_no_top_logprobs_need_no_logprobs() -> None:
    assert chat(top_logprobs=0).json()["choices"][0].get("logprobs") is None


@pytest.mark.parametrize(
    "body",
    [
        {"top_logprobs": 3},
        {"top_logprobs": 3, "logprobs": False},
        {"top_logprobs": 21, "logprobs": True},
        {"top_logprobs": -1, "logprobs": True},
    ],
)
def test_top_logprobs_without_logprobs_or_above_20_are_400(body: dict[str, Any]) -> None:
    reply = chat(**body)
    assert (reply.status, reply.error()["param"]) == (400, "body.top_logprobs")


@pytest.mark.parametrize(
    ("field", "refused", "accepted"),
    [
        ("tools", [{"type": "function"}], []),
        ("tool_choice", "auto", "none"),
        ("functions", [{}], []),
        ("function_call", "auto", "none"),
        ("audio", {"voice": "x"}, None),
        ("modalities", ["text", "audio"], ["text"]),
        ("best_of", 2, 1),
        ("chat_template", "{{ 1 }}", None),
        ("reasoning_effort", "high", "none"),
        ("min_tokens", 1, 0),
    ],
)
def test_a_field_that_would_change_the_answer_is_400_that_names_it(
    field: str, refused: Any, accepted: Any
) -> None:
    reply = chat(**{field: refused})
    assert reply.status == 400
    assert reply.error()["param"].split(".")[:2] == ["body", field]
    assert chat(**{field: accepted}).status == 200


def test_harmless_fields_of_vendors_are_accepted_and_change_nothing() -> None:
    engine = FakeEngine()
    names = ("user", "metadata", "store", "service_tier", "prompt_cache_key", "safety_identifier")
    chat(engine)
    assert chat(engine, **dict.fromkeys(names, "x")).status == 200
    assert asdict(engine.requests[0]) == asdict(engine.requests[1])
