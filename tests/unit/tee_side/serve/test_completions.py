"""`/v1/completions`, as clients and test suites of OpenAI's API expect it."""

from __future__ import annotations

import asyncio
import json
import operator
import threading
from collections.abc import Coroutine
from dataclasses import asdict
from typing import Any

import pytest

from protocol.errors import PromptError
from tee_side.serve.app import create_app
from tee_side.serve.serving import GrammarKind
from tests.kit.serve import (
    SAID,
    FakeEngine,
    FakeGrammar,
    Reply,
    ask,
    call,
    complete,
    connection,
    model,
    serving,
    tokenizer,
)

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


def _joined(events: list[Any]) -> dict[int, dict[str, Any]]:
    """Put a stream's choices together, as they stand in a whole answer."""
    found: dict[int, dict[str, Any]] = {}
    for event in events:
        for part in event["choices"]:
            whole = found.setdefault(
                part["index"],
                {"index": part["index"], "text": "", "logprobs": None, "finish_reason": None},
            )
            whole["text"] += part["text"]
            if part["logprobs"] is not None:
                lists = whole["logprobs"] or {name: [] for name in part["logprobs"]}
                whole["logprobs"] = {k: lists[k] + v for k, v in part["logprobs"].items()}
            assert whole["finish_reason"] is None, "a chunk behind the last one"
            whole["finish_reason"] = part["finish_reason"]
    return found


def test_an_answer_has_all_that_openai_s_has() -> None:
    body = complete(FakeEngine(reused=3)).json()
    assert body.keys() >= {"id", "object", "created", "model", "choices", "usage"}
    assert (body["object"], body["model"]) == ("text_completion", "demo")
    assert body["system_fingerprint"] == "fp-avx2"
    choice = {"index": 0, "text": SAID, "logprobs": None, "finish_reason": "stop"}
    assert body["choices"] == [choice]
    prompt, completion = len(tokenizer().encode("Hello")), len(_ids(SAID))
    assert body["usage"] == {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": 3},
    }


def test_settings_reach_the_engine_by_their_names() -> None:
    engine = FakeEngine()
    settings = {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 7,
        "min_p": 0.1,
        "seed": 11,
        "frequency_penalty": 0.25,
        "presence_penalty": -0.25,
        "repetition_penalty": 1.5,
    }
    body = {"logit_bias": {"5": -100}, "n": 2, "stop": "x", "max_tokens": 9, "cache_salt": "s"}
    assert complete(engine, **settings, **body).status == 200
    request = engine.requests[0]
    assert {name: getattr(request.sampling, name) for name in settings} == settings
    assert request.sampling.logit_bias == {5: -100}
    assert (request.samples, request.stop, request.max_new_tokens) == (2, ("x",), 9)
    assert (request.stop_ids, request.logprobs, request.salt) == (None, None, "s")


def test_left_out_and_null_settings_are_openai_s_defaults() -> None:
    engine = FakeEngine()
    null = dict.fromkeys(("temperature", "top_p", "n", "max_tokens", "stop", "logit_bias", "seed"))
    complete(engine)
    complete(engine, **null, stream=None, stream_options=None, echo=None, logprobs=None)
    first, second = engine.requests
    assert asdict(first) == asdict(second)
    assert (first.sampling.temperature, first.sampling.top_p, first.sampling.seed) == (1, 1, None)
    assert (first.max_new_tokens, first.samples, first.sampling.top_k) == (16, 1, 0)


def test_top_k_of_minus_one_is_off() -> None:
    engine = FakeEngine()
    complete(engine, top_k=-1)
    assert engine.requests[0].sampling.top_k == 0


def test_stop_token_ids_are_added_to_the_model_s_own_unless_eos_is_ignored() -> None:
    engine, ends = FakeEngine(), model().config.eos_token_ids
    complete(engine, stop_token_ids=[9])
    complete(engine, stop_token_ids=[9], ignore_eos=True)
    complete(engine, ignore_eos=True)
    found = [request.stop_ids for request in engine.requests]
    assert found == [ends | {9}, {9}, frozenset()]


