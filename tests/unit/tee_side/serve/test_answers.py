"""Answers as clients of the APIs expect them: whole, streamed, as vectors or tokens, signed."""

import base64
import hashlib
import json
import math
import struct
from dataclasses import replace
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from tee_side.attest.statement import Receipt, verify_receipt
from tee_side.chat.template import Conversation
from tee_side.engine.request import Logprob
from tee_side.engine.tokenizer import Tokenizer
from tee_side.serve.exchange import Serving
from tee_side.serve.identity import ReceiptChain
from tests.kit.rows import each_row
from tests.kit.sentencepiece import write_sentencepiece
from tests.kit.serve import (
    GONE,
    SAID,
    FakeEngine,
    FakeWatch,
    Reply,
    call,
    chat,
    complete,
    embed,
    logprob,
    model,
    serving,
    template,
    tokenizer,
)

# Characters of several tokens, so that no token of them is text by itself.
MIXED = "é 😀 a cat"


def _ids(text: str) -> list[int]:
    return tokenizer().encode(text)[1:]


def _joined(reply: Reply) -> list[dict[str, Any]]:
    *events, done = reply.events()
    assert done == "[DONE]"
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
            "completion_tokens_details": {"reasoning_tokens": 0},
        }


@each_row("by", [complete, chat], ids=lambda by: by.__name__)
def test_a_stream_has_one_id_and_tells_counts_where_they_are_asked_for(by: Any) -> None:
    for usage in (True, False):
        reply = by(stream=True, stream_options={"include_usage": usage})
        assert reply.headers["content-type"].startswith("text/event-stream")
        *chunks, done = reply.events()
        assert done == "[DONE]"
        assert len({event["id"] for event in chunks}) == 1
        if by is chat:
            assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
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
    assert _joined(complete(FakeEngine(says=_ids(MIXED)), stream=True, **body)) == whole
    assert [choice["index"] for choice in whole] == [*range(len(whole))]
    assert {choice["finish_reason"] for choice in whole} == {
        "length" if "max_tokens" in body else "stop"
    }


def test_ids_are_told_where_they_are_asked_for() -> None:
    ids, prompt = _ids(SAID), [5, 6, 7]
    asked = {"prompt": prompt, "return_token_ids": True, "return_tokens_as_token_ids": True}
    (choice,) = complete(**asked, logprobs=1).json()["choices"]
    assert (choice["token_ids"], choice["prompt_token_ids"]) == (ids, prompt)
    assert choice["logprobs"]["tokens"] == [f"token_id:{one}" for one in ids]
    assert "token_id:300" in choice["logprobs"]["top_logprobs"][0]
    first, *chunks = complete(**asked, stream=True).events()[:-1]
    assert first["choices"][0]["prompt_token_ids"] == prompt
    assert [one for event in chunks for one in event["choices"][0]["token_ids"]] == ids
    whole = chat(**asked | {"prompt": None}, logprobs=True).json()
    (choice,) = whole["choices"]
    # A chat has one prompt; vLLM tells of it beside the choices.
    first, *_ = chat(**asked | {"prompt": None}, n=2, stream=True).events()
    assert len(whole["prompt_token_ids"]) == whole["usage"]["prompt_tokens"]
    assert first["prompt_token_ids"] == whole["prompt_token_ids"]
    assert not {"prompt_token_ids"} & (choice.keys() | first["choices"][0].keys())
    names = [one["token"] for one in choice["logprobs"]["content"]]
    assert (choice["token_ids"], names) == (ids, [f"token_id:{one}" for one in ids])


def test_what_is_told_of_a_prompt_is_as_vllm_tells_it() -> None:
    """The token itself is the first of each, with its rank where it is among the likeliest."""
    (choice,) = complete(prompt=[5, 6, 301], prompt_logprobs=2, logprobs=1).json()["choices"]
    nothing, unlikely, likely = choice["prompt_logprobs"]
    assert (nothing, list(unlikely), list(likely)) == (None, ["6", "300", "301"], ["301", "300"])
    assert [one["rank"] for one in unlikely.values()] == [None, 1, 2]
    assert [one["rank"] for one in likely.values()] == [2, 1]
    assert unlikely["6"]["logprob"] == logprob(6, 2).logprob
    assert likely["301"]["decoded_token"] == model().names(301)[0].strip('"')
    assert len(choice["logprobs"]["top_logprobs"][0]) <= 2


