"""The conversation of a body becomes token ids."""

from collections.abc import Sequence
from typing import Any

from protocol.errors import ModelError, TsqpError
from tee_side.chat.history import encode_history
from tee_side.chat.template import REASONING, Conversation
from tee_side.serve.answers import OfferedModel
from tee_side.serve.errors import ApiError, of_engine, require
from tee_side.serve.schema import Tool

# Of a template, what a client says by fields of their own.
_FIELDS = ("messages", "tools", "documents", "add_generation_prompt", "continue_final_message")
# Of a message, what a template may be told.
_OF_A_TURN = {"role", "content", "name", "tool_calls", "tool_call_id", "refusal", *REASONING}


def encode_chat(model: OfferedModel, body: Any, *, tools: Sequence[Tool] = ()) -> list[int]:
    """Return the ids of the conversation of a body. Raises ApiError."""
    for at, one in enumerate(body.messages):
        require(
            one.content is not None or one.role == "assistant",
            f"body.messages.{at}.content",
            "a value",
        )
    source = model.template.source(with_tools=bool(tools))
    for name, given in (("tools", tools), ("documents", body.documents)):
        require(
            not given or not source or name in source,
            f"body.{name}",
            f"none: this model's chat template has no {name}",
        )
    adds = body.add_generation_prompt
    conversation = Conversation(
        messages=[one.model_dump(exclude_none=True, include=_OF_A_TURN) for one in body.messages],
        tools=[tool.sent for tool in tools] or None,
        documents=body.documents,
        # It begins the assistant's turn, unless its last one is continued.
        add_generation_prompt=not body.continue_final_message if adds is None else adds,
        continue_final_message=bool(body.continue_final_message),
        variables=_variables(model, body),
    )
    try:
        return encode_history(model.replies, conversation)
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
    given, asked = body.chat_template_kwargs or {}, body.reasoning_effort
    for name in _FIELDS:
        require(name not in given, f"body.chat_template_kwargs.{name}", "a field of the body")
    told = model.replies.told(asked or model.reasoning_effort)
    require(told or not asked, "body.reasoning_effort", "another effort: this model always thinks")
    return {**told, **given}
