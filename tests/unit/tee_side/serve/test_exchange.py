"""From what is asked of the engine to the last byte of an answer, or the client's leaving."""

import asyncio
import operator
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from protocol.errors import LimitError, PromptError
from tee_side.chat.template import Conversation
from tee_side.engine.request import NewToken, PromptRead, Request
from tee_side.engine.tokenizer import Tokenizer
from tee_side.serve.app import create_app
from tee_side.serve.background import Delivery, QueueFullError
from tee_side.serve.grammar import GrammarKind
from tee_side.serve.keys import RateLimitError
from tests.kit.rows import each_row
from tests.kit.serve import (
    GONE,
    Connection,
    FakeEngine,
    FakeTicket,
    FakeWatch,
    Reply,
    call,
    chat,
    compile_grammar,
    complete,
    connected,
    in_a_loop,
    model,
    serving,
    template,
    tokenizer,
)

PATH = "/v1/completions"
TOKEN = Delivery((NewToken(0, 300, None, None),), PromptRead())
FULL = QueueFullError("queue", got="2", expected="at most 1")


def _body(stream: bool, **more: Any) -> dict[str, Any]:
    return {"prompt": [5, 6], "stream": stream} | more


def _ask(engine: FakeEngine, body: dict[str, Any], **more: Any) -> tuple[Reply, FakeWatch]:
    watch = FakeWatch()
    return call(serving(engine, watch=watch, **more), "POST", PATH, body), watch


@asynccontextmanager
async def _held(body: dict[str, Any]) -> AsyncIterator[tuple[FakeEngine, FakeWatch, Connection]]:
    """Ask, and go on when the engine is asked; at the end the client leaves."""
    engine, watch = FakeEngine(hold=True), FakeWatch()
    app = create_app(serving(engine, watch=watch))
    async with connected(app, "POST", PATH, body) as asked:
        await engine.submitted.wait()
        yield engine, watch, asked


@each_row("stream", [False, True])
def test_everything_of_a_request_passes_the_watch(stream: bool) -> None:
    engine, body = FakeEngine(says=[300, 301], reused=1), {"prompt": [[5, 6], [7]], "n": 2}
    reply, watch = _ask(engine, _body(stream, max_tokens=3, **body), authorise=lambda _: "alice")
    assert watch.begun == [("alice", 3, 12)]
    assert sum(watch.events) == 8
    assert watch.ended == [("stop", 3, 8)]
    assert reply.headers["x-ratelimit-limit-requests"] == "9"
    assert {request.owner for request in engine.requests} == {"alice"}
    assert _ask(FakeEngine(), _body(stream, max_tokens=2))[1].ended[0][0] == "length"


@each_row("stream", [False, True])
def test_an_error_is_an_http_error_before_the_first_byte_and_an_event_behind_it(
    stream: bool,
) -> None:
    reply, watch = _ask(FakeEngine(error=GONE), _body(stream))
    assert (reply.status, reply.error()["code"]) == (503, "engine_error")
    assert [outcome for outcome, *_ in watch.ended] == ["EndpointError"]
    assert "gpu" not in reply.text
    reply, watch = _ask(FakeEngine(error=GONE, fail_after=2), _body(stream))
    assert reply.status == (200 if stream else 503)
    if stream:
        *chunks, last = reply.events()
        assert (len(chunks), last["error"]["code"]) == (2, "engine_error")
    assert [outcome for outcome, *_ in watch.ended] == ["EndpointError"]


def test_what_could_never_run_is_refused_before_it_is_accounted_for() -> None:
    headers = {"x-ratelimit-limit-requests": "60"}
    limit = RateLimitError("API key", got="61", expected="60", after_s=17, headers=headers)
    limited = serving(watch=FakeWatch(refusal=limit))
    reply = call(limited, "POST", PATH, _body(True))
    assert (reply.status, reply.headers["retry-after"]) == (429, "17")
    assert headers.items() <= reply.headers.items()
    engine = FakeEngine(unfit=PromptError("samples", got="2", expected="1"))
    reply, watch = _ask(engine, _body(True, n=2))
    assert (reply.status, reply.error()["param"]) == (400, "body.n")
    assert (watch.begun, engine.requests) == ([], [])
    for state, retry in (("starting", "5"), ("failed", None)):
        engine = FakeEngine(state=state)  # type: ignore[arg-type]
        reply, watch = _ask(engine, _body(True))
        assert (reply.status, reply.error()["code"]) == (503, state)
        assert reply.headers.get("retry-after") == retry
        assert (watch.begun, engine.requests) == ([], [])