def test_a_stop_token_is_no_part_of_the_text() -> None:
    ids = _ids(SAID)
    body = complete(FakeEngine(says=ids[:3]), stop_token_ids=[ids[2]]).json()
    assert body["choices"][0]["text"] == tokenizer().decode(ids[:2])
    assert body["usage"]["completion_tokens"] == 3


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("Hello", [tuple(tokenizer().encode("Hello"))]),
        (["Hello", "a"], [tuple(tokenizer().encode("Hello")), tuple(tokenizer().encode("a"))]),
        ([5, 6, 7], [(5, 6, 7)]),
        ([[5, 6], [7]], [(5, 6), (7,)]),
    ],
)
def test_a_prompt_is_a_text_or_ids_or_several_of_either(prompt: Any, expected: Any) -> None:
    engine = FakeEngine()
    body = complete(engine, prompt=prompt).json()
    assert [request.prompt_ids for request in engine.requests] == expected
    assert [choice["index"] for choice in body["choices"]] == list(range(len(expected)))


@pytest.mark.parametrize("streamed", [False, True])
def test_choices_of_several_prompts_are_numbered_prompt_by_prompt(streamed: bool) -> None:
    said = _ids(SAID)

    class Numbered(FakeEngine):
        """Each sample says which it is, of which prompt."""

        def _token(self, request: Any, sample: int, ids: Any, at: int) -> Any:
            return super()._token(request, sample, [said[2 * request.prompt_ids[0] + sample]], 0)

    engine = Numbered(says=said[:1])
    body = {"prompt": [[0], [1], [2]], "n": 2}
    if streamed:
        choices = _joined(_streamed(engine, **body))
    else:
        choices = {c["index"]: c for c in complete(engine, **body).json()["choices"]}
    expected = {at: tokenizer().decode([said[at]]) for at in range(6)}
    assert {index: choice["text"] for index, choice in choices.items()} == expected


@pytest.mark.parametrize("prompt", [[], [[]], [[5], []], [1024], [[5], [9, 1024]], [-1], "\ud800"])
def test_an_empty_list_and_an_id_beyond_the_vocabulary_are_400(prompt: Any) -> None:
    engine = FakeEngine()
    reply = complete(engine, prompt=prompt)
    assert reply.status == 400
    assert reply.error()["param"].startswith("body.prompt")
    assert not engine.requests


def test_an_empty_text_is_its_bos_token_alone_and_400_without_one() -> None:
    engine = FakeEngine()
    assert complete(engine, prompt="").status == 200
    assert engine.requests[0].prompt_ids == tuple(tokenizer().encode(""))
    assert complete(engine, prompt="", add_special_tokens=False).status == 400


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_beyond_the_context_is_400_before_any_byte_of_a_stream(stream: bool) -> None:
    engine, context = FakeEngine(), model().max_model_len
    reply = complete(engine, prompt=[5] * context, stream=stream)
    error = reply.error()
    assert (reply.status, error["type"]) == (400, "exceed_context_size_error")
    assert (error["n_prompt_tokens"], error["n_ctx"]) == (context, context)
    assert (error["code"], error["param"]) == ("context_length_exceeded", "body.prompt")
    assert not engine.requests


def test_more_tokens_than_have_room_are_as_many_as_have() -> None:
    engine, context = FakeEngine(), model().max_model_len
    complete(engine, prompt=[5] * (context - 3), max_tokens=100)
    assert engine.requests[0].max_new_tokens == 3


def test_no_tokens_are_allowed_with_echo_alone() -> None:
    engine, context = FakeEngine(), model().max_model_len
    refused = complete(engine, max_tokens=0)
    assert (refused.status, refused.error()["param"]) == (400, "body.max_tokens")
    body = complete(engine, max_tokens=0, echo=True, prompt=[5] * context).json()
    assert body["choices"][0]["text"] == tokenizer().decode([5] * context)
    assert body["choices"][0]["finish_reason"] == "length"
    assert body["choices"][0]["logprobs"] is None
    assert body["usage"]["completion_tokens"] == 0
    # An engine runs nothing that neither makes tokens nor reads them.
    assert engine.requests[-1].prompt_logprobs == 0


def test_one_id_for_all_chunks_and_one_finish_reason_per_index() -> None:
    events = _streamed(n=3)
    assert len({event["id"] for event in events}) == 1
    assert {event["system_fingerprint"] for event in events} == {"fp-avx2"}
    reasons = [
        (choice["index"], choice["finish_reason"])
        for event in events
        for choice in event["choices"]
        if choice["finish_reason"]
    ]
    assert sorted(reasons) == [(0, "stop"), (1, "stop"), (2, "stop")]
    assert all("usage" not in event for event in events)


