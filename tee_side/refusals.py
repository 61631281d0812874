"""What pydantic refuses, in the words of our own errors: where, got and expected."""

from __future__ import annotations

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


def refusal(got: str, expected: str, where: str = "") -> PydanticCustomError:
    """Return an error for a validator that knows what it got better than pydantic does.

    `where`: beyond the field that is being validated. `first_problem` takes it apart again.
    """
    values = {"where": where, "got": got, "expected": expected}
    return PydanticCustomError(_OURS, "{expected} (got {got})", values)


def first_problem(error: ValidationError) -> Problem:
    """Return the first problem of several."""
    fault = first_fault(error)
    context = fault.context
    if fault.kind == _OURS:
        return Problem(fault.path, context["where"], context["got"], context["expected"])
    expected = {
        "dict_type": "a table",
        "int_parsing": "an integer",
        "float_parsing": "a number",
        "string_too_long": f"at most {context.get('max_length')} characters",
        "string_pattern_mismatch": f"text that matches {context.get('pattern')}",
    }.get(fault.kind, fault.expected)
    return Problem(fault.path, "", fault.got, expected)
