"""A client's conversation becomes the one that a template is given, and token ids."""

from collections.abc import Sequence
from typing import Any

from protocol.errors import ModelError, TsqpError
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
    adds = body.add_generation_prompt
    conversation = Conversation(
        messages=said,
        tools=[tool.sent for tool in tools] or None,
        documents=getattr(body, "documents", None),
        # It begins the assistant's turn, unless its last one is continued.
        add_generation_prompt=not body.continue_final_message if adds is None else adds,
        continue_final_message=bool(body.continue_final_message),
        variables=_variables(model, body),
    )
    try:
        return model.template.encode_calls(conversation)
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
    thought = next((said for name in REASONING if (said := getattr(message, name))), None)
    if thought is None and role == "assistant" and (signs := model.replies.read_apart):
        # A client that knows nothing of thinking sends it back as the beginning of the text.
        begin, end = signs
        before, found, rest = text.partition(end)
        if found and before.lstrip().startswith(begin):
            thought, text = before.lstrip()[len(begin) :].strip(), rest.lstrip()
    calls = [
        {
            "type": "function",
            "function": {"name": one.function.name, "arguments": one.function.arguments},
        }
        | ({} if one.id is None else {"id": one.id})
        for one in message.tool_calls or ()
    ]
    turn = {
        "role": "system" if role == "developer" else role,
        "content": text,
        "reasoning_content": thought,
        "name": message.name,
        "tool_call_id": message.tool_call_id,
        "tool_calls": calls or None,
    }
    return {name: value for name, value in turn.items() if value is not None}
