"""A conversation as OpenAI's API has it becomes the one that a template is given."""

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from protocol.errors import PromptError
from tee_side.chat.reply import ReplyForm
from tee_side.chat.template import REASONING, Conversation


def encode_history(form: ReplyForm, conversation: Conversation) -> list[int]:
    """Return the ids of a conversation whose turns are as OpenAI's API has them.

    Parts of a content are lines of a text. Arguments of calls are texts there, and objects to
    templates, where they are JSON; a result gets the name of its call, which some templates write.
    Thinking that a client left in the text of an answer goes where the template reads it. Raises as
    `ChatTemplate.render`, and PromptError for turns of another form.
    """
    with PromptError.instead_of(
        (KeyError, TypeError, AttributeError), "messages", "turns of another form", "OpenAI's"
    ):
        said = [_read(dict(turn), form.read_apart) for turn in conversation.messages]
        _name_results(said)
        read = list(map(_read_arguments, said))
    try:
        return form.template.encode(replace(conversation, messages=read))
    except PromptError:
        # Templates of DeepSeek's write arguments as the text that they are.
        if read == said:
            raise
        return form.template.encode(replace(conversation, messages=said))


def _read(turn: dict[str, Any], thinking: tuple[str, str] | None) -> dict[str, Any]:
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
        {"type": "function", "function": {k: one["function"].get(k) for k in ("name", "arguments")}}
        | ({} if one.get("id") is None else {"id": one["id"]})
        for one in turn.get("tool_calls") or ()
    ]
    changed: dict[str, Any] = {
        "role": "system" if role == "developer" else role,
        "content": text,
        "reasoning_content": thought,
        "tool_calls": calls or None,
    }
    changed |= dict.fromkeys((*REASONING[1:], "refusal"))
    return {name: value for name, value in (turn | changed).items() if value is not None}


def _name_results(turns: Sequence[dict[str, Any]]) -> None:
    names: dict[str, str] = {}
    for turn in turns:
        for call in turn.get("tool_calls") or ():
            names[call.get("id", "")] = call["function"]["name"]
        if turn["role"] == "tool" and (name := names.get(turn.get("tool_call_id", ""))):
            turn.setdefault("name", name)


def _read_arguments(turn: dict[str, Any]) -> dict[str, Any]:
    def read(call: dict[str, Any]) -> dict[str, Any]:
        arguments = call["function"]["arguments"]
        try:
            # Of a tool that takes none, some clients have no text.
            found = json.loads(arguments or "{}") if isinstance(arguments, str) else arguments
        except (ValueError, RecursionError):
            return call
        if not isinstance(found, dict):
            return call
        return call | {"function": call["function"] | {"arguments": found}}

    calls = list(map(read, turn.get("tool_calls") or ()))
    return turn | {"tool_calls": calls} if calls else turn
