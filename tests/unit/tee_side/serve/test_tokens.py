"""`/tokenize`, `/detokenize` and `/tokenizer_info`."""

from __future__ import annotations

from typing import Any

import pytest

from tests.kit.serve import Reply, call, model, serving, tokenizer

TEXT = "Hello é"


def _post(path: str, **body: Any) -> Reply:
    return call(serving(), "POST", path, body)


def test_vllm_s_tokenize_counts_and_adds_special_tokens_unless_it_is_told_not_to() -> None:
    ids = tokenizer().encode(TEXT)
    body = _post("/tokenize", model="demo", prompt=TEXT).json()
    expected = {"tokens": ids, "count": len(ids), "max_model_len": model().max_model_len}
    assert body == expected | {"token_strs": None}
    body = _post("/tokenize", prompt=TEXT, add_special_tokens=False, return_token_strs=True).json()
    assert body["tokens"] == ids[1:]
    assert body["token_strs"][-2:] == ["bytes:\\xc3", "bytes:\\xa9"]
    assert "".join(body["token_strs"][:-2]) == "Hello "


def test_vllm_s_tokenize_of_a_conversation_is_what_a_chat_would_read() -> None:
    messages = [{"role": "user", "content": "Hello"}]
    for add in (True, False):
        body = _post("/tokenize", messages=messages, add_generation_prompt=add).json()
        expected = tokenizer().apply_chat_template(messages, add_generation_prompt=add)
        assert body["tokens"] == expected


def test_llama_cpp_s_tokenize_has_tokens_or_pieces_and_nothing_else() -> None:
    ids = tokenizer().encode(TEXT)
    assert _post("/tokenize", content=TEXT).json() == {"tokens": ids[1:]}
    assert _post("/tokenize", content=TEXT, add_special=True).json() == {"tokens": ids}
    pieces = _post("/tokenize", content=TEXT, with_pieces=True).json()["tokens"]
    assert [piece["id"] for piece in pieces] == ids[1:]
    assert [piece["piece"] for piece in pieces[-2:]] == [[0xC3], [0xA9]]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "body"),
        ({"prompt": "a", "content": "a"}, "body"),
        ({"prompt": "\ud800"}, "body.prompt"),
        ({"content": 5}, "body.content"),
        ({"messages": [{}]}, "body.messages.0.role"),
    ],
)
def test_what_cannot_be_tokenized_is_400(body: dict[str, Any], param: str) -> None:
    reply = _post("/tokenize", **body)
    assert (reply.status, reply.error()["param"]) == (400, param)


def test_detokenize_answers_under_both_names() -> None:
    body = _post("/detokenize", tokens=tokenizer().encode(TEXT)).json()
    assert body == {"prompt": TEXT, "content": TEXT}
    assert _post("/detokenize", tokens=[]).json()["prompt"] == ""
    assert _post("/detokenize", tokens=[1024]).error()["param"] == "body.tokens"


def test_tokenizer_info_is_enough_to_write_prompts_elsewhere() -> None:
    info = call(serving(), "GET", "/tokenizer_info").json()
    assert info["eos_token"] == "<|end_of_text|>"
    assert info["bos_token"] == "<|begin_of_text|>"
    assert "assistant" in info["chat_template"]
    assert (info["vocab_size"], info["model_max_length"]) == (1024, 512)
    assert info["tokenizer_class"] == "TokenizersBackend"


@pytest.mark.parametrize("path", ["/tokenize", "/detokenize"])
def test_an_unknown_model_is_404(path: str) -> None:
    reply = _post(
        path, model="other", **({"prompt": "a"} if path == "/tokenize" else {"tokens": []})
    )
    assert (reply.status, reply.error()["code"]) == (404, "model_not_found")


@pytest.mark.parametrize(
    ("form", "other"),
    [
        ({"prompt": TEXT}, "add_special"),
        ({"prompt": TEXT}, "with_pieces"),
        ({"content": TEXT}, "add_special_tokens"),
        ({"content": TEXT}, "return_token_strs"),
        ({"messages": [{"role": "user", "content": TEXT}]}, "add_special_tokens"),
        ({"content": TEXT}, "add_generation_prompt"),
    ],
)
def test_a_field_of_another_form_is_refused_and_not_passed_over(
    form: dict[str, Any], other: str
) -> None:
    refused = _post("/tokenize", **form, **{other: True})
    assert (refused.status, refused.error()["param"]) == (400, f"body.{other}")
    assert _post("/tokenize", **form, **{other: None}).status == 200
