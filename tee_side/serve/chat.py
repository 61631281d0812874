"""`/v1/chat/completions`: tools that may be called, thinking, and how a reply is read."""

import json
from collections.abc import Sequence
from functools import partial

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from protocol.errors import PromptError
from tee_side.chat.call_grammar import ReplyGrammar
from tee_side.chat.calls import CallReader
from tee_side.chat.reply import ReplyReader
from tee_side.serve.answers import ChatForm, OfferedModel, Writing
from tee_side.serve.completions import (
    Reading,
    check_fields,
    exchange,
    grammars,
    prepared,
    truncated,
    written_in,
)
from tee_side.serve.conversation import encode_chat
from tee_side.serve.errors import ApiError, of_engine, require
from tee_side.serve.exchange import EngineResponse, Serving
from tee_side.serve.grammar import CallsSource
from tee_side.serve.schema import (
    AllowedTools,
    ChatRequest,
    NamedTool,
    Tool,
)
from tee_side.serve.watch import RequestWatch


def _choosing(body: ChatRequest) -> tuple[Sequence[Tool], bool, bool]:
    """Read `tool_choice`: what may be called, whether a tool is, and no more than one.

    Raises ApiError.
    """
    tools, choice = body.tools or [], body.tool_choice
    known = {tool.function.name: tool for tool in tools}
    require(len(known) == len(tools), "body.tools", "each name once")
    one = body.parallel_tool_calls is False
    if choice == "none":
        return (), False, False
    named = [choice] if isinstance(choice, NamedTool) else []
    must = choice == "required" or bool(named)
    if isinstance(choice, AllowedTools):
        named, must = choice.allowed_tools.tools, choice.allowed_tools.mode == "required"
    require(tools or not (must or named), "body.tools", "tools to choose of")
    there = all(one.function.name in known for one in named)
    require(there, "body.tool_choice", "names of tools that are in tools")
    chosen = [known[one.function.name] for one in named] or tools
    return chosen, must, one or isinstance(choice, NamedTool)


def _reading(model: OfferedModel, body: ChatRequest, ids: Sequence[int]) -> Reading:
    """Return how a reply is read, and what it has to follow. Raises ApiError."""
    (chosen, must, one), replies = _choosing(body), model.replies
    thinking, inside = replies.behind(ids)
    rules = ReplyGrammar(replies.added)
    lead = rules.thinking(thinking, inside=inside)
    # Before a text that follows a grammar of its own.
    before = None if thinking is None else rules.lark(f"{lead} @answer")
    if not chosen:
        reader = None if thinking is None else partial(ReplyReader, thinking, inside=inside)
        shown = {} if thinking is None else replies.shown
        return Reading(reader=reader, shown=shown, lead=before)
    if (form := replies.calls) is None:
        raise ApiError(
            400,
            "how this model writes calls is not known; an operator can say it (--tool-parser)",
            param="body.tools",
            code="no_tools",
        )
    tools = {tool.function.name: tool.function.parameters or {} for tool in chosen}
    calls: CallsSource | None = None
    answer = next(
        (
            {"type": "object", **content}
            for name, _, content in grammars(body)
            if name == "response_format"
        ),
        None,
    )
    if must or answer is not None or any(tool.function.strict for tool in chosen):
        free, wrong = not must, (ValueError, TypeError, AttributeError, RecursionError)
        try:
            with PromptError.instead_of(
                wrong, "tools", "a schema of another form", "schemas of JSON"
            ):
                start = rules.calls(form, tools, one=one, free=free, answer=answer)
                calls = CallsSource(rules.lark(f"{lead} {start}"), json.dumps([tools, answer]))
        except PromptError as error:
            raise of_engine(error, "body.tools") from None

    def reader_of() -> ReplyReader:
        read = CallReader(form, tools, 1 if one else None)
        return ReplyReader(thinking, inside=inside, calls=read)

    lead_of_text = before if calls is None else None
    return Reading(reader=reader_of, shown=replies.shown, calls=calls, lead=lead_of_text)


async def chat_completions(body: ChatRequest, request: HttpRequest) -> Response:
    """Answer a conversation."""
    return await prepared(prepare_chat, body, request, compiles=asks_for_calls(body))


def asks_for_calls(body: ChatRequest) -> bool:
    """Whether a grammar of calls has to be compiled."""
    return bool(body.tools) and (
        body.tool_choice not in (None, "auto", "none")
        or any(tool.function.strict for tool in body.tools or ())
    )


def prepare_chat(
    serving: Serving,
    caller: RequestWatch,
    body: ChatRequest,
    writing: Writing | None = None,
) -> EngineResponse:
    """Return the answer of a body, as `writing` has it. Raises ApiError."""
    model = serving.model
    check_fields(model, body)
    require(not body.top_logprobs or body.logprobs, "body.top_logprobs", "logprobs to be true")
    told = [] if body.tool_choice == "none" else body.tools or []
    ids = truncated(encode_chat(model, body, tools=told), body, model)
    field = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
    limit = getattr(body, field)
    require(limit != 0, f"body.{field}", "at least 1")
    return exchange(
        serving,
        caller,
        writing or written_in(ChatForm(), body),
        body,
        prompts=[tuple(ids)],
        param="body.messages",
        max_tokens=model.default_max_tokens if limit is None else limit,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        reading=_reading(model, body, ids),
    )
