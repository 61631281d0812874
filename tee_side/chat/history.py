"""A conversation as OpenAI's API has it becomes the one that a template is given."""

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from protocol.errors import PromptError
from tee_side.chat.reply import ReplyForm
from tee_side.chat.template import REASONING, Conversation

# Of what a template is given, what a client says by fields of their own.
_FIELDS = ("messages", "tools", "documents", "add_generation_prompt", "continue_final_message")


def encode_history(form: ReplyForm, conversation: Conversation) -> list[int]:
    """Return the ids of a conversation whose turns are as OpenAI's API has them.

    Parts of a content are lines of a text. Arguments of calls are texts there, and objects to
    templates, where they are JSON; a result gets the name of its call, which some templates write.
    Thinking that a client left in the text of an answer goes where the template reads it. Raises as
    `ChatTemplate.render`, and PromptError for turns of another form, and for what the template does
    not know.
    """
    source = form.template.source(with_tools=bool(conversation.tools))
    for name, given in (("tools", conversation.tools), ("documents", conversation.documents)):
        PromptError.unless(
            not given or not source or name in source,
            name,
            f"{name}, of which this model's chat template knows nothing",
            "none",
        )
    for name in _FIELDS:
        PromptError.unless(
            name not in conversation.variables,
            f"chat_template_kwargs.{name}",
            f"{name}, which stands beside these",
            "what the template alone knows",
        )

    def told(read: Callable[[Any], Any]) -> list[int]:
        with PromptError.instead_of(
            (KeyError, TypeError, AttributeError), "messages", "turns of another form", "OpenAI's"
        ):
            names: dict[str, str] = {}
            said = [_read(dict(one), form.read_apart, names, read) for one in conversation.messages]
        return form.template.encode(replace(conversation, messages=said))

    try:
        return told(_as_object)
    except PromptError:
        # Templates of DeepSeek's write arguments as the text that they are.
        return told(lambda arguments: arguments)


def _read(
    turn: dict[str, Any],
    thinking: tuple[str, str] | None,
    names: dict[str, str],
    read: Callable[[Any], Any],
) -> dict[str, Any]:
    """Return a turn as templates have it. `names`: of calls before, by their ids."""
    content, role = turn.get("content"), turn["role"]
    text = "\n".join(part["text"] for part in content) if isinstance(content, list) else content
    text = text or turn.get("refusal") or ""
    thought = next((said for name in REASONING if (said := turn.get(name))), None)
    if thought is None and role == "assistant" and thinking:
        # A client that knows nothing of thinking sends it back as the beginning of the text.
        begin, end = thinking
        before, found, rest = text.partition(end)
        if found and before.lstrip().startswith(begin):
            thought, text = before.lstrip()[len(begin) :].strip(), rest.lstrip()
    calls = [
        {
            "type": "function",
            "function": {
                "name": one["function"]["name"],
                "arguments": read(one["function"].get("arguments")),
            },
        }
        | ({} if one.get("id") is None else {"id": one["id"]})
        for one in turn.get("tool_calls") or ()
    ]
    names |= {one["id"]: one["function"]["name"] for one in calls if "id" in one}
    changed: dict[str, Any] = {
        "role": "system" if role == "developer" else role,
        "content": text,
        "reasoning_content": thought,
        "tool_calls": calls or None,
        "name": turn.get("name") or names.get(turn.get("tool_call_id", "")),
        **dict.fromkeys((*REASONING[1:], "refusal")),
    }
    return {name: value for name, value in (turn | changed).items() if value is not None}


def _as_object(arguments: Any) -> Any:
    """Return arguments as an object, if they are JSON of one; else as they came."""
    try:
        # Of a tool that takes none, some clients have no text.
        found = json.loads(arguments or "{}") if isinstance(arguments, str) else arguments
    except (ValueError, RecursionError):
        return arguments
    return found if isinstance(found, dict) else arguments
