"""`/v1/responses`, without state: another writing of a chat.

What is asked becomes a ChatRequest, and a reply's pieces become items: thinking, messages and calls
of tools. Nothing is kept from one request to the next.
"""

import json
import re
import time
import uuid
from collections.abc import Sequence
from functools import partial
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError, model_validator
from pydantic_core import PydanticCustomError
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from tee_side.chat.reply import Effort, Piece
from tee_side.engine.request import Request
from tee_side.serve.answers import (
    ChatForm,
    Entry,
    OfferedModel,
    Shape,
    StreamedAnswer,
    WholeAnswer,
    filled,
)
from tee_side.serve.chat import asks_for_calls, prepare_chat
from tee_side.serve.completions import prepared
from tee_side.serve.errors import ApiError, of_validation, require
from tee_side.serve.schema import (
    SENT_BACK,
    Body,
    Chat,
    ChatRequest,
    Generating,
    Likeliest,
    TextPart,
    accepting,
)

_NO_MEMORY = (
    "nothing: no conversation is kept here; send its earlier items in input"
    " (some clients do with store: false)"
)
# What needs one; a value that is false does not.
_STATELESS = {
    "store": "false: no answer is kept here",
    "background": "false: an answer comes with its request; a long one comes as a stream",
    "previous_response_id": _NO_MEMORY,
    "conversation": _NO_MEMORY,
}
# Of a request, what its response says again.
_TOLD = {
    *(
        "instructions",
        "metadata",
        "parallel_tool_calls",
        "tools",
        "tool_choice",
        "text",
        "reasoning",
    ),
    *("max_output_tokens", "temperature", "top_p", "top_logprobs", "user", "service_tier"),
}
# What a chat calls its fields, and a response; of turns, see `_turns`.
_NAMES = {
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "reasoning_effort": "reasoning.effort",
    r"response_format(\.json_schema)?": "text.format",
    r"tools\.(\d+)\.function": r"tools.\1",
    r"tool_choice\.(allowed_tools|function)": "tool_choice",
}
_LOGPROBS = "message.output_text.logprobs"


@accepting(SENT_BACK)
class Item(Body):
    """A message, a call or its result, or thinking, as an answer had it."""

    type: Literal["message", "function_call", "function_call_output", "reasoning"] = "message"
    role: Literal["system", "developer", "user", "assistant"] | None = None
    content: str | list[dict[str, Any]] | None = None
    call_id: Annotated[str, Field(max_length=256)] | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | list[TextPart] | None = None
    summary: list[dict[str, Any]] | None = None

    @model_validator(mode="before")
    @classmethod
    def _kept(cls, value: object) -> object:
        if isinstance(value, dict) and value.get("type") == "item_reference":
            raise PydanticCustomError("stateless", _NO_MEMORY)
        return value


@accepting(dict.fromkeys(("summary", "generate_summary"), Any))
class Reasoning(Body):
    """How much to think. A summary is not made."""

    effort: Effort | None = None


class TextOptions(Body):
    """`format`: as `response_format`, without an object of its own for a schema."""

    format: dict[str, Any] | None = None
    verbosity: Literal["medium"] | None = None


@accepting({"max_tool_calls": Any})
class ResponsesRequest(Chat, Generating):
    """`/v1/responses`, with the fields that chats have beside OpenAI's own."""

    n: Literal[1] | None = None
    return_token_ids: Literal[False] | None = None
    prompt_logprobs: None = None
    input: str | Annotated[list[Item], Field(min_length=1, fail_fast=True)]
    instructions: str | None = None
    tools: list[dict[str, Any]] | None = None  # type: ignore[assignment]
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: Reasoning | None = None
    max_output_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    top_logprobs: Likeliest | None = None
    include: list[str] | None = None
    truncation: Literal["disabled"] | None = None
    background: bool | None = None
    previous_response_id: str | None = None
    conversation: Any = None


async def responses(body: ResponsesRequest, request: HttpRequest) -> Response:
    """Answer a conversation."""
    for name, expected in _STATELESS.items():
        require(not getattr(body, name), f"body.{name}", expected)
    turns = _turns(body)
    prepare = partial(prepare_chat, writing=partial(ResponseAnswer, body))
    try:
        asked = _asked(body, [turn for _, turn in turns])
        return await prepared(prepare, asked, request, compiles=asks_for_calls(asked))
    except ApiError as error:

        def item(found: re.Match[str]) -> str:
            return f"body.{turns[int(found[1])][0]}{found[2] or ''}"

        turn = r"\bbody\.messages\.(\d+)(\.content[.\w]*)?[.\w]*"
        error.body = re.sub(turn, item, error.body)
        for name, own in _NAMES.items():
            error.body = re.sub(rf"\bbody\.{name}\b", f"body.{own}", error.body)
        raise


