"""A model's chat template: a conversation becomes token ids.

Texts and ids are those of transformers' `apply_chat_template`, with `sanitize_control_tokens`: what
a client wrote never becomes a control token. Such names in its words are marked before the template
sees them, and encoded as text, as are those that the template makes of its words: but where it cuts
them by place, or puts brackets of its own around a name (docs/limitations.md).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from os.path import commonprefix
from typing import Any

from protocol.errors import ModelError, PromptError, describe
from protocol.model.files import MAX_JSON_BYTES, find_file, read_file, read_json
from tee_side.chat.sandbox import (
    BEGIN,
    END,
    STAND_INS,
    EndlessTemplate,
    RefusalError,
    SandboxedTemplate,
)
from tee_side.engine.tokenizer import CONFIG_FILE, Tokenizer, library_errors

# The template of each file, by its name among several. These are files of a manifest, too.
TEMPLATE_FILES = {
    "default": "chat_template.jinja",
    "tool_use": "additional_chat_templates/tool_use.jinja",
}
_ACCEPTED = "a conversation that the template accepts"
_ENDS = "a template that ends, with a prompt"
# Where a message ends that is to be continued; its space shows whether the template trims.
_TAG = "END_OF_WHAT_IS_CONTINUED "
# What a message's reasoning is called. Templates read the first; those of gpt-oss, the second.
REASONING = ("reasoning_content", "thinking", "reasoning")


@dataclass(frozen=True, kw_only=True)
class Conversation:
    """What a template is given; values are JSON's.

    `continue_final_message`: the prompt ends within the last message. `variables`: what else a
    template of this model knows.
    """

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] | None = None
    documents: Sequence[Mapping[str, Any]] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    variables: Mapping[str, Any] = field(default_factory=dict)


class ChatTemplate:
    """The chat template of a tokenizer's model directory, if it has one.

    `date`: what it is told of the time, None for the clock's. `control_tokens_in_content`: what a
    client wrote may become control tokens. Raises ModelError where a file is damaged, and
    ManifestError for one that is not the manifest's.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        date: datetime | None = None,
        *,
        control_tokens_in_content: bool = False,
    ) -> None:
        self.tokenizer, self._date = tokenizer, date
        self._marks = not control_tokens_in_content
        directory, manifest = tokenizer.directory, tokenizer.manifest
        path = find_file(directory, CONFIG_FILE, manifest)
        # Of the file that has the template.
        self._where = path or directory
        config: dict[str, Any] = {} if path is None else read_json(path, manifest)
        self._class = config.get("tokenizer_class")
        self._control = config.get("chat_control_tokens")
        given = config.get("chat_template")
        if isinstance(given, list):
            entries = [entry for entry in given if isinstance(entry, dict)]
            given = {entry.get("name"): entry.get("template") for entry in entries}
        found: dict[str, object] = given if isinstance(given, dict) else {"default": given}
        files: dict[str, object] = {}
        for name, file in TEMPLATE_FILES.items():
            if own := find_file(directory, file, manifest):
                self._where, content = own, read_file(own, MAX_JSON_BYTES, manifest)
                with ModelError.instead_of(
                    UnicodeDecodeError, str(own), "bytes that are not UTF-8", "a template"
                ):
                    files[name] = content.decode("utf-8")
        # Files take the place of all that the configuration has.
        found = files or found
        self._sources = {name: text for name, text in found.items() if isinstance(text, str)}
        self._compiled: dict[str, tuple[SandboxedTemplate, _Control]] = {}
        self._end = f"{directory}: chat template"

    def info(self) -> dict[str, str | None]:
        """Return what the model's files name, as in `tokenizer_config.json`.

        `tokenizer_class`, `chat_template` (None for none) and the special tokens.
        """
        kind = self._class if isinstance(self._class, str) else None
        said = {"tokenizer_class": kind, "chat_template": self._sources.get("default")}
        return said | self.tokenizer.special_tokens

    def source(self, *, with_tools: bool) -> str:
        """Return the template of a conversation with tools or without; "" for none."""
        name = "tool_use" if with_tools and "tool_use" in self._sources else "default"
        return self._sources.get(name, "")

    def render(self, conversation: Conversation) -> str:
        """Return a conversation as the model reads it.

        Raises ModelError if the model has no chat template, a damaged one, or one that does not end
        in time, PromptError if it refuses the messages.
        """
        template, _ = self._template(conversation)
        return self._render(conversation, template, _Control([], template))

    def encode(self, conversation: Conversation) -> list[int]:
        """Return its token ids. Raises as `render`."""
        template, control = self._template(conversation)
        text = control.restored(self._render(conversation, template, control))
        # Text, a client's token, text, ...; a mark that the template has torn from its token still
        # parts what is beside it.
        pieces = re.split(f"{BEGIN}({control.tokens.pattern}){END}|[{BEGIN}{END}]", text)
        ids = self.tokenizer.encode(pieces[0], add_special_tokens=False)
        for at, piece in enumerate(pieces[1:], start=1):
            if piece:
                ids += self._inside(piece, as_text=at % 2 == 1)
        return ids

    def _template(self, conversation: Conversation) -> tuple[SandboxedTemplate, _Control]:
        """Compile the template, once: that takes longer than rendering."""
        source = self.source(with_tools=conversation.tools is not None)
        ModelError.unless(
            source,
            str(self.tokenizer.directory),
            "no chat template",
            f"one in {TEMPLATE_FILES['default']} or {CONFIG_FILE} (or use generate)",
        )
        if source not in self._compiled:
            try:
                template = SandboxedTemplate(source, self._date)
                self._compiled[source] = template, self._control_tokens(template)
            except EndlessTemplate as error:
                raise ModelError(self._end, str(error), _ENDS) from None
            except Exception as error:  # noqa: BLE001 - Python's own, too: it compiles to Python
                got = f"{type(error).__name__}: {error}"[:160]
                expected = "a chat template without mistakes"
                raise ModelError(str(self._where), got, expected) from None
        return self._compiled[source]

    def _control_tokens(self, template: SandboxedTemplate) -> _Control:
        """Return special tokens, and those others that the files name or the template writes."""
        added, named = self.tokenizer.raw.get_added_tokens_decoder().values(), self._control

        def is_control(text: str) -> bool:
            if isinstance(named, list):
                return text in named
            return not text.isspace() and any(text in literal for literal in template.literals)

        shielded = added if self._marks else ()
        found = {token.content for token in shielded if token.special or is_control(token.content)}
        return _Control(found, template)

    def _render(
        self, conversation: Conversation, template: SandboxedTemplate, control: _Control
    ) -> str:
        mark, besides = control.marked, (conversation.tools, conversation.documents)
        deep = "messages", "values that are nested too deep", "fewer levels"
        with PromptError.instead_of(RecursionError, *deep):
            # Clients send null for what is not there; templates ask whether it is defined.
            messages = [
                {mark(key): mark(value) for key, value in message.items() if value is not None}
                for message in conversation.messages
            ]
            variables, tools, documents = mark([conversation.variables, *besides])
        for message in messages:
            for said in [message[key] for key in REASONING if key in message][:1]:
                message.update({"thinking": said} | message | {"reasoning_content": said})
        continued = conversation.continue_final_message
        # What has the text that is continued: the message, or its last part with a text.
        holder, key = (messages[-1] if messages else {}), "content"
        if isinstance(parts := holder.get(key), list):
            texts = [part for part in parts if isinstance(part, dict) and "text" in part]
            holder, key = (texts[-1] if texts else {}), "text"
        last = holder.get(key)
        if continued:
            right = isinstance(last, str) and not conversation.add_generation_prompt
            PromptError.unless(
                right,
                "continue_final_message",
                "no text to continue, or add_generation_prompt",
                "a last message with a text, and no prompt for another one",
            )
            holder[key] = f"{last}{_TAG}"
        values = {
            **self.tokenizer.special_tokens,
            **variables,
            "messages": messages,
            "tools": tools,
            "documents": documents,
            "add_generation_prompt": conversation.add_generation_prompt,
        }
        try:
            text = template.render(values)
        except EndlessTemplate as error:
            raise ModelError(self._end, str(error), _ENDS) from None
        except RefusalError as error:
            raise PromptError(self._end, f'"{error}", the template says', _ACCEPTED) from None
        except Exception as error:  # noqa: BLE001 - anything; its message may hold the prompt
            got = f"{type(error).__name__} (its words may hold the prompt, and are not shown)"
            raise PromptError(self._end, got, _ACCEPTED) from None
        if not continued:
            return text
        before, tag, after = text.rpartition(_TAG.strip())
        whole = tag and str(last).strip() in text
        expected = "a template that writes all of the last message"
        PromptError.unless(whole, "continue_final_message", "a message that was changed", expected)
        return before if after.startswith(" ") else before.rstrip()

    def _inside(self, piece: str, *, as_text: bool) -> list[int]:
        """Encode what stands within a text. `as_text`: a control token's name, as other words.

        A tokenizer of sentencepiece puts a space in front of a text: behind a new line, it stands
        there.
        """
        usual = partial(self.tokenizer.encode, add_special_tokens=False)
        encode = self._plain if as_text else usual
        front, ids = usual("\n"), encode("\n" + piece)
        return ids[len(front) :] if ids[: len(front)] == front else encode(piece)

    def _plain(self, text: str) -> list[int]:
        """Encode without a look at added tokens."""
        raw = self.tokenizer.raw
        with library_errors(self.tokenizer.path, quoted=False):
            text = text if raw.normalizer is None else raw.normalizer.normalize_str(text)
            cut = raw.pre_tokenizer
            words = [text] if cut is None else [word for word, _ in cut.pre_tokenize_str(text)]
            return [token.id for word in words for token in raw.model.tokenize(word)]


