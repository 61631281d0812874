"""Grammars of llguidance, in its Lark, for replies: thinking first, then calls that follow schemas.

Names of added tokens are written as ids: the library takes no other spelling for them.
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from protocol.errors import PromptError
from tee_side.chat.calls import CallForm, Tools

# A small model would go on with spaces until its last token. Forty are an indentation.
JSON_OPTIONS: Any = {"whitespace_pattern": r"[ \t\r\n]{1,40}"}
_ANY = "/(?s:.*)/"


class ReplyGrammar:
    """Writes the rules. `added`: ids of the tokenizer's added tokens, by their names."""

    def __init__(self, added: Mapping[str, int]) -> None:
        self._added = added
        names = sorted(map(re.escape, added), key=len, reverse=True)
        self._names = re.compile(f"({'|'.join(names)})" if names else "((?!))")
        self.rules = {"SPACE": r"/[ \n]{0,4}/"}

    def written(self, text: str) -> str:
        """Return what stands for a text."""
        parts = [
            f"<[{self._added[part]}]>" if at % 2 else json.dumps(part, ensure_ascii=False)
            for at, part in enumerate(self._names.split(text))
            if part
        ]
        return " ".join(parts) or '""'

    def until(self, sign: str) -> str:
        """Return what stands for any text up to a sign, and for the sign."""
        name = f"until_{len(self.rules)}"
        if sign in self._added:
            # Spelled by other tokens it would be one to who reads it.
            self.rules[name.upper()] = f"{_ANY} & ~/(?s:.*){_pattern(sign)}(?s:.*)/"
            return f"{name.upper()} {self.written(sign)}"
        self.rules[f"{name}[lazy]"] = f"/(?s:.*){_pattern(sign)}/"
        return name

    def thinking(self, signs: tuple[str, str] | None, *, inside: bool) -> str:
        """Return what stands before an answer: thinking, which has begun where `inside`."""
        if signs is None:
            return ""
        rest = f"{self.until(signs[1])} SPACE"
        return rest if inside else f"(SPACE {self.written(signs[0])} {rest})?"

    def calls(
        self,
        form: CallForm,
        tools: Tools,
        *,
        one: bool,
        free: bool,
        answer: Mapping[str, Any] | None = None,
    ) -> str:
        """Return what stands for calls, `one` at most.

        `free`: or for a reply without any, a text, or an `answer` by its schema. Raises PromptError
        where a text cannot be told from a call.
        """
        before, call, between, behind = form.written
        for number, (name, schema) in enumerate(tools.items()):
            head, _, end = call.partition("ARGUMENTS")
            begin, arguments = head.replace("NAME", name), self._arguments(form, schema, number)
            # Word by word: an answer may begin as a call does.
            parts = [*map(self.written, re.split('("[^"]*")', begin)), arguments, self.written(end)]
            self.rules[f"call_{number}"] = " ".join(parts)
        self.rules["call"] = " | ".join(f"call_{number}" for number in range(len(tools)))
        more = "" if one else f"({self.written(between)} call)*"
        section = f"{self.written(before)} call {more} {self.written(behind)}"
        if not free:
            return section
        if answer is not None:
            self.rules["answer"] = _json(answer)
            return f"({section} | answer)"
        if form.bare:
            self.rules["OTHER"] = r"/([^ \n{](?s:.*))?/"
            return f"({section} | OTHER)"
        sign = form.begins[0]
        PromptError.unless(
            sign in self._added,
            "tools",
            "strict",
            f"tool_choice required, or no strict: {sign} is no token of this model",
        )
        self.rules["OTHER"] = f"{_ANY} & ~/(?s:.*){_pattern(sign)}(?s:.*)/"
        return f"OTHER ({section} OTHER)?"

    def _arguments(self, form: CallForm, schema: Mapping[str, Any], number: int) -> str:
        if not form.parameter:
            # By its own type, or none, a schema may be followed by what is no object.
            self.rules[f"json_{number}"] = _json({**schema, "type": "object"})
            return f"json_{number}"
        apart = schema.keys() & {"$ref", "allOf", "anyOf", "oneOf"}
        expected = "properties at the top of it: this model writes them one by one"
        PromptError.unless(not apart, "tools", "a schema that leads elsewhere", expected)
        required = schema.get("required") or []
        properties = dict.fromkeys(required, True) | (schema.get("properties") or {})
        shared = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
        found = []
        for place, (key, said) in enumerate(properties.items()):
            before, _, behind = form.parameter.partition("VALUE")
            value = self._value(
                {**({} if said is True else said), **shared}, behind, f"{number}_{place}"
            )
            begin = self.written(before.replace("KEY", key))
            found.append(f"({begin} {value}){'' if key in required else '?'}")
        return " ".join(found) or '""'

    def _value(self, schema: Mapping[str, Any], behind: str, name: str) -> str:
        """Return what stands for a value between tags, and for its end."""
        if schema.get("type") != "string":
            self.rules[f"json_{name}"] = _json(schema)
            return f"json_{name} {self.written(behind)}"
        choices = [schema["const"]] if "const" in schema else schema.get("enum")
        if isinstance(choices, Sequence) and choices:
            return f"({' | '.join(map(self.written, map(str, choices)))}) {self.written(behind)}"
        sign = behind.strip()
        return f"{self.until(sign)} {self.written(behind.partition(sign)[2])}"

    def lark(self, start: str) -> str:
        """Return the grammar."""
        rules = {"start": start, **self.rules}
        return "\n".join(f"{name}: {rule}" for name, rule in rules.items())


def _pattern(text: str) -> str:
    """Return a regular expression, as it stands between slashes, for a text."""
    return re.escape(text).replace("/", r"\/").replace("\n", "n")


def _json(schema: Mapping[str, Any]) -> str:
    return f"%json {json.dumps({**schema, 'x-guidance': JSON_OPTIONS}, allow_nan=False)}"