def _asked(body: ResponsesRequest, turns: list[dict[str, Any]]) -> ChatRequest:
    """Return the same as a chat. Raises ApiError, by the chat's names for fields."""
    text, thinking = body.text or TextOptions(), body.reasoning or Reasoning()
    form, choice = text.format, body.tool_choice
    require(
        form is None or body.response_format is None,
        "body.text.format",
        "none beside response_format",
    )
    if form is not None and form.get("type") == "json_schema":
        form = {"type": "json_schema", "json_schema": _without(form, "type")}
    if isinstance(choice, dict) and choice.get("type") == "function":
        choice = _nested(choice)
    elif isinstance(choice, dict) and choice.get("type") == "allowed_tools":
        named = choice.get("tools")
        allowed = _without(choice, "type")
        allowed |= {"tools": list(map(_nested, named))} if isinstance(named, list) else {}
        choice = {"type": "allowed_tools", "allowed_tools": allowed}
    logprobs = body.top_logprobs is not None or _LOGPROBS in (body.include or ())
    same = set(Generating.model_fields | Chat.model_fields) - {"tools"}
    fields = body.model_dump(by_alias=True, include=same) | {
        "parallel_tool_calls": body.parallel_tool_calls,
        "messages": turns,
        "tools": None if body.tools is None else list(map(_nested, body.tools)),
        "tool_choice": choice,
        "max_completion_tokens": body.max_output_tokens,
        "response_format": form or body.response_format,
        "reasoning_effort": thinking.effort or body.reasoning_effort,
        "logprobs": logprobs,
        "top_logprobs": body.top_logprobs,
    }
    try:
        return ChatRequest.model_validate(fields)
    except ValidationError as error:
        faults = [{**fault, "loc": ("body", *fault["loc"])} for fault in error.errors()]
        raise of_validation(faults) from None


