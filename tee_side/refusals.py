"""What pydantic refuses, in the words of our own errors: where, got and expected."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches
from typing import NamedTuple

from pydantic import ValidationError
from pydantic_core import PydanticCustomError

from protocol.validation import first_fault

_OURS = "refusal"


class Problem(NamedTuple):
    """The first thing that was refused. `path`: keys and indices that lead to it."""

    path: tuple[str | int, ...]
    where: str
    got: str
    expected: str

    @property
    def field(self) -> str:
        """Keys and indices with dots in between."""
        return ".".join(map(str, self.path))


def refusal(got: str, expected: str, where: str = "") -> PydanticCustomError:
    """Return an error for a validator that knows what it got better than pydantic does.

    `where`: beyond the field that is being validated. `first_problem` takes it apart again.
    """
    values = {"where": where, "got": got, "expected": expected}
    return PydanticCustomError(_OURS, "{expected} (got {got})", values)


def first_problem(error: ValidationError, known: Iterable[str] = ()) -> Problem:
    """Return the first problem of several. `known`: what an unknown key may have meant."""
    fault = first_fault(error)
    context = fault.context
    if fault.kind == _OURS:
        return Problem(fault.path, context["where"], context["got"], context["expected"])
    key = fault.path[-1] if fault.path else ""
    expected = {
        "dict_type": "a table",
        "model_type": "a table",
        "too_short": f"at least {context.get('min_length')} of them",
        "extra_forbidden": fault.expected + did_you_mean(key, known),
        "int_parsing": "an integer",
        "float_parsing": "a number",
        "string_too_long": f"at most {context.get('max_length')} characters",
        "string_pattern_mismatch": f"text that matches {context.get('pattern')}",
    }.get(fault.kind, fault.expected)
    return Problem(fault.path, "", fault.got, expected)


def did_you_mean(name: object, known: Iterable[str]) -> str:
    """Return a suggestion that follows a message about an unknown name; empty if none is near."""
    near = get_close_matches(str(name), list(known), n=1)
    return f" (did you mean {near[0]}?)" if near else ""