def test_a_full_queue_is_told_as_passing() -> None:
    # Where no prompt of the request gets a place, and where the only one loses it.
    for engine in (FakeEngine(refuse=FULL), FakeEngine(error=FULL)):
        reply, watch = _ask(engine, _body(True))
        assert (reply.status, reply.error()["code"]) == (503, "overloaded")
        assert reply.headers["retry-after"] == "1"
        assert [outcome for outcome, *_ in watch.ended] == ["QueueFullError"]


@in_a_loop
async def test_an_error_of_one_prompt_cancels_the_others() -> None:
    async with _held(_body(False, prompt=[[5], [6]])) as (engine, _, asked):
        first, second = engine.open
        engine.step(Delivery(error=GONE, ended=True))
        await asked.changed.wait()
        assert asked.reply.status == 503
        assert (engine.cancelled, engine.open) == ([second], [])
        assert first.request.prompt_ids == (5,)


@in_a_loop
async def test_a_prompt_that_loses_its_place_gets_another_while_one_of_its_request_goes_on() -> (
    None
):
    async with _held(_body(False, prompt=[[5], [6]])) as (engine, _, asked):
        engine.submitted.clear()
        engine.step(Delivery(error=FULL, ended=True), ticket=1)
        await engine.submitted.wait()
        assert [ticket.request.prompt_ids for ticket in engine.open] == [(5,), (6,)]
        assert (asked.reply.status, engine.cancelled) == (0, [])


class Full(FakeEngine):
    """Has `places`, each at every so many attempts; `never`: a request too many could never run."""

    places, every, attempts, most, never = 1, 1, 0, 0, False

    def submit(self, *arguments: Any) -> FakeTicket:
        self.attempts += 1
        full = len(self.open) >= self.places
        if full and self.never:
            raise PromptError("prompt", got="2", expected="at most 1")
        if full or (self.attempts - 1) % self.every:
            raise FULL
        self.most = max(self.most, len(self.open) + 1)
        return super().submit(*arguments)


@each_row(
    ("places", "every", "count", "most"),
    # The last waits for a place that others have; the one before for a few of its own at a time.
    [(300, 1, 40, 16), (1, 3, 3, 1)],
)
def test_prompts_of_a_request_wait_for_places(
    places: int, every: int, count: int, most: int
) -> None:
    engine = Full(says=[300])
    engine.places, engine.every = places, every
    reply = complete(engine, prompt=[[at + 1] for at in range(count)], max_tokens=1)
    assert [choice["index"] for choice in reply.json()["choices"]] == list(range(count))
    assert engine.most == most
    # What could never run cancels the one before it.
    never = Full(hold=True)
    never.never = True
    assert complete(never, prompt=[[5], [6]]).status == 400
    assert (len(never.cancelled), never.open) == (1, [])


@in_a_loop
async def test_what_the_machine_refuses_ends_the_request_and_is_not_asked_for_again() -> None:
    body = _body(False, prompt=[[at + 1] * 2 for at in range(20)])
    async with _held(body) as (engine, watch, asked):
        engine.step(TOKEN)
        refused = LimitError("KV memory", got="much", expected="less")
        engine.step(Delivery(error=refused, ended=True), ticket=1)
        await asked.changed.wait()
        assert asked.reply.status == 503
        assert len(engine.requests) == 16
    # Only what was asked of the engine counts.
    assert watch.ended == [("LimitError", 32, 1)]
    assert engine.open == []


@in_a_loop
async def test_a_client_that_leaves_while_a_write_waits_for_it_is_cancelled_at_once() -> None:
    engine, asked = FakeEngine(hold=True), Connection("POST", PATH, _body(True))
    writing, resume = asyncio.Event(), asyncio.Event()

    async def send(_message: Any) -> None:
        writing.set()
        await resume.wait()

    app = create_app(serving(engine))
    task = asyncio.create_task(app(asked.scope, asked.receive, send))
    await engine.submitted.wait()
    engine.step(TOKEN)
    await writing.wait()
    asked.leave()
    await engine.was_cancelled.wait()
    assert (task.done(), engine.open) == (False, [])
    resume.set()
    await task
    # Before anything was written as well.
    async with _held(_body(False)) as (engine, watch, asked):
        engine.step(TOKEN)
    assert (len(engine.cancelled), engine.open) == (1, [])
    assert (watch.ended, asked.reply.status) == ([("cancelled", 2, 1)], 0)


