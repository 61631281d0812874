"""A client's conversation becomes the one that a template is given, and token ids."""

import json
from collections.abc import Sequence
from functools import partial
from typing import Any

from protocol.errors import ModelError, PromptError, TsqpError
from tee_side.chat.template import REASONING, Conversation
from tee_side.serve.answers import OfferedModel
from tee_side.serve.errors import ApiError, of_engine, require
from tee_side.serve.schema import ChatMessage, Tool

# Of a template, what a client says by fields of their own.
_FIELDS = ("messages", "tools", "documents", "add_generation_prompt", "continue_final_message")
# What templates call whether a model thinks.
_SWITCHES = ("enable_thinking", "thinking")


def encode_chat(model: OfferedModel, body: Any, *, tools: Sequence[Tool] = ()) -> list[int]:
    """Return the ids of the conversation of a body. Raises ApiError."""
    said = [_turn(model, one, f"body.messages.{at}") for at, one in enumerate(body.messages)]
    _name_results(said)
    conversation = partial(
        Conversation,
        tools=[tool.sent for tool in tools] or None,
        documents=getattr(body, "documents", None),
        add_generation_prompt=_adds(body),
        continue_final_message=bool(body.continue_final_message),
        variables=_variables(model, body),
    )
    try:
        try:
            return model.template.encode(conversation(messages=[_read_arguments(t) for t in said]))
        except PromptError:
            # Templates of DeepSeek's write arguments as the text that they are.
            if not any("tool_calls" in turn for turn in said):
                raise
            return model.template.encode(conversation(messages=said))
    except ModelError:
        # The operator's to mend; a completion may still be asked for.
        raise ApiError(
            400,
            "the model has no chat template, or one that fails",
            param="body.messages",
            code="no_chat_template",
        ) from None
    except TsqpError as error:
        raise of_engine(error, "body.messages") from None


def _adds(body: Any) -> bool:
    """Whether the prompt begins the assistant's turn: unless its last one is continued."""
    if body.add_generation_prompt is None:
        return not body.continue_final_message
    return bool(body.add_generation_prompt)


def _variables(model: OfferedModel, body: Any) -> dict[str, Any]:
    """Return what a template is told beside messages."""
    given = body.chat_template_kwargs or {}
    for name in _FIELDS:
        require(name not in given, f"body.chat_template_kwargs.{name}", "a field of its own")
    effort = getattr(body, "reasoning_effort", None) or model.reasoning_effort
    if effort is None:
        return dict(given)
    thinks = effort != "none"
    source = model.template.source(with_tools=False)
    able = thinks or model.replies.thinking is None or any(name in source for name in _SWITCHES)
    require(able, "body.reasoning_effort", "not none: this model always thinks")
    return {"reasoning_effort": effort, **dict.fromkeys(_SWITCHES, thinks), **given}


def _turn(model: OfferedModel, message: ChatMessage, param: str) -> dict[str, Any]:
    content, role = message.content, message.role
    require(content is not None or role == "assistant", f"{param}.content", "a value")
    text = "\n".join(part.text for part in content) if isinstance(content, list) else content
    text = text or message.refusal or ""
    turn: dict[str, Any] = {"role": "system" if role == "developer" else role}
    thought = next((said for name in REASONING if (said := getattr(message, name))), None)
    if thought is None and role == "assistant" and model.replies.thinking is not None:
        # A client that knows nothing of thinking sends it back as the beginning of the text.
        begin, end = model.replies.thinking
        before, found, rest = text.partition(end)
        if found and before.lstrip().startswith(begin):
            thought, text = before.lstrip()[len(begin) :].strip(), rest.lstrip()
    turn["content"] = text
    if thought is not None:
        turn["reasoning_content"] = thought
    for name in ("name", "tool_call_id"):
        if (value := getattr(message, name)) is not None:
            turn[name] = value
    if message.tool_calls:
        turn["tool_calls"] = [
            {"type": "function", "function": call.function.model_dump(exclude={"parsed_arguments"})}
            | ({} if call.id is None else {"id": call.id})
            for call in message.tool_calls
        ]
    return turn


def _name_results(turns: Sequence[dict[str, Any]]) -> None:
    """Tell a result of a tool which one it is of: some templates write that."""
    names: dict[str, str] = {}
    for turn in turns:
        for call in turn.get("tool_calls", ()):
            names[call.get("id", "")] = call["function"]["name"]
        if turn["role"] == "tool" and (name := names.get(turn.get("tool_call_id", ""))):
            turn.setdefault("name", name)


def _read_arguments(turn: dict[str, Any]) -> dict[str, Any]:
    """Return a turn whose calls have their arguments as objects, where they are JSON."""

    def read(call: dict[str, Any]) -> dict[str, Any]:
        arguments = call["function"]["arguments"]
        try:
            found = json.loads(arguments) if isinstance(arguments, str) else arguments
        except (ValueError, RecursionError):
            return call
        if not isinstance(found, dict):
            return call
        return call | {"function": call["function"] | {"arguments": found}}

    if "tool_calls" not in turn:
        return turn
    return turn | {"tool_calls": [read(call) for call in turn["tool_calls"]]}
