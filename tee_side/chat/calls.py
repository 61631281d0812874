"""Calls of tools in a model's text: how families of models write them, and what reads them.

A reader takes text as it comes, and gives what is text, and calls, whose arguments are JSON. What
only looks like a call stays text: one that names no tool, or that does not go on as a call does.
From the first brace of its arguments on it is one, whatever follows: no stream can take back what
it has sent.
"""

import json
import re
import secrets
import string
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from types import NoneType, UnionType
from typing import Any, TypeAlias

# Of a call up to its arguments; or in all where these are its first key, and of white space that
# may be left out. Of one that is no JSON up to there. Behind its arguments, or of space in front.
_MAX_HEAD = 16 * 1024
_MAX_NAME = 512
_MAX_END = 64
# Of a value between tags that is held until its end.
_MAX_VALUE = 128 * 1024
_ID_LETTERS = string.ascii_letters + string.digits

# Name to the JSON schema of the arguments.
Tools: TypeAlias = Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class CallPiece:
    """A piece of call `index`: its first one has id and name."""

    index: int
    arguments: str = ""
    id: str | None = None
    name: str | None = None


def unfinished(text: str, literals: tuple[str, ...]) -> int:
    """Return how many characters at the end of a text may begin one of the literals."""
    starts = {literal[:size] for literal in literals for size in range(1, len(literal))}
    return max((len(start) for start in starts if text.endswith(start)), default=0)


class JsonArguments:
    """Reads the arguments of one call: an object of JSON, up to the brace that closes it."""

    _SIGN = re.compile(r'["\\{}\[\]]')

    def __init__(self, _schema: Mapping[str, Any]) -> None:
        self._depth, self._in_string, self._escaped = 0, False, False

    def feed(self, text: str) -> tuple[str, str | None]:
        """Return the JSON that goes on, and what stands behind the arguments; None before that."""
        at = int(self._escaped)
        self._escaped = False
        while found := self._SIGN.search(text, at):
            at, sign = found.end(), found[0]
            if sign == "\\":
                # What it stands before is no sign, and may come with the next piece.
                self._escaped = at == len(text)
                at += 1
            elif sign == '"':
                self._in_string = not self._in_string
            elif not self._in_string:
                self._depth += 1 if sign in "{[" else -1
                if not self._depth:
                    return text[:at], text[at:]
        return text, None


class TaggedArguments:
    """Reads arguments between tags: texts as they are, others as JSON, as the schema has each.

    `opens`: begins one, with its `key`; `closes`: ends it; `ends`: what stands behind the last.
    `lines`: a line end of its own stands on both sides of a value.
    """

    def __init__(
        self, schema: Mapping[str, Any], *, opens: str, closes: str, ends: str, lines: bool
    ) -> None:
        self._properties = schema.get("properties")
        # Which of the two stands there shows with the next character.
        opens += r"(?:\n|(?=[^\n]))" if lines else ""
        self._opens, self._ends = re.compile(rf"\s*{opens}"), re.compile(rf"\s*{ends}")
        self._closing = ("\n" + closes, closes) if lines else (closes,)
        self._held, self._front = "", "{"
        # What the value is that is read now; None between two.
        self._kind: str | None = None

    def feed(self, text: str) -> tuple[str, str | None]:
        """Take a piece of the text, as `JsonArguments` does."""
        self._held += text
        said = ""
        while True:
            if self._kind is not None:
                piece = self._value(self._kind)
                said += piece or ""
                if self._kind is not None:
                    return said, None
            elif opens := self._opens.match(self._held):
                key, self._held = opens["key"], self._held[opens.end() :]
                self._kind = self._kind_of(key)
                quote = '"' if self._kind == "text" else ""
                said += f"{self._front}{json.dumps(key)}: {quote}"
                self._front = ", "
            elif (ends := self._ends.match(self._held)) or len(self._held) > _MAX_HEAD:
                rest = self._held[ends.end() if ends else 0 :]
                return said + ("{}" if self._front == "{" else "}"), rest
            else:
                return said, None

    def _kind_of(self, key: str) -> str:
        """Return how a value is read: "text", "nullable" (one, or null) or "json"."""
        known = self._properties.get(key) if isinstance(self._properties, Mapping) else None
        several = known.get("anyOf") if isinstance(known, Mapping) else None
        said = [known, *several] if isinstance(several, list) else [known]
        types = [one.get("type") for one in said if isinstance(one, Mapping)]
        found = {str(one) for each in types for one in (each if isinstance(each, list) else [each])}
        return {("string",): "text", ("null", "string"): "nullable"}.get(
            tuple(sorted(found - {"None"})), "json"
        )

    def _value(self, kind: str) -> str:
        """Return what is decided of a value, and end it where its closing tag stands."""
        places = [(at, len(tag)) for tag in self._closing if (at := self._held.find(tag)) >= 0]
        if places:
            at, size = min(places)
            value, self._held, self._kind = self._held[:at], self._held[at + size :], None
            return _WHOLE[kind](value)
        if kind in ("json", "nullable"):
            if len(self._held) < _MAX_VALUE:
                return ""
            self._kind = "raw"
        decided = len(self._held) - unfinished(self._held, self._closing)
        value, self._held = self._held[:decided], self._held[decided:]
        return _escaped(value) if kind == "text" else value