@in_a_loop
async def test_what_the_end_of_the_server_cuts_off_is_told_as_passing() -> None:
    """While its body is read, and once the engine has been asked."""
    engine, reading = FakeEngine(hold=True), asyncio.Event()

    async def no_body() -> Any:
        reading.set()
        await asyncio.Event().wait()

    for begun, receive in ((reading, no_body), (engine.submitted, None)):
        asked = Connection("POST", PATH, _body(False))
        app = create_app(serving(engine))
        task = asyncio.create_task(app(asked.scope, receive or asked.receive, asked.send))
        await begun.wait()
        task.cancel()  # as uvicorn does with what is open after its grace
        await task
        assert (asked.reply.status, asked.reply.error()["code"]) == (503, "failed")
        assert engine.open == []


class Together(FakeEngine):
    """Delivers all tokens of a prompt in one piece."""

    def _script(self, request: Request) -> list[Delivery]:
        parts = super()._script(request)
        tokens = tuple(token for part in parts for token in part.tokens)
        return [Delivery(tokens, parts[0].prompt, ended=True)]


def test_on_a_clock_of_its_own_each_choice_has_a_token_a_tick() -> None:
    says, body = [300, 301, 302], _body(True, max_tokens=3, n=2, prompt=[[5], [6]])
    whole, paced = (
        _ask(Together(says=says, at_once=True), body, tempo_s=tempo_s)[0]
        for tempo_s in (0.0, 0.001)
    )
    assert (len(whole.writes), len(paced.writes)) == (2, 4)
    for write in paced.writes[:3]:
        events = Reply(writes=[write]).events()
        assert sorted(event["choices"][0]["index"] for event in events) == [0, 1, 2, 3]
    # An answer that comes whole waits for no clock.
    assert _ask(FakeEngine(says=says), _body(False, max_tokens=3), tempo_s=3600.0)[0].status == 200


CONTEXT = model().max_model_len
ENDS = model().config.eos_token_ids
USER = {"role": "user", "content": "Hello"}


def asked(by: Callable[..., Reply], **body: Any) -> list[Request]:
    engine = FakeEngine()
    assert by(engine, **body).status == 200
    return engine.requests


def encoded(text: str) -> tuple[int, ...]:
    return tuple(tokenizer().encode(text))


@each_row(
    ("path", "field"), [(PATH, "prompt"), ("/v1/embeddings", "input"), ("/tokenize", "prompt")]
)
def test_a_prompt_is_tokenized_beside_the_loop(
    path: str, field: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A long one would stop every stream."""
    threads, encode = list[threading.Thread](), Tokenizer.encode

    def noting(*text: Any, **more: Any) -> list[int]:
        if "Hello" in text:
            threads.append(threading.current_thread())
        return encode(*text, **more)

    monkeypatch.setattr(Tokenizer, "encode", noting)
    call(serving(), "POST", path, {field: "Hello"})
    assert threads
    assert threading.current_thread() not in threads


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
        (complete, {"echo": True, "logprobs": 2, "prompt_logprobs": 5}, "prompt_logprobs", [5]),
        (complete, {"prompt_logprobs": -1}, "prompt_logprobs", [20]),
        (complete, {"seed": -1}, "sampling.seed", [None]),
        (complete, {"prompt": [5, 6, 7], "truncate_prompt_tokens": 2}, "prompt_ids", [(6, 7)]),
        (
            complete,
            {"prompt": [5] * CONTEXT, "truncate_prompt_tokens": -1},
            "prompt_ids",
            [(5,) * (CONTEXT - 1)],
        ),
        # What the next token may be.
        (complete, {"min_tokens": 0, "bad_words": []}, "grammar", [None]),
        (complete, {"min_tokens": 3}, "grammar.minimum", [3]),
        (complete, {"min_tokens": 3}, "grammar.end_ids", [ENDS]),
        (complete, {"min_tokens": 3, "stop_token_ids": [9]}, "grammar.end_ids", [ENDS | {9}]),
        (
            complete,
            {"bad_words": ["cat", " "]},
            "grammar.unwanted",
            [[encoded("cat")[1:], encoded(" cat")[1:]]],
        ),
        (complete, {"min_tokens": 1, "guided_regex": "a"}, "grammar.grammar.kind", ["regex"]),
        (chat, {"allowed_token_ids": [5]}, "grammar.minimum", [0]),
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
    assert list(request.prompt_ids) == template().encode(Conversation(messages=plain))
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
        (
            {"response_format": {"type": "json_object", "schema": {"b": 2}}},
            "json_schema",
            {"b": 2},
        ),
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

    def __call__(self, kind: GrammarKind, content: Any, owner: str, lead: str | None = None) -> Any:
        self.compiled.append(content)
        self.begun.release()
        assert content != "costly" or self.release.wait(60)
        return compile_grammar(kind, content, owner, lead)


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
        return Connection("POST", PATH, body, {"authorization": owner})

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