def test_include_usage_ends_with_a_chunk_of_empty_choices() -> None:
    *chunks, last = _streamed(stream_options={"include_usage": True})
    assert all(event["usage"] is None for event in chunks)
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == len(chunks) == len(_ids(SAID))


def test_stream_options_without_stream_are_400() -> None:
    reply = complete(stream_options={"include_usage": True})
    assert (reply.status, reply.error()["param"]) == (400, "body.stream_options")


@pytest.mark.parametrize("at_once", [False, True])
def test_a_token_is_one_chunk_however_many_go_out_together(at_once: bool) -> None:
    reply = complete(FakeEngine(at_once=at_once), stream=True)
    *chunks, _done = reply.events()
    assert len(chunks) == len(_ids(SAID))
    assert len(reply.writes) == (2 if at_once else len(chunks) + 1)


@pytest.mark.parametrize("stop", ["on the mat", ["nowhere", "on the mat"], [" sat on the m"]])
def test_a_stop_string_is_excluded_and_held_back_across_chunks(stop: Any) -> None:
    first = stop if isinstance(stop, str) else stop[-1]
    expected = SAID[: SAID.index(first)]
    seen = ""
    for event in _streamed(stop=stop):
        seen += event["choices"][0]["text"]
        assert expected.startswith(seen)
    assert seen == expected
    assert complete(stop=stop).json()["choices"][0]["text"] == expected


def test_what_only_looked_like_a_stop_string_is_shown() -> None:
    assert _joined(_streamed(stop="bird..."))[0]["text"] == SAID


CASES: list[dict[str, Any]] = [
    {"logprobs": 0},
    {"logprobs": 3},
    {"logprobs": 3, "echo": True},
    {"logprobs": 1, "echo": True, "prompt": [5, 300, 301]},
    {"logprobs": 2, "n": 2, "stop": "😀"},
    {"logprobs": 2, "stop": " a dog"},
    {"logprobs": 1, "echo": True, "max_tokens": 0, "n": 2},
    {"echo": True, "prompt": ["a", "b"]},
]


@pytest.mark.parametrize("body", CASES, ids=json.dumps)
def test_a_stream_says_the_same_as_a_whole_answer(body: dict[str, Any]) -> None:
    whole = complete(FakeEngine(says=_ids(MIXED)), **body).json()["choices"]
    parts = _joined(_streamed(FakeEngine(says=_ids(MIXED)), **body))
    assert [parts[at] for at in range(len(whole))] == whole


def test_text_offset_is_the_text_in_front_of_a_token_and_equal_streamed_or_not() -> None:
    ids = _ids(MIXED)
    for stop in (None, " a dog", "cat"):
        body = {"logprobs": 1, "stop": stop}
        whole = complete(FakeEngine(says=ids), **body).json()["choices"][0]["logprobs"]
        parts = _joined(_streamed(FakeEngine(says=ids), **body))[0]["logprobs"]
        begun = [tokenizer().decode(ids[:at]) for at in range(len(ids))]
        expected = [len(text.rstrip("\ufffd")) for text in begun]
        assert whole["text_offset"] == parts["text_offset"] == expected


def test_text_offset_behind_an_echo_begins_at_its_end() -> None:
    prompt = "<|user|>Hello"
    choice = complete(prompt=prompt, echo=True, logprobs=1).json()["choices"][0]
    assert choice["text"] == prompt + SAID
    new = len(_ids(SAID))
    assert choice["logprobs"]["text_offset"][-new] == len(prompt)


def test_logprobs_0_is_one_entry_the_token_itself() -> None:
    logprobs = complete(logprobs=0).json()["choices"][0]["logprobs"]
    rows = zip(
        logprobs["tokens"], logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True
    )
    for token, number, top in rows:
        assert top == {token: number}


def test_a_token_s_logprob_is_the_same_float_as_its_entry_in_top_logprobs() -> None:
    # 302 is among the likeliest three, the others are not.
    logprobs = complete(FakeEngine(says=[302, 400, 302]), logprobs=3).json()["choices"][0][
        "logprobs"
    ]
    assert [len(top) for top in logprobs["top_logprobs"]] == [3, 4, 3]
    rows = zip(
        logprobs["tokens"], logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True
    )
    for token, number, top in rows:
        assert top[token] == number


