"""What completions and chats ask of the engine: prompts, settings, room, grammars."""

from __future__ import annotations

import asyncio
import operator
import threading
from collections.abc import Callable
from typing import Any

from tee_side.engine.request import Request
from tee_side.serve.app import create_app
from tee_side.serve.serving import GrammarKind
from tests.kit.rows import each_row
from tests.kit.serve import (
    FakeEngine,
    FakeGrammar,
    Reply,
    chat,
    complete,
    connection,
    in_a_loop,
    model,
    serving,
    tokenizer,
)

PATH, CONTEXT = "/v1/completions", model().max_model_len
ENDS = model().config.eos_token_ids
USER = {"role": "user", "content": "Hello"}


def asked(by: Callable[..., Reply], **body: Any) -> list[Request]:
    engine = FakeEngine()
    assert by(engine, **body).status == 200
    return engine.requests


def encoded(text: str) -> tuple[int, ...]:
    return tuple(tokenizer().encode(text))


def test_settings_reach_the_engine_by_their_names() -> None:
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
    (request,) = asked(complete, **settings, **body)
    assert {name: getattr(request.sampling, name) for name in settings} == settings
    assert request.sampling.logit_bias == {5: -100}
    assert (request.samples, request.stop, request.max_new_tokens) == (2, ("x",), 9)
    assert (request.stop_ids, request.logprobs, request.salt) == (None, None, "s")


@each_row(
    ("by", "body", "field", "values"),
    [
        (complete, {"top_k": -1}, "sampling.top_k", [0]),
        (complete, {"stop_token_ids": [9]}, "stop_ids", [ENDS | {9}]),
        (complete, {"ignore_eos": True}, "stop_ids", [set()]),
        # A prompt is a text or ids or several of either.
        (complete, {"prompt": ["Hello", ""]}, "prompt_ids", [encoded("Hello"), encoded("")]),
        (complete, {"prompt": [[5, 6], [7]]}, "prompt_ids", [(5, 6), (7,)]),
        # Tokens are as many as are wanted and have room.
        (chat, {}, "max_new_tokens", [64]),
        (chat, {"max_tokens": 5, "max_completion_tokens": 6}, "max_new_tokens", [6]),
        (complete, {"prompt": [5] * (CONTEXT - 3), "max_tokens": 100}, "max_new_tokens", [3]),
        # An engine runs nothing that neither makes tokens nor reads them.
        (
            complete,
            {"prompt": [5] * CONTEXT, "max_tokens": 0, "echo": True},
            "prompt_logprobs",
            [0],
        ),
        (complete, {"echo": True, "logprobs": 2}, "prompt_logprobs", [2]),
    ],
)
def test_what_is_asked_for_reaches_the_engine(
    by: Callable[..., Reply], body: dict[str, Any], field: str, values: list[Any]
) -> None:
    assert [*map(operator.attrgetter(field), asked(by, **body))] == values


def test_roles_parts_and_names_reach_the_template() -> None:
    parts = [{"type": "text", "text": text} for text in "ab"]
    messages = [
        {"role": "developer", "content": "Be short."},
        {"role": "user", "content": parts, "name": "Eve"},
        {"role": "assistant", "content": None, "refusal": None, "annotations": []},
        USER,
    ]
    plain = [
        {"role": "system", "content": "Be short."},
        {"role": "user", "content": "a\nb"},
        {"role": "assistant", "content": ""},
        USER,
    ]
    (request,), (without,) = (
        asked(chat, messages=messages, add_generation_prompt=add) for add in (None, False)
    )
    assert list(request.prompt_ids) == tokenizer().apply_chat_template(plain)
    assert request.prompt_ids == (*without.prompt_ids, *encoded("<|assistant|>")[1:])