def _any_of(texts: Iterable[str]) -> str:
    """Return what matches the longest of these, with one look at a place, however many they are."""
    given = list(texts)
    start = commonprefix(given)  # noqa: RUF071 - of texts, not of paths
    rests: dict[str, list[str]] = {}
    for text in given:
        rest = text.removeprefix(start)
        rests.setdefault(rest[:1], []).append(rest)
    if len(rests) < 2:
        return re.escape(start) if rests else "(?!)"
    longer = [_any_of(found) for first, found in rests.items() if first]
    return f"{re.escape(start)}(?:{'|'.join([*longer, *[''] * ('' in rests)])})"


class _Control:
    """Control tokens, and how a client's words show that they are none.

    A template may put one together: it leaves out words, writes two texts side by side, or its own
    brackets around one. So it is given characters that stand for the first two of a token wherever
    these are a client's, but in words that the template looks for.
    """

    def __init__(self, tokens: Collection[str], template: SandboxedTemplate) -> None:
        self.tokens = re.compile(_any_of(tokens))
        firsts = {one for token in tokens for one in token[:2] if not one.isalnum()}
        firsts -= template.literals
        known = [one for one in template.literals if firsts & set(one)]
        # But where a token is in one, or begins with its end.
        known = [one for one in known if not self.tokens.search(one)]
        starts = {token[:size] for token in tokens for size in range(1, len(token))}
        known = [one for one in known if not any(one[at:] in starts for at in range(len(one)))]
        self._said = re.compile(f"({self.tokens.pattern})|{_any_of(known)}|{_any_of(firsts)}")
        self._stand_ins = dict(zip(sorted(firsts), map(chr, STAND_INS), strict=False))
        self._back = str.maketrans({stand_in: one for one, stand_in in self._stand_ins.items()})
        self._dropped = dict.fromkeys([*STAND_INS, ord(BEGIN), ord(END)])

    def marked(self, value: Any) -> Any:
        """Return what a client wrote, as plain JSON. Raises PromptError for what JSON has not."""
        if isinstance(value, str):
            return self._said.sub(self._mark, value.translate(self._dropped))
        if isinstance(value, Mapping):
            return {self.marked(key): self.marked(one) for key, one in value.items()}
        if isinstance(value, list | tuple):
            return [self.marked(one) for one in value]
        plain_one = value is None or isinstance(value, bool | int | float)
        PromptError.unless(plain_one, "messages", describe(value), "values of JSON")
        return value

    def _mark(self, found: re.Match[str]) -> str:
        return f"{BEGIN}{found[0]}{END}" if found[1] else self._stand_ins.get(found[0], found[0])

    def restored(self, text: str) -> str:
        """Put a client's characters back, and marks around each token that has one of them."""

        def mark(found: re.Match[str]) -> str:
            is_own = text[slice(*found.span())] == found[0]
            return found[0] if is_own else f"{BEGIN}{found[0]}{END}"

        return self.tokens.sub(mark, text.translate(self._back))
