"""Runs a stranger's Jinja template: in Jinja's immutable sandbox, within limits.

Filters, globals and tags are those that transformers gives to chat templates.
"""

import json
import re
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime
from types import FrameType
from typing import Any, TypeVar

from jinja2 import TemplateError
from jinja2.ext import Extension
from jinja2.nodes import (
    CallBlock,
    Const,
    Filter,
    Node,
    ScopedEvalContextModifier,
    TemplateData,
)
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

T = TypeVar("T")

# A template that takes a second renders ten thousand messages; the largest context has 4 MB.
_TEMPLATE_SECONDS = 10.0
_MAX_TEXT = 16 * 1024 * 1024
# Of a number that a template computes, in bits; arithmetic on larger ones is one step of Python's
# that may last for hours.
_MAX_BITS = 4096
# Around what a client wrote that must stay text: variation selectors 255 and 256, which are not
# seen, and which Python's repr writes as they are.
BEGIN, END = "\U000e01ee", "\U000e01ef"
# Those in front of them stand for characters of a client's.
STAND_INS = range(ord(BEGIN) - 40, ord(BEGIN))
_TO_ESCAPE = re.compile(f"[^\x00-\x7e{chr(STAND_INS[0])}-{END}]")
# Filters that look at a tag's bracket.
_ESCAPES = ("e", "escape", "forceescape", "striptags", "title", "urlencode", "urlize", "xmlattr")


class EndlessTemplate(BaseException):
    """Derives from BaseException so that nothing on the way takes it for an error it may pass."""


class RefusalError(TemplateError):
    """The template's own error, in words that stand in the template."""


class SandboxedTemplate:
    """A template, compiled. `date`: what `strftime_now` tells, None for the clock's.

    `literals`: its texts and string constants, and what its filters look for. Raises
    EndlessTemplate, and anything, for one with mistakes.
    """

    def __init__(self, source: str, date: datetime | None = None) -> None:
        def raise_exception(message: str) -> None:
            raise (RefusalError if message in self.literals else TemplateError)(message)

        def strftime_now(form: str) -> str:
            return (date or datetime.now()).strftime(form)

        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=["jinja2.ext.loopcontrols", _Generation],
        )
        environment.filters["tojson"] = _to_json
        environment.globals |= {"raise_exception": raise_exception, "strftime_now": strftime_now}
        environment.intercepted_binops = frozenset({"*", "**"})
        environment.binop_table |= {"*": _times, "**": _power}
        self._compiled = _in_time(lambda: environment.from_string(source))
        parsed = environment.parse(source)
        texts = {node.data for node in parsed.find_all(TemplateData)}
        texts |= {node.value for node in parsed.find_all(Const) if isinstance(node.value, str)}
        escapes = any(node.name in _ESCAPES for node in parsed.find_all(Filter))
        escapes = escapes or any(parsed.find_all(ScopedEvalContextModifier))
        self.literals = frozenset(texts | set("<" * escapes))

    def render(self, values: Mapping[str, Any]) -> str:
        """Return its text. Raises EndlessTemplate, RefusalError, or anything, with values in it."""
        return _in_time(lambda: _joined(self._compiled.generate(values)))


class _Generation(Extension):
    """`{% generation %}`, which tells a trainer what the assistant said; its text stays."""

    tags = {"generation"}  # noqa: RUF012 - as Jinja has it

    def parse(self, parser: Parser) -> Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return CallBlock(self.call_method("_same"), [], [], body).set_lineno(line)

    def _same(self, caller: Callable[[], str]) -> str:
        return caller()


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Write JSON as transformers has it for templates: in order, without HTML's escapes."""
    text = json.dumps(
        value, ensure_ascii=False, indent=indent, separators=separators, sort_keys=sort_keys
    )
    # Python's own way would escape marks, too.
    return _TO_ESCAPE.sub(lambda one: json.dumps(one[0])[1:-1], text) if ensure_ascii else text


def _joined(found: Iterable[str]) -> str:
    pieces, size = [], 0
    for piece in found:
        pieces.append(piece)
        size += len(piece)
        if size > _MAX_TEXT:
            raise EndlessTemplate(f"more than {_MAX_TEXT} characters")
    return "".join(pieces)


def _in_time(work: Callable[[], T]) -> T:
    """Do what a template does; raise EndlessTemplate when it goes on for too long.

    Whatever loops, calls itself or emits nothing executes lines of Python, and each of them looks
    at the clock. A trace function sees them all, in this thread only; it makes a render of 5 ms
    one of 15 ms. One step inside of Python's own C code is not interrupted.
    """
    end = time.thread_time() + _TEMPLATE_SECONDS

    def watch(_frame: FrameType, _event: str, _argument: object) -> Any:
        if time.thread_time() > end:
            raise EndlessTemplate(f"no end after {_TEMPLATE_SECONDS:g} s")
        return watch

    before = sys.gettrace()
    sys.settrace(watch)
    try:
        return work()
    finally:
        sys.settrace(before)


def _times(left: Any, right: Any) -> Any:
    """Multiply, within limits."""
    for one, other in ((left, right), (right, left)):
        if isinstance(one, str | list | tuple) and isinstance(other, int):
            if len(one) * other > _MAX_TEXT:
                raise OverflowError("a repetition that is too long")
        elif isinstance(one, int) and one.bit_length() > _MAX_BITS:
            raise OverflowError("a number that is too large")
    return left * right


def _power(left: Any, right: Any) -> Any:
    """Raise to a power, within limits."""
    whole = isinstance(left, int) and isinstance(right, int)
    if whole and left.bit_length() * right > _MAX_BITS:
        raise OverflowError("a number that is too large")
    return left**right