def test_a_prompt_beyond_the_context_is_400_before_any_byte_of_a_stream() -> None:
    for stream in (False, True):
        reply = complete(prompt=[5] * CONTEXT, stream=stream)
        error = reply.error()
        assert (reply.status, error["type"]) == (400, "exceed_context_size_error")
        assert (error["n_prompt_tokens"], error["n_ctx"]) == (CONTEXT, CONTEXT)
        assert (error["code"], error["param"]) == ("context_length_exceeded", "body.prompt")


def _json_schema(**form: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema"} | form}


@each_row(
    ("body", "kind", "content"),
    [
        ({"guided_grammar": "root ::= x"}, "grammar", "root ::= x"),
        ({"guided_choice": ["a", "b"]}, "choice", ["a", "b"]),
        ({"structured_outputs": {"regex": "a+"}}, "regex", "a+"),
        ({"structured_outputs": {"json_object": True}}, "json_object", {}),
        ({"response_format": {"type": "json_object"}}, "json_object", {}),
        (_json_schema(json_schema={"name": "n", "schema": {"b": 2}}), "json_schema", {"b": 2}),
        ({"response_format": {"type": "text"}}, None, None),
    ],
)
def test_a_grammar_is_compiled_from_either_vendor_s_field(
    body: dict[str, Any], kind: str | None, content: Any
) -> None:
    grammar: Any = asked(complete, **body)[0].grammar
    assert (grammar and (grammar.kind, grammar.content)) == (kind and (kind, content))


@each_row(
    ("body", "param"),
    [
        ({"structured_outputs": {"regex": "("}}, "body.structured_outputs.regex"),
        ({"response_format": {"type": "json_object"}, "guided_regex": "a"}, "body"),
        (_json_schema(), "body.response_format.json_schema"),
        (_json_schema(type="xml"), "body.response_format.type"),
    ],
)
def test_a_bad_grammar_is_400(body: dict[str, Any], param: str) -> None:
    reply = complete(**body)
    assert (reply.status, reply.error()["param"]) == (400, param)


class Compiler:
    """Compiles what is "costly" when the test releases it."""

    def __init__(self) -> None:
        self.compiled: list[str] = []
        self.begun, self.release = threading.Semaphore(0), threading.Event()

    def __call__(self, kind: GrammarKind, content: Any, _owner: str) -> FakeGrammar:
        self.compiled.append(content)
        self.begun.release()
        assert content != "costly" or self.release.wait(60)
        return FakeGrammar(kind, content)


@in_a_loop
async def test_costly_grammars_of_one_key_hold_up_no_other_nor_those_of_a_client_that_left() -> (
    None
):
    compile_slowly, who = Compiler(), operator.itemgetter("authorization")
    app = create_app(
        serving(compile_grammar=compile_slowly, authorise=lambda request: who(request.headers))
    )

    def made(owner: str, grammar: str | None) -> Any:
        body = {"prompt": "a", "guided_regex": grammar}
        return connection("POST", PATH, body, {"authorization": owner})

    async def done(owner: str, grammar: str | None) -> Reply:
        found = made(owner, grammar)
        await app(found.scope, found.receive, found.send)
        return found.reply

    costly = [asyncio.create_task(done("alice", "costly")) for _ in range(63)]
    left = made("alice", "left")
    leaving = asyncio.create_task(app(left.scope, left.receive, left.send))
    try:
        for _ in range(2):
            await asyncio.to_thread(compile_slowly.begun.acquire, timeout=60)
        left.leave()
        assert (await done("bob", "quick")).status == 200
        assert (await done("alice", None)).status == 200
        too_many = await done("alice", "quick")
        assert (too_many.status, too_many.error()["code"]) == (503, "overloaded")
        assert too_many.headers["retry-after"] == "1"
        assert compile_slowly.compiled == ["costly", "costly", "quick"]
    finally:
        compile_slowly.release.set()
    assert {(await one).status for one in costly} == {200}
    await leaving
    assert compile_slowly.compiled.count("costly") == 63
    assert "left" not in compile_slowly.compiled
    assert (await done("alice", "quick")).status == 200
