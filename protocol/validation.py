"""Checks fields against a model; what is wrong with the first one is said by `protocol.problems`.

`validate` is for fields from the wire, of which nothing is quoted; `validate_file` for those of a
person's own file.
"""

from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic_core import PydanticCustomError

from protocol.errors import InputError, ModelError, describe, shown

M = TypeVar("M", bound=BaseModel)


class Strict(BaseModel):
    """Base of what is read from a file or a peer: no unknown key, no conversion, no change."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


def validate(cls: type[M], fields: Mapping[str, Any], where: str) -> M:
    """Build a message model from decoded fields. Raises ProtocolError naming the first bad one."""
    try:
        return cls.model_validate(fields)
    except ValidationError as error:
        from protocol.problems import unquoted

        raise unquoted(error, where) from None


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
        from protocol.problems import first_problem

        problem = first_problem(refused)
        place = ": ".join(filter(None, (where, problem.field, problem.where)))
        raise error(place, problem.got, problem.expected) from None


def refusal(got: str, expected: str, where: str = "") -> PydanticCustomError:
    """Return an error for a validator that knows what it got better than pydantic does.

    `where`: beyond the field that is being validated. `protocol.problems` takes it apart again.
    """
    values = {"where": where, "got": got, "expected": expected}
    return PydanticCustomError("refusal", "{expected} (got {got})", values)
