"""Answers as clients of the APIs expect them: whole, streamed, as vectors, as tokens."""

from __future__ import annotations

import base64
import json
import math
import struct
from typing import Any

import pytest

from tee_side.engine.request import Logprob
from tests.kit.rows import each_row
from tests.kit.serve import SAID, FakeEngine, Reply, call, chat, complete, model, serving, tokenizer

# Characters of several tokens, so that no token of them is text by itself.
MIXED = "é 😀 a cat"


def _ids(text: str) -> list[int]:
    return tokenizer().encode(text)[1:]


def _streamed(engine: FakeEngine | None = None, **body: Any) -> list[Any]:
    reply = complete(engine, stream=True, **body)
    assert reply.status == 200, reply.text
    events = reply.events()
    assert events.pop() == "[DONE]"
    return events


def _joined(events: list[Any]) -> list[dict[str, Any]]:
    found: dict[int, dict[str, Any]] = {}
    for part in (part for event in events for part in event["choices"]):
        whole = found.setdefault(part["index"], {**part, "text": "", "logprobs": None})
        assert not whole.get("ended"), "a chunk behind the last one"
        whole["text"] += part["text"]
        if (new := part["logprobs"]) is not None:
            old = whole["logprobs"] or {name: [] for name in new}
            whole["logprobs"] = {name: old[name] + new[name] for name in new}
        whole["ended"] = whole["finish_reason"] = part["finish_reason"]
    assert all(whole.pop("ended") for whole in found.values())
    return [found[index] for index in sorted(found)]


def _only(reply: Reply) -> Any:
    (choice,) = reply.json()["choices"]
    return choice


def test_a_whole_answer_has_all_that_openai_s_has() -> None:
    message = {"role": "assistant", "content": SAID, "refusal": None}
    new = len(_ids(SAID))
    for by, prefix, kind, content in (
        (complete, "cmpl-", "text_completion", {"text": SAID}),
        (chat, "chatcmpl-", "chat.completion", {"message": message}),
    ):
        engine = FakeEngine(reused=3)
        body = by(engine).json()
        assert (body["object"], body["model"]) == (kind, "demo")
        assert (body["system_fingerprint"], body["created"] > 0) == ("fp-avx2", True)
        assert body["id"].startswith(prefix)
        rest = {"index": 0, "logprobs": None, "finish_reason": "stop"}
        assert body["choices"] == [content | rest]
        read = len(engine.requests[0].prompt_ids)
        assert body["usage"] == {
            "prompt_tokens": read,
            "completion_tokens": new,
            "total_tokens": read + new,
            "prompt_tokens_details": {"cached_tokens": 3},
        }


@each_row("by", [complete, chat], ids=lambda by: by.__name__)
def test_a_stream_has_one_id_and_tells_counts_where_they_are_asked_for(by: Any) -> None:
    for usage in (True, False):
        reply = by(stream=True, stream_options={"include_usage": usage})
        assert reply.headers["content-type"].startswith("text/event-stream")
        *chunks, done = reply.events()
        assert done == "[DONE]"
        assert len({event["id"] for event in chunks}) == 1
        assert {event["system_fingerprint"] for event in chunks} == {"fp-avx2"}
        if usage:
            last = chunks.pop()
            counted = last["usage"]["completion_tokens"]
            assert (last["choices"], counted) == ([], len(_ids(SAID)))
        assert {event.get("usage", "none") for event in chunks} == {None if usage else "none"}


@each_row(
    "body",
    [
        {"logprobs": 3, "echo": True},
        {"logprobs": 2, "n": 2, "stop": "😀"},
        {"logprobs": 1, "echo": True, "max_tokens": 0, "n": 2},
        {"prompt": ["a", "b"], "n": 2},
        {"max_tokens": 2},
    ],
    ids=json.dumps,
)
def test_a_stream_says_the_same_as_a_whole_answer(body: dict[str, Any]) -> None:
    whole = complete(FakeEngine(says=_ids(MIXED)), **body).json()["choices"]
    assert _joined(_streamed(FakeEngine(says=_ids(MIXED)), **body)) == whole
    assert [choice["index"] for choice in whole] == [*range(len(whole))]
    assert {choice["finish_reason"] for choice in whole} == {
        "length" if "max_tokens" in body else "stop"
    }


def test_a_stop_token_is_no_part_of_the_text_and_counts() -> None:
    ids = _ids(SAID)[:3]
    body = complete(FakeEngine(says=ids), stop_token_ids=ids[2:]).json()
    assert body["choices"][0]["text"] == tokenizer().decode(ids[:2])
    assert body["usage"]["completion_tokens"] == 3