def test_logprobs_21_is_400_and_the_server_lives_on() -> None:
    app = serving()
    refused = call(app, "POST", "/v1/completions", {"prompt": "a", "logprobs": 21})
    assert (refused.status, refused.error()["param"]) == (400, "body.logprobs")
    assert call(app, "POST", "/v1/completions", {"prompt": "a", "logprobs": 20}).status == 200


@pytest.mark.parametrize("prompt", ["Hello", [0, 300, 301]])
def test_echo_gives_null_for_the_first_token_s_logprob(prompt: Any) -> None:
    ids = tokenizer().encode(prompt) if isinstance(prompt, str) else prompt
    logprobs = complete(prompt=prompt, echo=True, logprobs=2).json()["choices"][0]["logprobs"]
    assert logprobs["token_logprobs"][0] is logprobs["top_logprobs"][0] is None
    assert None not in logprobs["token_logprobs"][1:]
    assert len(logprobs["tokens"]) == len(ids) + len(_ids(SAID))


def test_two_invalid_tokens_are_two_keys() -> None:
    ids = _ids("é😀")
    assert {tokenizer().decode([one]) for one in ids} == {"\ufffd"}

    class Engine(FakeEngine):
        def _token(self, request: Any, sample: int, says: Any, at: int) -> Any:
            token = super()._token(request, sample, says, at)
            top = tuple((one, -1.0 - place) for place, one in enumerate(ids))
            number = type(token.logprob)(ids[0], -1.0, top)
            return type(token)(sample, ids[0], number, token.finish_reason)

    logprobs = complete(Engine(says=ids[:1]), logprobs=6).json()["choices"][0]["logprobs"]
    expected = [f"bytes:\\x{byte:02x}" for byte in "é😀".encode()]
    assert list(logprobs["top_logprobs"][0]) == expected
    assert logprobs["tokens"] == expected[:1]


def test_what_cannot_be_is_a_number_in_json() -> None:
    class Engine(FakeEngine):
        def _token(self, request: Any, sample: int, says: Any, at: int) -> Any:
            token = super()._token(request, sample, says, at)
            number = type(token.logprob)(token.token_id, float("-inf"), ())
            return type(token)(sample, token.token_id, number, token.finish_reason)

    logprobs = complete(Engine(), logprobs=0).json()["choices"][0]["logprobs"]
    assert set(logprobs["token_logprobs"]) == {-9999.0}


GRAMMARS: list[tuple[dict[str, Any], str, Any]] = [
    ({"guided_json": {"type": "object"}}, "json_schema", {"type": "object"}),
    ({"guided_json": "{}"}, "json_schema", "{}"),
    ({"guided_regex": "a+"}, "regex", "a+"),
    ({"guided_grammar": "root ::= x"}, "grammar", "root ::= x"),
    ({"guided_choice": ["a", "b"]}, "choice", ["a", "b"]),
    ({"structured_outputs": {"regex": "a+"}}, "regex", "a+"),
    ({"structured_outputs": {"json": {"a": 1}}}, "json_schema", {"a": 1}),
    ({"structured_outputs": {"json_object": True}}, "json_object", {}),
    ({"structured_outputs": {"choice": ["a"]}}, "choice", ["a"]),
    ({"structured_outputs": {"grammar": "x"}}, "grammar", "x"),
    ({"response_format": {"type": "json_object"}}, "json_object", {}),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {}}}},
        "json_schema",
        {},
    ),
]


@pytest.mark.parametrize(("body", "kind", "content"), GRAMMARS)
def test_a_grammar_is_compiled_from_either_vendor_s_field(
    body: dict[str, Any], kind: str, content: Any
) -> None:
    engine = FakeEngine()
    assert complete(engine, **body).status == 200
    grammar: Any = engine.requests[0].grammar
    assert (grammar.kind, grammar.content) == (kind, content)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"guided_regex": "("}, "body.guided_regex"),
        ({"structured_outputs": {"regex": "("}}, "body.structured_outputs.regex"),
        ({"guided_regex": "a", "guided_choice": ["b"]}, "body"),
        ({"response_format": {"type": "json_object"}, "guided_regex": "a"}, "body"),
        ({"response_format": {"type": "json_schema"}}, "body.response_format.json_schema"),
        (
            {"response_format": {"type": "json_object", "json_schema": {"schema": {}}}},
            "body.response_format.json_schema",
        ),
        ({"response_format": {"type": "xml"}}, "body.response_format.type"),
    ],
)
def test_a_bad_grammar_is_400(body: dict[str, Any], param: str) -> None:
    reply = complete(**body)
    assert (reply.status, reply.error()["param"]) == (400, param)