@each_row(
    ("body", "text"),
    [
        ({"stop": "mat"}, SAID.partition("mat")[0]),
        ({"stop": "mat", "include_stop_str_in_output": True}, SAID.partition(",")[0]),
        ({"skip_special_tokens": False}, f"<|begin_of_text|>{SAID}"),
        ({}, SAID),
    ],
)
def test_what_of_a_text_is_shown_is_as_asked(body: dict[str, Any], text: str) -> None:
    """A stop string, and the names of special tokens."""
    whole = tokenizer().encode(SAID)
    for by, path in ((complete, ["text"]), (chat, ["message", "content"])):
        engine = FakeEngine(says=whole)
        found = by(engine, max_tokens=99, **body).json()["choices"][0]
        assert reduce(getitem, path, found) == text


def test_counts_so_far_are_in_every_chunk() -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    *chunks, last = chat(stream=True, stream_options=options).events()[:-1]
    told = [event["usage"]["completion_tokens"] for event in chunks]
    # The one that opens a choice comes with its first token.
    assert told == [1, *range(1, len(_ids(SAID)) + 1)]
    assert last["usage"] == chunks[-1]["usage"]


def test_an_event_s_size_tells_little_of_its_text() -> None:
    """Filled up to multiples of 64 bytes by letters that repeat nowhere, unless it is refused."""
    for asked, fills in (({}, True), ({"include_obfuscation": False}, False)):
        reply = chat(stream=True, stream_options=asked)
        events = [text for text in reply.text.split("\n\n")[:-2] if text]
        assert all("obfuscation" in one for one in events) == fills
        sizes = {len(one) % 64 for one in events}
        assert (len(sizes) == 1) == fills


def test_a_continuation_keeps_the_space_of_its_first_word(tmp_path: Path) -> None:
    """Whole, streamed and echoed, of a tokenizer that drops the space in front of a text."""
    write_sentencepiece(tmp_path)
    other = model(tokenizer=Tokenizer(tmp_path))
    word, more = other.tokenizer.encode("the a")[0], other.tokenizer.encode("the a")[1:]
    for echo, said in ((False, " a"), (True, "the a")):
        for stream in (False, True):
            offered = serving(FakeEngine(says=more), model=other)
            body = {"prompt": [word], "echo": echo, "stream": stream}
            reply = call(offered, "POST", "/v1/completions", body)
            found = _joined(reply) if stream else reply.json()["choices"]
            assert [choice["text"] for choice in found] == [said]


def test_what_is_echoed_is_what_was_read() -> None:
    body = {"prompt": SAID, "echo": True, "truncate_prompt_tokens": 2, "max_tokens": 0}
    (choice,) = complete(**body).json()["choices"]
    assert choice["text"] == tokenizer().decode(_ids(SAID)[-2:])


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
        whole = complete(FakeEngine(says=ids), **body).json()["choices"][0]["logprobs"]
        (parts,) = _joined(complete(FakeEngine(says=ids), stream=True, **body))
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
    found = complete(FakeEngine(says=[302, 400, 302]), **body).json()["choices"][0]["logprobs"]
    likeliest = found["top_logprobs"]
    assert [top and len(top) for top in likeliest] == sizes
    own = [top and top[token] for token, top in zip(found["tokens"], likeliest, strict=True)]
    assert own == found["token_logprobs"]


def test_a_logprob_in_a_chat_has_bytes_and_the_likeliest_that_are_asked_for() -> None:
    names = [tokenizer().decode([one]) for one in (302, 300, 301)]
    numbers = [logprob(one, 2).logprob for one in (302, 300, 301)]
    own, *likeliest = (
        {"token": name, "logprob": number, "bytes": [*name.encode()]}
        for name, number in zip(names, numbers, strict=True)
    )
    for asked, top in (({"top_logprobs": 2}, likeliest), ({}, [])):
        (choice,) = chat(FakeEngine(says=[302]), logprobs=True, **asked).json()["choices"]
        assert choice["logprobs"]["content"] == [own | {"top_logprobs": top}]


