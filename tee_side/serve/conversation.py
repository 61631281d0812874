"""The conversation of a body becomes token ids."""

from collections.abc import Sequence
from typing import Any

from protocol.errors import ModelError, TsqpError
from tee_side.chat.history import encode_history
from tee_side.chat.template import REASONING, Conversation
from tee_side.serve.answers import OfferedModel
from tee_side.serve.errors import ApiError, of_engine, require
from tee_side.serve.schema import Chat, Tool

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
    adds, form = body.add_generation_prompt, model.replies
    try:
        conversation = Conversation(
            messages=[
                turn.model_dump(exclude_none=True, include=_OF_A_TURN) for turn in body.messages
            ],
            tools=[tool.sent for tool in tools] or None,
            documents=body.documents,
            # It begins the assistant's turn, unless its last one is continued.
            add_generation_prompt=not body.continue_final_message if adds is None else adds,
            continue_final_message=bool(body.continue_final_message),
            variables=form.told(body.reasoning_effort, model.reasoning_effort)
            | (body.chat_template_kwargs or {}),
        )
        return encode_history(form, conversation)
    except ModelError:
        # The operator's to mend; a completion may still be asked for.
        raise ApiError(
            400,
            "the model has no chat template, or one that fails",
            param="body.messages",
            code="no_chat_template",
        ) from None
    except TsqpError as error:
        known = error.where.partition(".")[0] in Chat.model_fields
        raise of_engine(error, f"body.{error.where if known else 'messages'}") from None