def test_costly_grammars_of_one_key_hold_up_nobody_else() -> None:
    begun: list[Any] = []
    release = threading.Event()

    def compile_slowly(kind: GrammarKind, content: Any, _owner: str) -> FakeGrammar:
        if content == "costly":
            begun.append(content)
            release.wait()
        return FakeGrammar(kind, content)

    async def run() -> None:
        who = operator.itemgetter("authorization")
        app = create_app(
            serving(compile_grammar=compile_slowly, authorise=lambda request: who(request.headers))
        )

        def asked(owner: str, **body: Any) -> Coroutine[Any, Any, Reply]:
            return ask(
                app, "POST", "/v1/completions", {"prompt": "a"} | body, {"authorization": owner}
            )

        costly = [asyncio.create_task(asked("alice", guided_regex="costly")) for _ in range(64)]
        try:
            async with asyncio.timeout(30):
                other = await asked("bob", guided_regex="quick")
                plain = await asked("alice")
                too_many = await asked("alice", guided_regex="quick")
                while len(begun) < 2:  # a thread may have taken it, and not begun
                    await asyncio.sleep(0.01)
            assert (other.status, plain.status, len(begun)) == (200, 200, 2)
            assert (too_many.status, too_many.error()["code"]) == (503, "overloaded")
            assert too_many.headers["retry-after"] == "1"
        finally:
            release.set()
        assert {(await one).status for one in costly} == {200}
        assert len(begun) == len(costly)

    asyncio.run(run())


def test_a_grammar_of_a_client_that_has_left_is_not_compiled() -> None:
    compiled: list[Any] = []
    release = threading.Event()

    def compile_slowly(kind: GrammarKind, content: Any, _owner: str) -> FakeGrammar:
        compiled.append(content)
        release.wait()
        return FakeGrammar(kind, content)

    async def run() -> None:
        app = create_app(serving(compile_grammar=compile_slowly))
        body = {"prompt": "a", "guided_regex": "costly"}
        first = [asyncio.create_task(ask(app, "POST", "/v1/completions", body)) for _ in range(2)]
        left = connection("POST", "/v1/completions", body | {"guided_regex": "left"})
        leaving = asyncio.create_task(app(left.scope, left.receive, left.send))
        await asyncio.sleep(0)
        left.leave()
        release.set()
        assert {(await one).status for one in first} == {200}
        await leaving
        assert (await ask(app, "POST", "/v1/completions", body)).status == 200
        assert compiled == ["costly"] * 3

    asyncio.run(run())


def test_what_is_compiled_when_the_server_ends_is_told_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    release, begun = threading.Event(), threading.Event()

    def compile_slowly(kind: GrammarKind, content: Any, _owner: str) -> FakeGrammar:
        begun.set()
        release.wait()
        return FakeGrammar(kind, content)

    async def run() -> None:
        app = create_app(serving(compile_grammar=compile_slowly))
        made = connection("POST", "/v1/completions", {"prompt": "a", "guided_regex": "a"})
        task = asyncio.create_task(app(made.scope, made.receive, made.send))
        await asyncio.to_thread(begun.wait)
        task.cancel()
        await task
        release.set()
        assert (made.reply.status, made.reply.error()["code"]) == (503, "failed")

    asyncio.run(run())
    assert not caplog.records


def test_plain_text_is_no_grammar() -> None:
    engine = FakeEngine()
    complete(engine, response_format={"type": "text"})
    assert engine.requests[0].grammar is None


def test_a_prompt_that_the_engine_refuses_is_400() -> None:
    refuse = PromptError("prompt", got="no tokens", expected="at least one")
    reply = complete(FakeEngine(refuse=refuse), stream=True)
    assert (reply.status, reply.error()["code"]) == (400, "invalid_prompt")


@pytest.mark.parametrize("key", ["1024", "-1", "a", "1" * 5000, "²"])
def test_a_logit_bias_is_for_tokens_that_there_are(key: str) -> None:
    reply = complete(logit_bias={key: 1})
    assert (reply.status, reply.error()["param"]) == (400, "body.logit_bias")