_Arguments: TypeAlias = JsonArguments | TaggedArguments


def _escaped(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _as_json(text: str, kinds: type | UnionType = object) -> str:
    """Return a value as JSON, if it is one of these kinds: what is none is a text."""
    try:
        found = json.loads(text)
        json.dumps(found, allow_nan=False)
    except (ValueError, RecursionError):
        found = ...
    is_one = found is not ... and isinstance(found, kinds)
    return text.strip() if is_one else json.dumps(text, ensure_ascii=False)


# How a value ends, by its kind.
_WHOLE: dict[str, Callable[[str], str]] = {
    "text": lambda text: f'{_escaped(text)}"',
    "json": _as_json,
    "nullable": partial(_as_json, kinds=str | NoneType),
    "raw": str,
}


@dataclass(frozen=True, kw_only=True)
class CallForm:
    """How a family of models writes calls.

    `begins`: what a call begins with; `bare`: the first may begin a text without it. `head`: what
    follows, with the `name`, up to the arguments; `arguments`: what reads these, of their schema.
    `end`: what stands behind them; where it has `more`, another call follows that, from its head.
    `objects`: a call, or all of them, is JSON. `dropped`: what stands around calls.

    `written`: the same for a grammar: before all calls, a call with NAME and ARGUMENTS, between two
    calls, and behind all. `parameter`: where arguments are tagged, one in it, with KEY and VALUE.
    `short_ids`: templates of this form take ids of nine letters alone.
    """

    begins: tuple[str, ...]
    head: re.Pattern[str]
    end: re.Pattern[str]
    written: tuple[str, str, str, str]
    arguments: Callable[[Mapping[str, Any]], _Arguments] = JsonArguments
    parameter: str = ""
    bare: bool = False
    objects: bool = False
    dropped: tuple[str, ...] = ()
    short_ids: bool = False


# Up to the brace of the arguments; an id may stand before the name.
_OBJECT = (
    r'\s*\{\s*(?:"(?:id|type|tool_call_id)"\s*:\s*"[^"\\]*"\s*,\s*)?'
    r'"(?:name|tool_name)"\s*:\s*"(?P<name>[^"\\]{1,256})"\s*,\s*'
    r'"(?:arguments|parameters)"\s*:\s*(?=\{)'
)
_CLOSE = r'\s*(?:,\s*"[a-z_]+"\s*:\s*"[^"\\]*"\s*)?\}'


def _list_form(begin: str, close: str, name: str, arguments: str, **more: Any) -> CallForm:
    """All calls are one list of JSON."""
    written = f'{{"{name}": "NAME", "{arguments}": ARGUMENTS}}'
    behind = rf"\s*{re.escape(close)}" if close else ""
    return CallForm(
        begins=(begin,),
        # Without a way back: else each space would be tried on both sides of the bracket.
        head=re.compile(rf"\s*+\[?{_OBJECT}"),
        end=re.compile(rf"{_CLOSE}\s*(?:(?P<more>,)|\]{behind})"),
        written=(f"{begin}[", written, ", ", f"]{close}"),
        objects=True,
        **more,
    )


def _tagged_form(head: str, call: str, parameter: str, tag: str, **tags: Any) -> CallForm:
    """Each call is between tags, and its arguments between others."""
    return CallForm(
        begins=(f"<{tag}>",),
        head=re.compile(rf"\s*{head}"),
        end=re.compile(rf"\s*</{tag}>"),
        written=("", f"<{tag}>{call}</{tag}>", "\n", ""),
        arguments=partial(TaggedArguments, **tags),
        parameter=parameter,
    )


def _function_form(tag: str, parameter: str, *, lines: bool) -> CallForm:
    return _tagged_form(
        r"<function=(?P<name>[^>\n]{1,256})>",
        "\n<function=NAME>\nARGUMENTS</function>\n",
        parameter,
        tag,
        opens=r"<parameter=(?P<key>[^>\n]+)>",
        closes="</parameter>",
        ends="</function>",
        lines=lines,
    )


_NAME = r"(?P<name>[^\s<>]{1,256}?)"


def _deepseek_form(head: str, call: str, between: str, end: str) -> CallForm:
    begin, first, last = "<｜tool▁call▁begin｜>", "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
    return CallForm(
        begins=(begin,),
        head=re.compile(head),
        end=re.compile(end),
        written=(first, f"{begin}{call}<｜tool▁call▁end｜>", between, last),
        dropped=(first, last),
    )


# The first one whose signs all stand in a template is that of the model.
CALL_FORMS: dict[str, tuple[tuple[str, ...], CallForm]] = {
    "deepseek": (
        ("<｜tool▁call▁begin｜>", "```json"),
        _deepseek_form(
            rf"\s*(?:function)?<｜tool▁sep｜>{_NAME}\s*```json\s*(?=\{{)",
            "function<｜tool▁sep｜>NAME\n```json\nARGUMENTS\n```",
            "\n",
            r"\s*(?:```)?\s*<｜tool▁call▁end｜>",
        ),
    ),
    "deepseek-v3.1": (
        ("<｜tool▁call▁begin｜>",),
        _deepseek_form(
            rf"\s*{_NAME}\s*<｜tool▁sep｜>\s*(?=\{{)",
            "NAME<｜tool▁sep｜>ARGUMENTS",
            "",
            r"\s*<｜tool▁call▁end｜>",
        ),
    ),
    "mistral": (
        ("[TOOL_CALLS]", "[ARGS]"),
        CallForm(
            begins=("[TOOL_CALLS]",),
            head=re.compile(
                r"\s*(?P<name>[^\s\[\]{}]{1,256})\s*(?:\[CALL_ID\]\w*)?\[ARGS\]\s*(?=\{)"
            ),
            end=re.compile(""),
            written=("", "[TOOL_CALLS]NAME[ARGS]ARGUMENTS", "", ""),
            short_ids=True,
        ),
    ),
    "mistral-v3": (
        ("[TOOL_CALLS]",),
        _list_form("[TOOL_CALLS]", "", "name", "arguments", short_ids=True),
    ),
    "cohere": (
        ("<|START_ACTION|>",),
        _list_form("<|START_ACTION|>", "<|END_ACTION|>", "tool_name", "parameters"),
    ),
    "phi": (
        ("<|tool_call|>", "<|/tool_call|>"),
        _list_form("<|tool_call|>", "<|/tool_call|>", "name", "arguments"),
    ),
    "granite": (("<|tool_call|>",), _list_form("<|tool_call|>", "", "name", "arguments")),
    "glm": (
        ("<arg_key>",),
        _tagged_form(
            rf"{_NAME}\s*(?=<arg_key>|</tool_call>)",
            "NAME\nARGUMENTS",
            "<arg_key>KEY</arg_key>\n<arg_value>VALUE</arg_value>\n",
            "tool_call",
            opens=r"<arg_key>(?P<key>[^<]*)</arg_key>\s*<arg_value>",
            closes="</arg_value>",
            ends="(?=</tool_call>)",
            lines=False,
        ),
    ),
    "qwen3-coder": (
        ("<tool_call>", "<function="),
        _function_form("tool_call", "<parameter=KEY>\nVALUE\n</parameter>\n", lines=True),
    ),
    "seed": (
        ("<seed:tool_call>", "<function="),
        _function_form("seed:tool_call", "<parameter=KEY>VALUE</parameter>\n", lines=False),
    ),
    "hermes": (
        ("<tool_call>",),
        CallForm(
            begins=("<tool_call>",),
            head=re.compile(_OBJECT),
            end=re.compile(rf"{_CLOSE}\s*</tool_call>"),
            written=(
                "",
                '<tool_call>\n{"name": "NAME", "arguments": ARGUMENTS}\n</tool_call>',
                "\n",
                "",
            ),
            objects=True,
        ),
    ),
    "llama3": (
        ("ipython",),
        CallForm(
            begins=("<|python_tag|>",),
            head=re.compile(_OBJECT),
            end=re.compile(_CLOSE),
            written=("", '{"name": "NAME", "parameters": ARGUMENTS}', "; ", ""),
            bare=True,
            objects=True,
        ),
    ),
}


def form_of(template: str) -> str | None:
    """Return the name of the form that a chat template writes calls in."""
    forms = CALL_FORMS.items()
    return next((name for name, (signs, _) in forms if all(s in template for s in signs)), None)


class CallReader:
    """Reads a text that may have calls of these tools; `most`: later ones are left out.

    `calls`: how many there were.
    """

    def __init__(self, form: CallForm, tools: Tools, most: int | None = None) -> None:
        self._form, self._tools, self._most = form, tools, most
        self._signs = (*form.begins, *form.dropped)
        self._held, self._begun, self._said = "", "", ""
        self._pieces: list[CallPiece] = []
        self._state: Callable[[bool], bool] = self._read_text
        # Whether a call may stand here without a beginning of its own.
        self._bare = form.bare
        self._arguments: _Arguments | None = None
        self.calls = 0

    def feed(self, text: str, *, final: bool = False) -> tuple[str, list[CallPiece]]:
        """Take a piece, `final` for the last one; return text, and pieces of calls."""
        self._held += text
        while self._state(final):
            pass
        said, self._said = self._said, ""
        pieces, self._pieces = self._pieces, []
        return said, pieces

    @property
    def within(self) -> bool:
        """Whether a call has begun whose arguments have not ended."""
        return self._state == self._read_arguments

    # States: each returns whether another one goes on with what is held.

    def _read_text(self, final: bool) -> bool:
        """Give text away, up to what begins a call; white space waits for what follows it."""
        held = self._held
        if self._bare:
            start = held.lstrip(" \n;" if self.calls else " \n")
            if not start and not final and len(held) < _MAX_HEAD:
                return False
            self._bare = False
            if start.startswith("{"):
                return self._begin(held[: len(held) - len(start)])
        found = [(at, sign) for sign in self._signs if (at := held.find(sign)) >= 0]
        if found:
            at, sign = min(found)
            shown = held[:at].rstrip()
            self._said += shown
            begun = held[len(shown) : at + len(sign)]
            if sign in self._form.begins:
                return self._begin(begun, shown)
            self._held = held[at + len(sign) :]
            return True
        open_end = 0 if final else unfinished(held, self._signs)
        text = held[: len(held) - open_end]
        keeps = (final and not self.calls) or len(text) > _MAX_HEAD
        shown = text if keeps else text.rstrip()
        self._said += shown
        self._held = "" if final else held[len(shown) :]
        return False

    def _begin(self, begun: str, before: str = "") -> bool:
        self._begun, self._held = begun, self._held[len(before) + len(begun) :]
        self._state = self._read_head
        return True

    def _read_head(self, final: bool) -> bool:
        """Find out which tool is called, if one is."""
        held = self._held
        if found := self._form.head.match(held[:_MAX_HEAD]):
            if self._start(found["name"]):
                self._held = held[found.end() :]
                self._arguments = self._form.arguments(self._tools[found["name"]])
                self._state = self._read_arguments
            return True
        # An object that has its arguments first, or none.
        said, end = _whole_object(held) if self._form.objects else (None, 0)
        if said is None and not final and len(held) < _MAX_HEAD and self._goes_on(held):
            return False
        name, arguments = ((said or {}).get(a, (said or {}).get(b)) for a, b in _KEYS)
        if not isinstance(name, str) or not isinstance(arguments or {}, dict):
            self._not_a_call()
        elif self._start(name):
            # What ends it stands behind the arguments, elsewhere.
            self._held = f"}}{held[end:]}"
            self._piece(json.dumps(arguments or {}, ensure_ascii=False))
            self._state = self._read_end
        return True

    def _goes_on(self, held: str) -> bool:
        first = held.lstrip()[:1]
        few = len(held) < (_MAX_NAME if first else _MAX_END)
        return first in "{[" if first and self._form.objects else few

    def _start(self, name: str) -> bool:
        """Begin a call, if there is such a tool; else it is text."""
        if name not in self._tools:
            self._not_a_call()
            return False
        letters = "".join(secrets.choice(_ID_LETTERS) for _ in range(9))
        call_id = letters if self._form.short_ids else f"call_{letters}{secrets.token_hex(8)}"
        self.calls += 1
        if self._most is None or self.calls <= self._most:
            self._pieces.append(CallPiece(self.calls - 1, "", call_id, name))
        return True

    def _not_a_call(self) -> None:
        self._said += self._begun
        self._state = self._read_text

    def _read_arguments(self, _final: bool) -> bool:
        if self._arguments is None or not self._held:
            return False
        said, rest = self._arguments.feed(self._held)
        self._piece(said)
        self._held = rest or ""
        if rest is not None:
            self._state = self._read_end
        return rest is not None

    def _piece(self, arguments: str) -> None:
        if not arguments or (self._most is not None and self.calls > self._most):
            return
        index, last = self.calls - 1, self._pieces[-1:]
        if last and last[0].index == index:
            # Clients take one piece of a call at a time.
            self._pieces[-1] = replace(last[0], arguments=last[0].arguments + arguments)
        else:
            self._pieces.append(CallPiece(index, arguments))

    def _read_end(self, final: bool) -> bool:
        """Leave out what stands behind a call."""
        found = self._form.end.match(self._held)
        if found is None and not final and len(self._held) < _MAX_END:
            return False
        more = found and found.groupdict().get("more")
        self._held = self._held[found.end() :] if found else self._held.lstrip(" \n}]")
        self._bare, self._begun = self._form.bare, ""
        self._state = self._read_head if more else self._read_text
        return True


_KEYS = (("name", "tool_name"), ("arguments", "parameters"))


def _whole_object(held: str) -> tuple[dict[str, Any] | None, int]:
    """Return the object that a text begins with, if all of it is there, and where it ends."""
    start = len(held) - len(held.lstrip(" \n["))
    if not held.startswith("{", start) or "}" not in held:
        return None, 0
    try:
        found, end = json.JSONDecoder().raw_decode(held, start)
    except (ValueError, RecursionError):
        return None, 0
    return found, end