def test_two_tokens_that_are_no_text_are_two_keys_and_what_cannot_be_a_number() -> None:
    ids = _ids("é😀")
    likeliest = Logprob(ids[0], -math.inf, tuple((one, -float(one)) for one in ids))
    engine = FakeEngine(says=ids[:1], numbers=lambda _token, _count: likeliest)
    found = complete(engine, logprobs=6).json()["choices"][0]["logprobs"]
    names = [f"bytes:\\x{byte:02x}" for byte in "é😀".encode()]
    assert list(found["top_logprobs"][0]) == names
    assert (found["tokens"], found["token_logprobs"]) == (names[:1], [-9999.0])


def test_a_token_is_named_by_its_text_or_else_its_bytes_or_else_its_number() -> None:
    assert model().names(_ids("a")[0]) == ('"a"', "[97]")
    assert model().names(_ids("é")[0]) == (r'"bytes:\\xc3"', "[195]")
    assert model().names(9999) == ('"token_id:9999"', "null")


def test_each_input_has_a_vector_of_length_one() -> None:
    for given, count in ((["Hello", "a"], 2), ([5, 6], 1), ([[5], [6, 7], [8]], 3)):
        engine = FakeEngine()
        body = embed(engine, input=given).json()
        assert [item["index"] for item in body["data"]] == list(range(count))
        for item, request in zip(body["data"], engine.requests, strict=True):
            assert (request.max_new_tokens, request.pooling) == (0, "last")
            state = [len(request.prompt_ids), 2.0, -2.0]
            expected = [value / math.hypot(*state) for value in state]
            assert item["embedding"] == pytest.approx(expected)
        tokens = sum(len(request.prompt_ids) for request in engine.requests)
        assert body["usage"] == {"prompt_tokens": tokens, "total_tokens": tokens}
    numbers = embed().json()["data"][0]["embedding"]
    text = embed(encoding_format="base64").json()["data"][0]["embedding"]
    assert list(struct.unpack("<3f", base64.b64decode(text))) == numbers
    engine = FakeEngine()
    embed(engine, pooling="mean")
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
        expected_ids = template().encode(Conversation(messages=CHAT, add_generation_prompt=add))
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


KEY = Ed25519PrivateKey.from_private_bytes(bytes(range(32)))
PUBLIC = KEY.public_key().public_bytes_raw()
MODEL, POLICY, NOW = b"m" * 32, b"p" * 32, 1_764_000_000
COMPLETIONS, CHATS, EMBEDDINGS = "/v1/completions", "/v1/chat/completions", "/v1/embeddings"
DONE = b"data: [DONE]\n\n"
LINE = b": tsqp-receipt "

# Every form of an answer; each is asked for whole and, but for embeddings, as a stream.
ASKED: list[tuple[str, dict[str, Any]]] = [
    (COMPLETIONS, {"prompt": ["Hello", "a cat", "b"], "n": 2, "logprobs": 1}),
    (COMPLETIONS, {"prompt": "Hello", "stream_options": {"include_usage": True}}),
    (CHATS, {"messages": CHAT, "n": 2, "logprobs": True, "stop": "cat"}),
    (EMBEDDINGS, {"input": ["Hello", "a cat"], "encoding_format": "base64"}),
]
FORMS = [(path, body, False) for path, body in ASKED if "stream_options" not in body]
FORMS += [(path, body, True) for path, body in ASKED if path != EMBEDDINGS]


def signing(engine: FakeEngine | None = None, **changes: Any) -> Serving:
    chain = ReceiptChain(KEY, MODEL, POLICY, lambda: NOW)
    return serving(engine, **({"receipts": chain} | changes))


def split(reply: Reply) -> tuple[bytes, bytes]:
    """Return the bytes of an answer up to its receipt, and the receipt."""
    content = b"".join(reply.writes)
    if "tsqp-receipt" in reply.headers:
        return content, base64.b64decode(reply.headers["tsqp-receipt"], validate=True)
    # It begins a line: an answer may have its words within one.
    before, _, after = content.partition(b"\n\n" + LINE)
    text, end, rest = after.partition(b"\n\n")
    assert (end, rest) in ((b"\n\n", DONE), (b"\n\n", b""))
    return before + b"\n\n", base64.b64decode(text, validate=True)


def receipt_of(reply: Reply) -> Receipt:
    return verify_receipt(split(reply)[1], PUBLIC)


def sha256(content: bytes) -> bytes:
    return hashlib.sha256(content).digest()


