"""Checks fields from the wire against a message model, and says what is wrong without quoting."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from protocol.errors import ErrorCode, ProtocolError, describe_untrusted, expectation

M = TypeVar("M", bound=BaseModel)


def validate(cls: type[M], fields: Mapping[str, Any], where: str) -> M:
    """Build a message model from decoded fields. Raises ProtocolError naming the first bad one."""
    try:
        return cls.model_validate(fields)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        kind, value = first["type"], first["input"]
        got, expected = describe_untrusted(value), expectation(kind, first["msg"])[:100]
        location = first["loc"]
        if kind == "missing":
            got = "nothing"
        elif kind == "extra_forbidden":
            # The name of an unknown field is as little ours to repeat as its value.
            got, expected, location = "an unknown field", "only those of the schema", location[:-1]
        elif kind == "dataclass_exact_type":
            got, expected = f"a value of type {type(value).__name__}", "a tensor"
        path = ".".join(["", *(str(part) for part in location)])
        raise ProtocolError(
            f"{where}{path}", got=got, expected=expected, code=ErrorCode.INVALID_FIELD
        ) from None