def test_text_offset_is_the_text_in_front_of_a_token_and_equal_streamed_or_not() -> None:
    ids = _ids(MIXED)
    begun = [tokenizer().decode(ids[:at]) for at in range(len(ids))]
    expected = [len(text.rstrip("\ufffd")) for text in begun]
    for stop in (None, " a dog", "cat"):
        body = {"logprobs": 1, "stop": stop}
        whole = _only(complete(FakeEngine(says=ids), **body))["logprobs"]
        (parts,) = _joined(_streamed(FakeEngine(says=ids), **body))
        assert whole["text_offset"] == parts["logprobs"]["text_offset"] == expected


@each_row(
    ("body", "sizes"),
    [
        # 302 is among the likeliest three, the other is not.
        ({"logprobs": 3}, [3, 4, 3]),
        # The first token of a prompt has none.
        ({"logprobs": 0, "echo": True, "prompt": [0, 300]}, [None, 1, 1, 1, 1]),
    ],
)
def test_a_token_s_logprob_is_the_same_float_as_its_entry_among_the_likeliest(
    body: dict[str, Any], sizes: list[int | None]
) -> None:
    found = _only(complete(FakeEngine(says=[302, 400, 302]), **body))["logprobs"]
    likeliest = found["top_logprobs"]
    assert [top and len(top) for top in likeliest] == sizes
    own = [top and top[token] for token, top in zip(found["tokens"], likeliest, strict=True)]
    assert own == found["token_logprobs"]


def test_two_tokens_that_are_no_text_are_two_keys_and_what_cannot_be_a_number() -> None:
    ids = _ids("é😀")
    likeliest = Logprob(ids[0], -math.inf, tuple((one, -float(one)) for one in ids))
    engine = FakeEngine(says=ids[:1], numbers=lambda _token, _count: likeliest)
    found = _only(complete(engine, logprobs=6))["logprobs"]
    names = [f"bytes:\\x{byte:02x}" for byte in "é😀".encode()]
    assert list(found["top_logprobs"][0]) == names
    assert (found["tokens"], found["token_logprobs"]) == (names[:1], [-9999.0])


def _embed(engine: FakeEngine | None = None, **body: Any) -> Reply:
    return call(serving(engine), "POST", "/v1/embeddings", {"input": [5, 6]} | body)


def test_each_input_has_a_vector_of_length_one() -> None:
    for given, count in ((["Hello", "a"], 2), ([5, 6], 1), ([[5], [6, 7], [8]], 3)):
        engine = FakeEngine()
        body = _embed(engine, input=given).json()
        assert [item["index"] for item in body["data"]] == list(range(count))
        for item, request in zip(body["data"], engine.requests, strict=True):
            assert (request.max_new_tokens, request.pooling) == (0, "last")
            state = [len(request.prompt_ids), 2.0, -2.0]
            expected = [value / math.hypot(*state) for value in state]
            assert item["embedding"] == pytest.approx(expected)
        tokens = sum(len(request.prompt_ids) for request in engine.requests)
        assert body["usage"] == {"prompt_tokens": tokens, "total_tokens": tokens}
    numbers = _embed().json()["data"][0]["embedding"]
    text = _embed(encoding_format="base64").json()["data"][0]["embedding"]
    assert list(struct.unpack("<3f", base64.b64decode(text))) == numbers
    engine = FakeEngine()
    _embed(engine, pooling="mean")
    assert engine.requests[0].pooling == "mean"


TEXT = "Hello é"
IDS = tokenizer().encode(TEXT)
CHAT = [{"role": "user", "content": TEXT}]


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
    # llama.cpp's has tokens or pieces and nothing else.
    assert _post("/tokenize", content=TEXT).json() == {"tokens": IDS[1:]}
    pieces = _post("/tokenize", content=TEXT, with_pieces=True).json()["tokens"]
    assert [piece["piece"] for piece in pieces[-2:]] == [[0xC3], [0xA9]]
    for add in (True, False):
        body = _post("/tokenize", messages=CHAT, add_generation_prompt=add).json()
        expected_ids = tokenizer().apply_chat_template(CHAT, add_generation_prompt=add)
        assert body["tokens"] == expected_ids
    assert _post("/detokenize", tokens=IDS).json() == {"prompt": TEXT, "content": TEXT}
    assert _post("/detokenize", tokens=[1024]).error()["param"] == "body.tokens"


@each_row(
    ("body", "param"),
    [
        ({}, "body"),
        ({"prompt": "a", "content": "a"}, "body"),
        # A field of another form is not passed over.
        ({"prompt": TEXT, "with_pieces": True}, "body.with_pieces"),
        ({"messages": CHAT, "add_special_tokens": True}, "body.add_special_tokens"),
    ],
)
def test_what_cannot_be_tokenized_is_400(body: dict[str, Any], param: str) -> None:
    reply = _post("/tokenize", **body)
    assert (reply.status, reply.error()["param"]) == (400, param)
    null = {name: None if value is True else value for name, value in body.items()}
    assert (_post("/tokenize", **null).status == 200) == (null != body)
