"""Checks fields against a model, and says what is wrong with the first one that is.

`validate` is for fields from the wire, of which nothing is quoted; `validate_file` and
`first_problem` for those of a person's own file. What pydantic refuses is said in the words of our
own errors: where, got and expected.
"""

from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from typing import Any, NamedTuple, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic_core import PydanticCustomError

from protocol.errors import (
    ErrorCode,
    InputError,
    ModelError,
    ProtocolError,
    describe,
    describe_untrusted,
    shown,
)

M = TypeVar("M", bound=BaseModel)
_OURS = "refusal"


class Strict(BaseModel):
    """Base of what is read from a file or a peer: no unknown key, no conversion, no change."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


def validate(cls: type[M], fields: Mapping[str, Any], where: str) -> M:
    """Build a message model from decoded fields. Raises ProtocolError naming the first bad one."""
    try:
        return cls.model_validate(fields)
    except ValidationError as error:
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
        raise ProtocolError(f"{where}{path}", got, expected, code=ErrorCode.INVALID_FIELD) from None


def validate_file(
    cls: type[M], value: object, where: str, error: type[InputError] = ModelError
) -> M:
    """Build a model from the content of a file. Raises `error`, naming `where` and what is wrong.

    Of unknown keys only the first is looked at: pydantic would take some kilobytes for each.
    """
    if isinstance(value, dict):
        for key in value:
            if key not in cls.model_fields:
                raise error(f"{where}: {shown(str(key))}", describe(value[key]), "no such key")
    try:
        return cls.model_validate(value)
    except ValidationError as refused:
        problem = first_problem(refused)
        place = ": ".join(filter(None, (where, problem.field, problem.where)))
        raise error(place, problem.got, problem.expected) from None


def validate_known(cls: type[M], raw: Mapping[str, Any], where: str) -> M:
    """Build a model from the keys of a file that it has, as `validate_file`; others are skipped."""
    known = {name: raw[name] for name in cls.model_fields if name in raw}
    return validate_file(cls, known, where)


def refusal(got: str, expected: str, where: str = "") -> PydanticCustomError:
    """Return an error for a validator that knows what it got better than pydantic does.

    `where`: beyond the field that is being validated. `first_problem` takes it apart again.
    """
    values = {"where": where, "got": got, "expected": expected}
    return PydanticCustomError(_OURS, "{expected} (got {got})", values)


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
    if kind == _OURS:
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


def expectation(kind: str, message: str) -> str:
    """Turn one of pydantic's error types and messages into what follows "expected"."""
    fixed = {"missing": "a value", "extra_forbidden": "no such key"}
    return fixed.get(kind) or message.removeprefix("Input should be ").removeprefix("Value error, ")