def _without(fields: dict[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in fields.items() if key != name}


def _nested(tool: Any) -> Any:
    """Return a function as chats have it: in an object of its own."""
    if not isinstance(tool, dict) or tool.get("type") != "function":
        return tool
    return {"type": "function", "function": _without(tool, "type")}


def _turns(body: ResponsesRequest) -> list[tuple[str, dict[str, Any]]]:
    """Return turns, and where each is: what an assistant thought, said and called is one."""
    turns: list[tuple[str, dict[str, Any]]] = []
    if body.instructions is not None:
        turns.append(("instructions", {"role": "system", "content": body.instructions}))
    if isinstance(body.input, str):
        return [*turns, ("input", {"role": "user", "content": body.input})]
    for at, item in enumerate(body.input):
        place, role = f"input.{at}", item.role if item.type == "message" else None
        require(role or item.type != "message", f"body.{place}", "a role for a message")
        require(item.name or item.type != "function_call", f"body.{place}.name", "a value")
        if item.type == "function_call_output":
            result = item.output or ""
            parts = result if isinstance(result, str) else [one.model_dump() for one in result]
            turns.append((place, {"role": "tool", "content": parts, "tool_call_id": item.call_id}))
            continue
        if role not in (None, "assistant"):
            turns.append((place, {"role": role, "content": item.content}))
            continue
        last = turns[-1][1] if turns else {}
        if last.get("role") != "assistant" or (
            item.type != "function_call" and last.keys() & {"content", "tool_calls"}
        ):
            turns.append((place, last := {"role": "assistant"}))
        if item.type == "reasoning":
            said = item.content if isinstance(item.content, list) and item.content else item.summary
            last["reasoning_content"] = "".join(
                (
                    last.get("reasoning_content", ""),
                    *(str(one.get("text") or "") for one in said or ()),
                )
            )
        elif item.type == "function_call":
            function = {"name": item.name, "arguments": item.arguments or ""}
            last.setdefault("tool_calls", []).append({"id": item.call_id, "function": function})
        else:
            last["content"] = item.content
            # What may be wrong now is its content.
            turns[-1] = (place, last)
    return turns


# By kind of item: what its id begins with, its events, and what holds its text.
_KINDS = {
    "message": ("msg_", "response.output_text", "output_text"),
    "reasoning": ("rs_", "response.reasoning_text", "reasoning_text"),
    "function_call": ("fc_", "response.function_call_arguments", ""),
}


class ResponseAnswer(WholeAnswer):
    """Writes a response, or the events by which it comes about, in OpenAI's order."""

    done = ""

    def __init__(
        self, body: ResponsesRequest, model: OfferedModel, requests: Sequence[Request], shape: Shape
    ) -> None:
        super().__init__(ChatForm(), model, requests, shape)
        self.streamed = bool(body.stream)
        self.content_type = StreamedAnswer.content_type if self.streamed else self.content_type
        self._number, self._item, self._held = 0, dict[str, Any](), list[Any]()
        given = body.model_dump(exclude_none=True, include=_TOLD)
        self._response: dict[str, Any] = {
            "id": f"resp_{uuid.uuid4().hex}",
            "object": "response",
            "created_at": int(time.time()),
            "status": "in_progress",
            "error": None,
            "incomplete_details": None,
            "instructions": None,
            "metadata": {},
            "output": [],
            "parallel_tool_calls": True,
            "previous_response_id": None,
            "temperature": requests[0].sampling.temperature,
            "text": {"format": {"type": "text"}},
            "tool_choice": "auto",
            "tools": [],
            "top_p": requests[0].sampling.top_p,
            "truncation": "disabled",
            "usage": None,
            **given,
            "model": model.name,
            "store": False,
        }

    def failed(self, error: ApiError) -> str:
        """Return the last event of a stream that fails."""
        said = json.loads(error.body)["error"]
        return self._tell("error", code=said["code"], message=said["message"], param=said["param"])

    def finish(self) -> str:
        """Return the response, or the event that has it."""
        counts = self.counts.rounded(self.round_usage)
        self._response["usage"] = {
            "input_tokens": counts.prompt,
            "input_tokens_details": {"cached_tokens": counts.cached, "cache_write_tokens": 0},
            "output_tokens": counts.completion,
            "output_tokens_details": {"reasoning_tokens": counts.reasoning},
            "total_tokens": counts.prompt + counts.completion,
        }
        return self._tell(
            f"response.{self._response['status']}", response=self._response
        ) or json.dumps(self._response, separators=(",", ":"))

    def _open(self, choice: Any, more: str) -> str:
        return self._tell("response.created", response=self._response) + self._tell(
            "response.in_progress", response=self._response
        )

    def _write(
        self, choice: Any, piece: Piece, entries: Sequence[Entry], ids: Sequence[int]
    ) -> str:
        events = self._said("reasoning", piece.reasoning)
        # Some tokens are no text before others have come.
        held = [*self._held, *(json.loads(one[0]) for one in entries)]
        self._held = [] if choice.thinks or piece.calls else held
        events += self._said("message", piece.content)
        for call in piece.calls:
            if call.id is not None:
                events += self._close("completed")
                events += self._begin("function_call", call_id=call.id, name=call.name)
            events += self._said("function_call", call.arguments)
        if choice.finish is not None:
            status, details = "completed", None
            if choice.finish == "length":
                status, details = "incomplete", {"reason": "max_output_tokens"}
            self._response |= {"status": status, "incomplete_details": details}
            # A stop string may cut a call.
            called = self._item.get("type") != "function_call" or choice.reader.called
            events += self._close(status if called else "incomplete")
        return events

    def _begin(self, kind: str, **fields: Any) -> str:
        """Begin an item."""
        id_prefix, _, part = _KINDS[kind]
        self._item = {"id": f"{id_prefix}{uuid.uuid4().hex}", "type": kind, "status": "in_progress"}
        self._item |= fields
        if kind == "function_call":
            self._item["arguments"] = ""
            return self._tell("response.output_item.added", item=self._item)
        self._item |= {"role": "assistant"} if kind == "message" else dict[str, Any](summary=[])
        event = self._tell("response.output_item.added", item=self._item | {"content": []})
        own: dict[str, Any] = {"type": part, "text": ""}
        own |= {"annotations": [], "logprobs": []} if kind == "message" else {}
        self._item["content"] = [own]
        return event + self._tell("response.content_part.added", part=own)

    def _said(self, kind: str, text: str) -> str:
        """Add text to the item of a kind; another one ends."""
        if not text:
            return ""
        events = ""
        if self._item.get("type") != kind:
            events = self._close("completed") + self._begin(kind)
        more: dict[str, Any] = {}
        if kind == "function_call":
            self._item["arguments"] += text
        else:
            part = self._item["content"][0]
            part["text"] += text
            if kind == "message":
                more["logprobs"], self._held = self._held, []
                part["logprobs"] += more["logprobs"]
        return events + self._tell(f"{_KINDS[kind][1]}.delta", delta=text, **more)

    def _close(self, status: str) -> str:
        """End the item that is open, if one is."""
        item = self._item
        if not item:
            return ""
        item["status"] = status
        done = f"{_KINDS[item['type']][1]}.done"
        if item["type"] == "function_call":
            said = {"arguments": item["arguments"], "name": item["name"]}
            events = self._tell(done, **said)
        else:
            (part,) = item["content"]
            said = {key: part[key] for key in ("text", "logprobs") if key in part}
            events = self._tell(done, **said) + self._tell("response.content_part.done", part=part)
        events += self._tell("response.output_item.done", item=item)
        self._response["output"].append(item)
        self._item = {}
        return events

    def _tell(self, kind: str, **fields: Any) -> str:
        """Write an event, with the place that it is about."""
        if not self.streamed:
            return ""
        said = {"type": kind, "sequence_number": self._number, **fields}
        self._number += 1
        if "response" not in fields and kind != "error":
            said["output_index"] = len(self._response["output"])
            if "item" not in fields:
                said["item_id"] = self._item["id"]
                if self._item["type"] != "function_call":
                    said["content_index"] = 0
        text = json.dumps(said, separators=(",", ":"))[:-1]
        text = filled(text) if self._shape.filled and kind.endswith(".delta") else text
        return f"event: {kind}\ndata: {text}}}\n\n"
