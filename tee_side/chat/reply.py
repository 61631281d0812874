"""What a model's text is, as it comes: thinking, an answer, calls of tools."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, get_args

from protocol.errors import PromptError
from tee_side.chat.calls import CALL_FORMS, CallPiece, CallReader, form_of, unfinished
from tee_side.chat.template import REASONING, ChatTemplate
from tee_side.engine.tokenizer import TextStream, Tokenizer

# Of a prompt, where it shows whether thinking has begun.
_TAIL = 32
# Of white space that may be left out.
_MAX_SPACE = 16 * 1024
Effort: TypeAlias = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
# What templates call whether a model thinks.
_SWITCHES = ("enable_thinking", "thinking")
# Around what a model thinks. A template that has the second one is that of a model which does.
THINKING = (
    ("<think>", "</think>"),
    ("[THINK]", "[/THINK]"),
    ("<seed:think>", "</seed:think>"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
    ("<thought>", "</thought>"),
    ("<|inner_prefix|>", "<|inner_suffix|>"),
)


@dataclass(frozen=True, slots=True)
class Piece:
    """A piece of a reply. `calls`: see CallPiece."""

    content: str = ""
    reasoning: str = ""
    calls: Sequence[CallPiece] = ()


def add_calls(calls: list[dict[str, Any]], pieces: Iterable[CallPiece]) -> None:
    """Add pieces to calls, which are as OpenAI's API has them."""
    for one in pieces:
        if one.id is not None:
            function: dict[str, Any] = {"name": one.name, "arguments": ""}
            calls.append({"id": one.id, "type": "function", "function": function})
        calls[one.index]["function"]["arguments"] += one.arguments


class ReplyReader:
    """Reads a reply: thinking first, if there is any, between `thinking`'s signs; then text, calls.

    `inside`: the prompt has begun the thinking, and the reply may do so again. `calls`: reads what
    follows it. White space around thinking belongs to neither.
    """

    def __init__(
        self,
        thinking: tuple[str, str] | None = None,
        *,
        inside: bool = False,
        calls: CallReader | None = None,
    ) -> None:
        self._signs, self._calls = thinking, calls
        self._held = ""
        # Where it is: at the beginning, in thinking, or behind both.
        self._at, self._inside = "text" if thinking is None else "start", inside
        # White space at the beginning of a part is left out.
        self._fresh = thinking is not None

    @property
    def thinks(self) -> bool:
        """Whether the next token belongs to the thinking."""
        return self._at == "thinking" or (self._at == "start" and self._inside)

    @property
    def called(self) -> bool:
        """Whether tools were called, the last one to the end of its arguments."""
        return self._calls is not None and self._calls.calls > 0 and not self._calls.within

    def feed(self, text: str, *, final: bool = False) -> Piece:
        """Take a piece, `final` for the last one, and return what is decided."""
        self._held += text
        reasoning = ""
        if self._at == "start" and self._signs is not None:
            start, begin = self._held.lstrip(), self._signs[0]
            if start.startswith(begin):
                self._at, self._held = "thinking", start[len(begin) :]
            elif final or not begin.startswith(start) or len(self._held) > _MAX_SPACE:
                self._at, self._fresh = ("thinking", True) if self._inside else ("text", False)
        if self._at == "thinking" and self._signs is not None:
            reasoning = self._think(self._signs[1], final=final)
        if self._at != "text":
            return Piece(reasoning=reasoning)
        if self._fresh:
            self._held = self._held.lstrip()
            self._fresh = not self._held
        said, self._held = self._held, ""
        if self._calls is None:
            return Piece(said, reasoning)
        content, calls = self._calls.feed(said, final=final)
        return Piece(content, reasoning, calls)

    def _think(self, end: str, *, final: bool) -> str:
        """Return thinking; behind its end, the rest is held."""
        held = self._held.lstrip() if self._fresh else self._held
        thought, found, rest = held.partition(end)
        if found:
            self._at, self._held, self._fresh = "text", rest, True
            return thought.rstrip()
        open_end = 0 if final else unfinished(held, (end,))
        thought = held[: len(held) - open_end]
        thought = thought if len(thought) > _MAX_SPACE else thought.rstrip()
        self._held = "" if final else held[len(thought) :]
        self._fresh = self._fresh and not thought
        return thought


class MarkedStream(TextStream):
    """A stream of text that shows some of the special tokens, by their names.

    `shown`: the ids of these, and what they stand for.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop: Sequence[str] = (),
        before: Sequence[int] = (),
        shown: Mapping[int, str] | None = None,
    ) -> None:
        super().__init__(tokenizer, stop, before)
        self._shown_ids = shown or {}

    def feed(self, token_id: int) -> str:
        """Add a token, and return the text that can be shown now."""
        if (name := self._shown_ids.get(token_id)) is None:
            return super().feed(token_id)
        text, self._read = self._new_text(), len(self._ids)
        return self._show(text + name)


class ReplyForm:
    """How a model writes replies: the signs around its thinking, and calls; None for neither.

    `parser`: the form of its calls, a name in CALL_FORMS; None: what its template shows. `added`:
    ids of the tokenizer's added tokens, by their names; `special`: names of the special ones, by
    their ids; `shown`: of those that replies are read by.
    """

    def __init__(self, template: ChatTemplate, parser: str | None = None) -> None:
        source = template.source(with_tools=False)
        self.thinking = next(
            (signs for signs in THINKING if any(sign in source for sign in signs)), None
        )
        # Those of a template that reads thinking apart from what is said.
        self.read_apart = self.thinking if any(one in source for one in REASONING) else None
        self._switched = any(name in source for name in _SWITCHES)
        source = template.source(with_tools=True)
        name = (parser or form_of(source)) if "tools" in source else None
        self.calls = form = None if name is None else CALL_FORMS[name][1]
        signs = () if form is None else (*form.begins, *form.dropped, *form.written)
        signs_of_all = "".join((*(self.thinking or ()), *signs))
        self.template, self._raw = template, template.tokenizer.raw
        added = self._raw.get_added_tokens_decoder().items()
        self.added = {one.content: token_id for token_id, one in added}
        self.special = {token_id: one.content for token_id, one in added if one.special}
        self.shown = {i: name for i, name in self.special.items() if name in signs_of_all}

    def told(self, asked: str | None, default: str | None = None) -> dict[str, Any]:
        """Return what a template is told of how much to think: as asked, else by default.

        A default gives way where the model always thinks. Raises PromptError for what cannot be.
        """
        where, effort = "reasoning_effort", asked or default
        known = asked in (None, *get_args(Effort))
        PromptError.unless(known, where, "another value", f"one of {', '.join(get_args(Effort))}")
        always = effort == "none" and self.thinking and not self._switched
        PromptError.unless(
            not (asked and always), where, "none, of a model that always thinks", "another one"
        )
        if effort is None or always:
            return {}
        return {"reasoning_effort": effort, **dict.fromkeys(_SWITCHES, effort != "none")}

    def behind(self, prompt_ids: Sequence[int]) -> tuple[tuple[str, str] | None, bool]:
        """Return the signs of thinking that may follow a prompt, and whether that has begun it."""
        if self.thinking is None:
            return None, False
        # Behind a client's own words stand those of the template.
        tail = self._raw.decode(list(prompt_ids[-_TAIL:]), skip_special_tokens=False).rstrip()
        begin, end = self.thinking
        return (None if tail.endswith(end) else self.thinking), tail.endswith(begin)
