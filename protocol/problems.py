"""Says what is wrong with the first field that a model refuses.

What pydantic refuses is said in the words of our own errors: where, got and expected.
`first_problem` is for a person's own file, which may be quoted, `unquoted` for a peer's message.
Imported once something is refused.
"""

from collections.abc import Iterable
from difflib import get_close_matches
from typing import NamedTuple

from pydantic import ValidationError

from protocol.errors import ErrorCode, ProtocolError, describe, describe_untrusted, shown


class Problem(NamedTuple):
    """The first thing that was refused. `path`: keys and indices that lead to it.

    `where`: beyond that; `kind`: pydantic's type of error.
    """

    path: tuple[str | int, ...]
    where: str
    got: str
    expected: str
    kind: str

    @property
    def field(self) -> str:
        """Keys and indices with dots in between."""
        return ".".join(shown(str(part)) for part in self.path if part != "[key]")


def first_problem(error: ValidationError, known: Iterable[str] = ()) -> Problem:
    """Return the first problem of several, which may be quoted: not for what came from the wire.

    `known`: what an unknown key may have meant.
    """
    problems = error.errors(include_url=False)
    # A misspelt key is a missing one, too; it says more by its own name.
    first = next((one for one in problems if one["type"] == "extra_forbidden"), problems[0])
    kind, path, context = first["type"], first["loc"], first.get("ctx", {})
    if "got" in context:  # of `protocol.validation.refusal`
        return Problem(path, context["where"], context["got"], context["expected"], kind)
    plain = expectation(kind, first["msg"])
    expected = {
        "dict_type": "a table",
        "model_type": "a table",
        "too_short": f"at least {context.get('min_length')} of them",
        "extra_forbidden": plain + did_you_mean(path[-1] if path else "", known),
        "int_parsing": "an integer",
        "float_parsing": "a number",
        "string_too_long": f"at most {context.get('max_length')} characters",
        "string_pattern_mismatch": f"text that matches {context.get('pattern')}",
    }.get(kind, plain)
    got = "nothing" if kind == "missing" else describe(first["input"])
    return Problem(path, "", got, expected, kind)


def did_you_mean(name: object, known: Iterable[str]) -> str:
    """Return a suggestion that follows a message about an unknown name; empty if none is near."""
    near = get_close_matches(str(name), list(known), n=1)
    return f" (did you mean {near[0]}?)" if near else ""


def unquoted(error: ValidationError, where: str) -> ProtocolError:
    """Say what is wrong with the first bad field from the wire, and quote nothing."""
    first = error.errors(include_url=False)[0]
    kind, value = first["type"], first["input"]
    expected = expectation(kind, first["msg"])[:100]
    got, expected = {
        "missing": ("nothing", expected),
        "extra_forbidden": ("an unknown field", "only those of the schema"),
        "dataclass_exact_type": (f"a value of type {type(value).__name__}", "a tensor"),
    }.get(kind, (describe_untrusted(value), expected))
    # The name of an unknown field is as little ours to repeat as its value.
    location = first["loc"][:-1] if kind == "extra_forbidden" else first["loc"]
    path = ".".join(["", *map(str, location)])
    return ProtocolError(f"{where}{path}", got, expected, code=ErrorCode.INVALID_FIELD)


def expectation(kind: str, message: str) -> str:
    """Turn one of pydantic's error types and messages into what follows "expected"."""
    fixed = {"missing": "a value", "extra_forbidden": "no such key"}
    return fixed.get(kind) or message.removeprefix("Input should be ").removeprefix("Value error, ")