@each_row(("path", "body", "stream"), FORMS)
def test_a_receipt_is_of_the_bytes_that_were_sent_and_received(
    path: str, body: dict[str, Any], stream: bool
) -> None:
    # With blanks that another writer of JSON would not have.
    content = json.dumps(body | {"stream": stream} if path != EMBEDDINGS else body, indent=3)
    sent, kind = f"\n {content} \n".encode(), {"content-type": "application/json"}
    watch = FakeWatch()
    plain, reply = (
        call(make(watch=watch), "POST", path, sent, kind, chunk=7) for make in (serving, signing)
    )
    answer, signed = split(reply)
    found = verify_receipt(signed, PUBLIC)
    assert (found.request, found.response) == (sha256(sent), sha256(answer))
    assert (found.model, found.policy, found.time) == (MODEL, POLICY, NOW)
    assert (found.sequence, found.previous) == (0, bytes(32))
    assert watch.receipts == [None, sha256(signed)]
    assert ("tsqp-receipt" in reply.headers) is not stream
    # Where the server signs none there is none.
    assert "tsqp-receipt" not in str(plain.headers) + plain.text
    if stream:
        *_, comment, done, end = reply.text.split("\n\n")
        assert (comment[: len(LINE)].encode(), done, end) == (LINE, "data: [DONE]", "")
    else:
        assert reply.headers["content-length"] == str(len(answer))


def test_counts_and_sampling_are_told_as_the_answer_has_them() -> None:
    body = {"prompt": [[5, 6], [7]], "n": 2, "max_tokens": 3}
    for served, counts in ((signing(), (3, 12)), (signing(round_usage=10), (10, 20))):
        reply = call(served, "POST", COMPLETIONS, body)
        usage, found = reply.json()["usage"], receipt_of(reply)
        assert (found.prompt_tokens, found.completion_tokens) == counts
        assert (usage["prompt_tokens"], usage["completion_tokens"]) == counts
    body = {"prompt": [5], "top_k": -1, "top_p": 0.5, "n": 2, "seed": 9, "max_tokens": 10**6}
    found = receipt_of(call(signing(), "POST", COMPLETIONS, body | {"logit_bias": {"7": 1}}))
    unused = {"min_p": 0.0, "frequency_penalty": 0.0, "presence_penalty": 0.0}
    used = {"temperature": 1.0, "top_k": 0, "top_p": 0.5, "repetition_penalty": 1.0}
    assert found.sampling == unused | used | {"n": 2, "max_tokens": 511, "logit_bias": 1}
    assert found.seed == 9
    assert receipt_of(call(signing(), "POST", EMBEDDINGS, {"input": "a"})).sampling == {}


def test_a_stream_that_breaks_off_with_an_error_has_one_for_what_it_says() -> None:
    watch = FakeWatch()
    served = signing(FakeEngine(error=GONE, fail_after=2), watch=watch)
    reply = call(served, "POST", COMPLETIONS, {"prompt": [5, 6], "stream": True})
    answer, signed = split(reply)
    found = verify_receipt(signed, PUBLIC)
    assert b'data: {"error"' in answer.split(b"\n\n")[-2]
    assert (found.response, found.completion_tokens) == (sha256(answer), 2)
    assert watch.receipts == [sha256(signed)]


@each_row("stream", [False, True])
def test_what_is_refused_or_asks_nothing_of_the_model_has_none_and_leaves_no_gap(
    stream: bool,
) -> None:
    served = signing(FakeEngine(error=GONE))
    reply = call(served, "POST", COMPLETIONS, {"prompt": [5], "stream": stream})
    assert reply.status == 503
    assert "tsqp-receipt" not in str(reply.headers) + reply.text
    mended = replace(served, engine=FakeEngine())
    assert receipt_of(call(mended, "POST", COMPLETIONS, {"prompt": [5]})).sequence == 0
    assert "tsqp-receipt" not in call(signing(), "POST", "/tokenize", {"prompt": "a"}).headers


def test_a_model_that_writes_a_receipt_writes_text() -> None:
    """Neither a prompt nor a token can end a line of the stream."""
    said = f"\n\n{LINE.decode()}QUJD\n\ndata: [DONE]\n\n"
    engine = FakeEngine(says=tokenizer().encode(said)[1:])
    body = {"prompt": said, "echo": True, "stream": True}
    answer, signed = split(call(signing(engine), "POST", COMPLETIONS, body))
    assert verify_receipt(signed, PUBLIC).response == sha256(answer)
    assert answer.count(b"\n") == 2 * answer.count(b"data: {")
