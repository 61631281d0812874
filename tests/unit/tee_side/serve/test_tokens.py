"""`/tokenize`, `/detokenize` and `/tokenizer_info`, and the names of single tokens."""

from __future__ import annotations

import json
from typing import Any

from tee_side.serve.token_names import TokenNames, number
from tests.kit.rows import each_row
from tests.kit.serve import Reply, call, model, serving, tokenizer

TEXT = "Hello é"
IDS = tokenizer().encode(TEXT)


def _post(path: str, **body: Any) -> Reply:
    return call(serving(), "POST", path, body)


def test_vllm_s_tokenize_counts_and_adds_special_tokens_unless_it_is_told_not_to() -> None:
    body = _post("/tokenize", model="demo", prompt=TEXT).json()
    expected = {"tokens": IDS, "count": len(IDS), "max_model_len": model().max_model_len}
    assert body == expected | {"token_strs": None}
    body = _post("/tokenize", prompt=TEXT, add_special_tokens=False, return_token_strs=True).json()
    assert body["tokens"] == IDS[1:]
    assert body["token_strs"][-2:] == ["bytes:\\xc3", "bytes:\\xa9"]
    assert "".join(body["token_strs"][:-2]) == "Hello "
    messages = [{"role": "user", "content": "Hello"}]
    for add in (True, False):
        body = _post("/tokenize", messages=messages, add_generation_prompt=add).json()
        expected_ids = tokenizer().apply_chat_template(messages, add_generation_prompt=add)
        assert body["tokens"] == expected_ids


def test_llama_cpp_s_tokenize_has_tokens_or_pieces_and_nothing_else() -> None:
    assert _post("/tokenize", content=TEXT).json() == {"tokens": IDS[1:]}
    assert _post("/tokenize", content=TEXT, add_special=True).json() == {"tokens": IDS}
    pieces = _post("/tokenize", content=TEXT, with_pieces=True).json()["tokens"]
    assert [piece["id"] for piece in pieces] == IDS[1:]
    assert [piece["piece"] for piece in pieces[-2:]] == [[0xC3], [0xA9]]


CHAT = [{"role": "user", "content": TEXT}]


@each_row(
    ("body", "param"),
    [
        ({}, "body"),
        ({"prompt": "a", "content": "a"}, "body"),
        ({"prompt": "\ud800"}, "body.prompt"),
        ({"content": 5}, "body.content"),
        ({"messages": [{}]}, "body.messages.0.role"),
        # A field of another form is not passed over.
        *(
            ({"prompt": TEXT, name: True}, f"body.{name}")
            for name in ("add_special", "with_pieces")
        ),
        ({"content": TEXT, "add_special_tokens": True}, "body.add_special_tokens"),
        ({"content": TEXT, "return_token_strs": True}, "body.return_token_strs"),
        ({"content": TEXT, "add_generation_prompt": True}, "body.add_generation_prompt"),
        ({"messages": CHAT, "add_special_tokens": True}, "body.add_special_tokens"),
    ],
)
def test_what_cannot_be_tokenized_is_400(body: dict[str, Any], param: str) -> None:
    reply = _post("/tokenize", **body)
    assert (reply.status, reply.error()["param"]) == (400, param)
    null = {name: None if value is True else value for name, value in body.items()}
    assert (_post("/tokenize", **null).status == 200) == (null != body)


def test_detokenize_answers_under_both_names() -> None:
    assert _post("/detokenize", tokens=IDS).json() == {"prompt": TEXT, "content": TEXT}
    assert _post("/detokenize", tokens=[]).json()["prompt"] == ""
    assert _post("/detokenize", tokens=[1024]).error()["param"] == "body.tokens"


def test_tokenizer_info_is_enough_to_write_prompts_elsewhere() -> None:
    info = call(serving(), "GET", "/tokenizer_info").json()
    assert (info["bos_token"], info["eos_token"]) == ("<|begin_of_text|>", "<|end_of_text|>")
    assert "assistant" in info["chat_template"]
    assert (info["vocab_size"], info["model_max_length"]) == (1024, 512)
    assert info["tokenizer_class"] == "TokenizersBackend"


def test_no_two_tokens_have_the_same_name_and_names_add_up_to_the_text() -> None:
    names = TokenNames(tokenizer())
    found = [json.loads(names.of(token_id)[0]) for token_id in range(1024)]
    assert len(set(found)) == 1024
    ids = tokenizer().encode("The cat, 12 mice")
    assert "".join(found[one] for one in ids) == "<|begin_of_text|>The cat, 12 mice"
    # A part of a character is named by its bytes, and an id without a token has none.
    for one, byte in zip(tokenizer().encode("😀")[1:], "😀".encode(), strict=True):
        assert names.of(one) == (json.dumps(f"bytes:\\x{byte:02x}"), f"[{byte}]")
    assert names.of(5000) == ('"token_id:5000"', "null")


def test_a_logprob_is_written_so_that_the_same_float_is_read() -> None:
    for value in (-0.1, -1e-30, 0.0, -123.456789012345):
        assert json.loads(number(value)) == value
